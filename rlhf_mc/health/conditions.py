"""The conditions of the health rules: functions of a step's metrics and of the steps before.
health/rules.yaml has the rules, with the conditions that are bounds alone. Pure Python.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from rlhf_mc.config.health_schema import HealthConfig

Side = Literal["above", "below"]
SCORE = "critic/score/mean"
HIGHEST = "critic/score/max"
LOWEST = "critic/score/min"
ENTROPY = "actor/entropy"
REF_KL = ("actor/reward_kl_penalty", "actor/controlled_kl", "actor/kl_loss")
_FEWEST = 5
"""Earlier steps that a median needs, or health.window if that is smaller."""
_FAR = 1.0
"""KL to the reference of a collapsed policy, nats per token, at least."""
TAIL = 10.0
"""Bound of the 99th percentile of log-prob differences, as a multiple of the mean's."""
COLLAPSE = 10.0
"""health.entropy_min divided by the entropy of a policy that gives one answer. A policy that had
less than entropy_min in the first step has not collapsed."""
REWARD_WINDOWS = 5
"""Windows over which reward_flat looks for a trend of the mean score."""
SATURATED_SHARE = 0.99
"""Share of the way from the lowest to the highest score that the run has seen at which the mean is
saturated."""
EQUAL_GROUPS_MAX = 0.9
"""Share of prompts whose responses may all score the same."""


@dataclass(frozen=True)
class Violation:
    """A metric outside of its bound in one step."""

    metric: str
    value: float
    bound: str
    """The bound in words."""
    setting: str = ""
    """The setting of the bound."""


@dataclass(frozen=True)
class RunTraits:
    """Properties of a run that the rules depend on, beside its metrics."""

    compares_groups: bool = False
    """The advantage estimator compares the responses to one prompt."""
    logprob_bound: float | None = None
    """Bound of the mean log-prob difference between rollout engine and trainer; None: they are not
    compared."""


class MetricHistory:
    """Metrics of the steps before the one that is checked."""

    def __init__(self, length: int) -> None:
        """length: number of steps that are stored."""
        self._series: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=length))
        self.first: dict[str, float] = {}
        """The first finite value of each metric."""
        self.lowest_score = math.inf
        """Lowest score of any response so far."""
        self.highest_score = -math.inf

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step."""
        for key, value in metrics.items():
            if math.isfinite(value):
                self._series[key].append(value)
                self.first.setdefault(key, value)
        if math.isfinite(low := metrics.get(LOWEST, math.nan)):
            self.lowest_score = min(self.lowest_score, low)
        if math.isfinite(high := metrics.get(HIGHEST, math.nan)):
            self.highest_score = max(self.highest_score, high)

    def last(self, key: str, count: int) -> list[float]:
        """Return up to `count` of the last finite values of a metric."""
        return list(self._series[key])[-count:]


@dataclass(frozen=True)
class Observed:
    """The input of a rule in one step."""

    metrics: Mapping[str, float]
    history: MetricHistory
    cfg: HealthConfig
    traits: RunTraits

    def get(self, key: str) -> float | None:
        """Return a metric, or None where it is missing or not finite."""
        value = self.metrics.get(key)
        return value if value is not None and math.isfinite(value) else None

    def before(self, key: str) -> list[float] | None:
        """Return the finite values of a metric in the window before; None if there are too
        few."""
        values = self.history.last(key, self.cfg.window)
        return values if len(values) >= min(_FEWEST, self.cfg.window) else None

    def outside(self, side: Side, bounds: Mapping[str, str | float]) -> Violation | None:
        """Return the first of the metrics that is on this side of its bound, a setting of health
        or a number."""
        for key, bound in bounds.items():
            setting = f"health.{bound}" if isinstance(bound, str) else ""
            number = getattr(self.cfg, bound) if isinstance(bound, str) else bound
            value = self.get(key)
            if value is not None and _is_beyond(side, value, number):
                return Violation(key, value, f"{side} {number:g}", setting)
        return None

    def beyond_median(self, side: Side, factors: Mapping[str, float]) -> Violation | None:
        """Return the first of the metrics that is above, or below, its factor times its median over
        the window before."""
        for key, factor in factors.items():
            value = self.get(key)
            before = self.before(key)
            if value is None or before is None:
                continue
            median = statistics.median(before)
            if _is_beyond(side, value, factor * median):
                return Violation(key, value, f"{side} {factor:g} x its median before, {median:.3g}")
        return None


def _is_beyond(side: Side, value: float, bound: float) -> bool:
    return value > bound if side == "above" else value < bound


def not_finite(seen: Observed) -> Violation | None:
    for key in ("actor/skipped", "critic/skipped"):
        if (share := seen.get(key)) is not None and share > 0:
            return Violation(key, share, "above 0")
    for key, value in seen.metrics.items():
        if not math.isfinite(value):
            return Violation(key, value, "not finite")
    return None


def policy_collapsed(seen: Observed) -> Violation | None:
    violation = seen.outside("below", {ENTROPY: seen.cfg.entropy_min / COLLAPSE})
    started = seen.history.first
    score = seen.get(SCORE)
    if violation is None or score is None or ENTROPY not in started or SCORE not in started:
        return None
    if started[ENTROPY] < seen.cfg.entropy_min or score > started[SCORE]:
        return None
    kls = [kl for key in REF_KL if (kl := seen.get(key)) is not None]
    # a run that begins with a trained policy has no entropy either: what counts is what it has lost
    if not kls:
        return (
            violation
            if score <= (started[SCORE] + min(seen.history.lowest_score, score)) / 2
            else None
        )
    return violation if max(kls) > _FAR else None


def _is_saturated(seen: Observed) -> bool:
    """Return whether the mean score is close to the highest score of any response, with lower ones
    before."""
    mean = seen.get(SCORE)
    high = seen.get(HIGHEST)
    low = seen.get(LOWEST)
    if mean is None or high is None or low is None:
        return False
    high = max(seen.history.highest_score, high)
    low = min(seen.history.lowest_score, low)
    return low < high and mean >= low + SATURATED_SHARE * (high - low)


def reward_constant(seen: Observed) -> Violation | None:
    high = seen.get(HIGHEST)
    low = seen.get(LOWEST)
    if high is None or low is None or high != low or _is_saturated(seen):
        return None
    return Violation(SCORE, high, "the score of every response")


def reward_flat(seen: Observed) -> Violation | None:
    """Compare the later half of the window with the earlier one: a trend is two standard errors of
    the difference."""
    now = seen.get(SCORE)
    count = REWARD_WINDOWS * seen.cfg.window
    scores = [*seen.history.last(SCORE, count - 1), *([] if now is None else [now])]
    if now is None or len(scores) < count or _is_saturated(seen):
        return None
    halves = scores[: count // 2], scores[count // 2 :]
    gain = statistics.fmean(halves[1]) - statistics.fmean(halves[0])
    error = math.sqrt(sum(statistics.variance(half) / len(half) for half in halves))
    words = f"no trend: {gain:+.3g} in {count // 2} steps"
    return Violation(SCORE, now, words, "health.window") if abs(gain) <= 2.0 * error else None


def reward_saturated(seen: Observed) -> Violation | None:
    if not _is_saturated(seen):
        return None
    high = max(seen.history.highest_score, seen.metrics[HIGHEST])
    return Violation(SCORE, seen.metrics[SCORE], f"the highest score is {high:g}")


def equal_groups(seen: Observed) -> Violation | None:
    if not seen.traits.compares_groups:
        return None
    ratios = ("train/dropped_groups_ratio", "train/equal_groups_ratio")
    return seen.outside("above", dict.fromkeys(ratios, EQUAL_GROUPS_MAX))


def rollout_mismatch(seen: Observed) -> Violation | None:
    bound = seen.traits.logprob_bound
    if bound is None:
        return None
    for name, limit in (("mean", bound), ("p99", TAIL * bound)):
        value = seen.get(key := f"training/rollout_logprobs_diff_{name}")
        if value is not None and value > limit:
            return Violation(key, value, f"above {limit:.3g}", "trainer.max_rollout_logprob_diff")
    return None


CONDITIONS: dict[str, Callable[[Observed], Violation | None]] = {
    function.__name__: function
    for function in (
        not_finite,
        policy_collapsed,
        reward_constant,
        reward_flat,
        reward_saturated,
        equal_groups,
        rollout_mismatch,
    )
}
"""By the name of the rule."""
