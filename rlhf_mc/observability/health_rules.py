"""The health rules as data: what each reads, when it holds, what that means, and which setting to turn. Bounds are in
config/health_schema.py; counting steps and saying so is in health.py. Pure Python.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from rlhf_mc.config.health_schema import HealthConfig

SCORE = "critic/score/mean"
HIGHEST = "critic/score/max"
LOWEST = "critic/score/min"
ENTROPY = "actor/entropy"
PPO_KL = "actor/ppo_kl"
REF_KL = ("actor/reward_kl_penalty", "actor/controlled_kl", "actor/kl_loss")
THROUGHPUT = "perf/throughput"
GRAD_NORMS = ("actor/grad_norm", "critic/grad_norm")
_REMEMBERED = (SCORE, ENTROPY, THROUGHPUT, *GRAD_NORMS)
"""Metrics whose earlier values rules read."""
_FEWEST = 5
"""Earlier steps that a moving average or a median needs."""
_TAIL = 10.0
"""Bound of the 99th percentile of log-prob differences, as a multiple of the mean's (trainer/logprob_check.py)."""
_COLLAPSED_FROM = 10.0
"""A policy that had less than this multiple of entropy_collapse in the first step has not collapsed."""


@dataclass(frozen=True)
class Finding:
    """A metric outside of its bound in one step."""

    metric: str
    value: float
    bound: str
    """The bound in words, with its setting."""


@dataclass(frozen=True)
class Facts:
    """Properties of a run that the rules depend on, beside its metrics."""

    updates_per_step: int = 1
    """Optimizer steps of the actor in one step."""
    compares_groups: bool = False
    """The advantage estimator compares the responses to one prompt."""
    logprob_bound: float | None = None
    """Bound of the mean log-prob difference between vLLM and trainer; None: they are not compared."""


class Past:
    """The steps before the one that is checked."""

    def __init__(self, length: int) -> None:
        """length: steps that are remembered."""
        self._series: dict[str, deque[float]] = {key: deque(maxlen=length) for key in _REMEMBERED}
        self.first: dict[str, float] = {}
        """The first finite value of each remembered metric."""
        self.lowest_score = math.inf
        """Of any response so far."""
        self.highest_score = -math.inf

    def add(self, metrics: Mapping[str, float]) -> None:
        """Remember a step."""
        for key, series in self._series.items():
            if key in metrics and math.isfinite(metrics[key]):
                series.append(metrics[key])
                self.first.setdefault(key, metrics[key])
        if math.isfinite(low := metrics.get(LOWEST, math.nan)):
            self.lowest_score = min(self.lowest_score, low)
        if math.isfinite(high := metrics.get(HIGHEST, math.nan)):
            self.highest_score = max(self.highest_score, high)

    def last(self, key: str, count: int) -> list[float]:
        """Return up to `count` of the last values of a remembered metric."""
        return list(self._series[key])[-count:]


@dataclass(frozen=True)
class Observed:
    """The input of a rule in one step."""

    metrics: Mapping[str, float]
    past: Past
    cfg: HealthConfig
    facts: Facts

    def get(self, key: str) -> float | None:
        """Return a metric, or None where it is missing or not finite."""
        value = self.metrics.get(key)
        return value if value is not None and math.isfinite(value) else None

    def above(self, setting: str, *keys: str) -> Finding | None:
        """Return the first of the metrics that is above its bound, a setting of health."""
        return self._outside(setting, "above", lambda value, bound: value > bound, keys)

    def below(self, setting: str, *keys: str) -> Finding | None:
        """Return the first of the metrics that is below its bound, a setting of health."""
        return self._outside(setting, "below", lambda value, bound: value < bound, keys)

    def _outside(
        self, setting: str, side: str, is_outside: Callable[[float, float], bool], keys: tuple[str, ...]
    ) -> Finding | None:
        bound = getattr(self.cfg, setting)
        for key in keys:
            value = self.get(key)
            if value is not None and is_outside(value, bound):
                return Finding(key, value, f"{side} {bound:g} (health.{setting})")
        return None


Check = Callable[[Observed], Finding | None]


@dataclass(frozen=True)
class Rule:
    """A rule on the metrics of a step."""

    name: str
    metrics: tuple[str, ...]
    """The metrics that it reads, for the page of rules."""
    check: Check
    meaning: str
    setting: str
    """The setting to turn, and in which direction."""
    after: Literal["at once", "patience", "window"] = "patience"
    """The consecutive steps after which it counts: one, health.patience or health.window."""
    harms_policy: bool = False
    """The weights of a step in which it holds are nothing to go back to."""

    def steps_needed(self, cfg: HealthConfig) -> int:
        """Return the consecutive steps after which the rule counts."""
        return {"at once": 1, "patience": cfg.patience, "window": cfg.window}[self.after]


def _not_finite(seen: Observed) -> Finding | None:
    for key in ("actor/skipped", "critic/skipped"):
        if (share := seen.get(key)) is not None and share > 0:
            return Finding(key, share, "above 0")
    for key, value in seen.metrics.items():
        if not math.isfinite(value):
            return Finding(key, value, "not finite")
    return None


def _kl_explosion(seen: Observed) -> Finding | None:
    return seen.above("ppo_kl_explosion", PPO_KL) or seen.above("ref_kl_max", *REF_KL)


def _policy_collapsed(seen: Observed) -> Finding | None:
    found = seen.below("entropy_collapse", ENTROPY)
    started = seen.past.first
    score = seen.get(SCORE)
    if found is None or score is None or ENTROPY not in started or SCORE not in started:
        return None
    if started[ENTROPY] < _COLLAPSED_FROM * seen.cfg.entropy_collapse or score > started[SCORE]:
        return None
    measures_kl = any(seen.get(key) is not None for key in REF_KL)
    return found if not measures_kl or seen.above("ref_kl_max", *REF_KL) else None


def _ppo_kl_low(seen: Observed) -> Finding | None:
    return seen.below("ppo_kl_min", PPO_KL) if seen.facts.updates_per_step > 1 else None


def _grad_norm_growing(seen: Observed) -> Finding | None:
    factor = seen.cfg.grad_norm_growth
    for key in GRAD_NORMS:
        now = seen.get(key)
        before = seen.past.last(key, seen.cfg.window)
        if now is not None and len(before) >= _FEWEST and now > factor * (median := statistics.median(before)):
            return Finding(key, now, f"above {factor:g} x {median:.3g}, the median before (health.grad_norm_growth)")
    return None


def _entropy_falling(seen: Observed) -> Finding | None:
    now = seen.get(ENTROPY)
    before = seen.past.last(ENTROPY, seen.cfg.window)
    if now is None or len(before) < _FEWEST:
        return None
    bound = (1.0 - seen.cfg.entropy_drop) * statistics.fmean(before)
    words = (
        f"below {bound:.3g}, {1.0 - seen.cfg.entropy_drop:g} of its mean of {len(before)} steps (health.entropy_drop)"
    )
    return Finding(ENTROPY, now, words) if now < bound else None


def _is_saturated(seen: Observed) -> bool:
    """Return whether the mean score is close to the highest score of any response, with lower ones before."""
    mean = seen.get(SCORE)
    high = seen.get(HIGHEST)
    low = seen.get(LOWEST)
    if mean is None or high is None or low is None:
        return False
    high = max(seen.past.highest_score, high)
    low = min(seen.past.lowest_score, low)
    return low < high and mean >= low + seen.cfg.saturated_share * (high - low)


def _reward_constant(seen: Observed) -> Finding | None:
    high = seen.get(HIGHEST)
    low = seen.get(LOWEST)
    if high is None or low is None or high != low or _is_saturated(seen):
        return None
    return Finding(SCORE, high, "the score of every response")


def _reward_flat(seen: Observed) -> Finding | None:
    """Compare the later half of the window with the earlier one: a trend is two standard errors of the difference."""
    now = seen.get(SCORE)
    count = seen.cfg.reward_window
    scores = [*seen.past.last(SCORE, count - 1), *([] if now is None else [now])]
    if now is None or len(scores) < count or _is_saturated(seen):
        return None
    halves = scores[: count // 2], scores[count // 2 :]
    gain = statistics.fmean(halves[1]) - statistics.fmean(halves[0])
    error = math.sqrt(sum(statistics.variance(half) / len(half) for half in halves))
    words = f"{gain:+.3g} in {count // 2} steps, within two standard errors (health.reward_window)"
    return Finding(SCORE, now, words) if abs(gain) <= 2.0 * error else None


def _reward_saturated(seen: Observed) -> Finding | None:
    if not _is_saturated(seen):
        return None
    high = max(seen.past.highest_score, seen.metrics[HIGHEST])
    return Finding(SCORE, seen.metrics[SCORE], f"the highest score is {high:g} (health.saturated_share)")


def _equal_groups(seen: Observed) -> Finding | None:
    if not seen.facts.compares_groups:
        return None
    return seen.above("equal_groups_max", "train/dropped_groups_ratio", "train/equal_groups_ratio")


def _rollout_mismatch(seen: Observed) -> Finding | None:
    bound = seen.facts.logprob_bound
    if bound is None:
        return None
    for name, limit in (("mean", bound), ("p99", _TAIL * bound)):
        value = seen.get(key := f"training/rollout_logprobs_diff_{name}")
        if value is not None and value > limit:
            return Finding(key, value, f"above {limit:.3g} (trainer.max_rollout_logprob_diff)")
    return None


def _throughput_falling(seen: Observed) -> Finding | None:
    now = seen.get(THROUGHPUT)
    before = seen.past.last(THROUGHPUT, seen.cfg.window)
    if now is None or len(before) < _FEWEST:
        return None
    bound = seen.cfg.throughput_min * statistics.median(before)
    words = f"below {bound:.4g}, {seen.cfg.throughput_min:g} of the run's median (health.throughput_min)"
    return Finding(THROUGHPUT, now, words) if now < bound else None


RULES: tuple[Rule, ...] = (
    Rule(
        "not_finite",
        ("any metric", "actor/skipped", "critic/skipped"),
        _not_finite,
        "a loss, gradient, reward or weight overflowed, or a reward function returned no number",
        "lower actor.optim.lr or critic.optim.lr; nonfinite_step_N.json has the samples of a skipped update",
        after="at once",
        harms_policy=True,
    ),
    Rule(
        "kl_explosion",
        (PPO_KL, *REF_KL),
        _kl_explosion,
        "an update has thrown the policy far from the one that sampled, or from the reference; it seldom returns",
        "lower actor.optim.lr (with warmup), raise algorithm.kl_ctrl.kl_coef; go back to an earlier checkpoint",
        after="at once",
        harms_policy=True,
    ),
    Rule(
        "policy_collapsed",
        (ENTROPY, SCORE, *REF_KL),
        _policy_collapsed,
        "the policy gives one answer to everything and scores no better than at the start: it learns nothing more",
        "go back to a checkpoint before (trainer.resume_from_path) with a lower actor.optim.lr",
        harms_policy=True,
    ),
    Rule(
        "ppo_kl_high",
        (PPO_KL,),
        lambda seen: seen.above("ppo_kl_max", PPO_KL),
        "the policy moves far within a step, so that old samples train a new policy",
        "lower actor.optim.lr or actor.ppo_epochs, or raise actor.ppo_mini_batch_size",
    ),
    Rule(
        "ppo_kl_low",
        (PPO_KL,),
        _ppo_kl_low,
        "the updates hardly move the policy: training is safe, and slower than it need be",
        "raise actor.optim.lr or actor.ppo_epochs, if the reward rises slowly",
        after="window",
    ),
    Rule(
        "grad_norm_high",
        GRAD_NORMS,
        lambda seen: seen.above("grad_norm_max", *GRAD_NORMS),
        "most gradients are clipped by optim.clip_grad: noisy advantages, a new value head, or a small model",
        "raise data.train_batch_size or lower optim.lr, if the reward is unsteady",
    ),
    Rule(
        "grad_norm_growing",
        GRAD_NORMS,
        _grad_norm_growing,
        "gradients grow by a multiple: the policy or the critic is leaving the region where it was stable",
        "lower optim.lr of that model, and look at actor/ppo_kl and the longest responses",
    ),
    Rule(
        "grad_norm_low",
        GRAD_NORMS,
        lambda seen: seen.below("grad_norm_min", *GRAD_NORMS),
        "little signal reaches the weights: advantages near 0, saturated rewards, or long responses",
        "see equal_groups and reward_saturated; a model of billions of parameters is often below",
        after="window",
    ),
    Rule(
        "entropy_falling",
        (ENTROPY,),
        _entropy_falling,
        "the policy becomes deterministic quickly, and soon explores nothing",
        "raise actor.entropy_coeff or actor.clip_ratio_high, lower actor.optim.lr",
    ),
    Rule(
        "entropy_low",
        (ENTROPY,),
        lambda seen: seen.below("entropy_min", ENTROPY),
        "samples of a prompt are nearly all alike: no exploration is left",
        "raise actor.entropy_coeff or rollout.temperature, or end the run if the reward is high",
        after="window",
    ),
    Rule(
        "vf_clipfrac_high",
        ("critic/vf_clipfrac",),
        lambda seen: seen.above("vf_clipfrac_max", "critic/vf_clipfrac"),
        "values move further than the clip range in one step, so that the critic learns slower than it could",
        "raise critic.cliprange_value, or lower critic.optim.lr",
    ),
    Rule(
        "explained_variance_low",
        ("critic/vf_explained_var",),
        lambda seen: seen.below("explained_variance_min", "critic/vf_explained_var"),
        "the critic predicts the returns worse than a constant: advantages are noisier than without it",
        "raise critic.optim.lr, critic.ppo_epochs or trainer.critic_warmup, or take an estimator without a critic",
        after="window",
    ),
    Rule(
        "truncated",
        ("response_length/clip_ratio",),
        lambda seen: seen.above("truncated_max", "response_length/clip_ratio"),
        "answers are cut off before they end, and are mostly scored as wrong",
        "raise data.max_response_length, or set reward.overlong_buffer.len to shorten answers",
    ),
    Rule(
        "reward_constant",
        (HIGHEST, LOWEST),
        _reward_constant,
        "every response scores the same, so that there is nothing to learn from",
        "check the reward function on generations/ and the answer format; easier prompts or a larger rollout.n",
    ),
    Rule(
        "reward_flat",
        (SCORE,),
        _reward_flat,
        "the mean score has no trend: the run has converged, or does not learn",
        "raise actor.optim.lr or lower algorithm.kl_ctrl.kl_coef; look at equal_groups and the advantages",
    ),
    Rule(
        "reward_saturated",
        (SCORE, HIGHEST, LOWEST),
        _reward_saturated,
        "nearly every response has the highest score: the prompts teach nothing more",
        "end the run (trainer.target_val_acc), or take harder prompts; check that the reward is not exploited",
    ),
    Rule(
        "equal_groups",
        ("train/equal_groups_ratio", "train/dropped_groups_ratio"),
        _equal_groups,
        "most prompts have responses of one score: their advantages are 0, and the batch is smaller than it seems",
        "raise rollout.n or rollout.temperature, set algorithm.filter_groups.enable, or change the prompts' difficulty",
    ),
    Rule(
        "rollout_mismatch",
        ("training/rollout_logprobs_diff_mean", "training/rollout_logprobs_diff_p99"),
        _rollout_mismatch,
        "vLLM samples from another policy than the trainer's: a weight update or a kernel is wrong, or too inexact",
        "reshard.verify=always, rollout.quantization=null, or algorithm.rollout_correction.rollout_is",
        after="at once",
    ),
    Rule(
        "throughput_falling",
        (THROUGHPUT,),
        _throughput_falling,
        "steps take longer than they did: another program, a throttled GPU, slow storage, or one slow rank",
        "compare the timing_s/* of this step and earlier ones (docs/debugging.md)",
    ),
    Rule(
        "replicas_unbalanced",
        ("global_seqlen/idle_share",),
        lambda seen: seen.above("idle_share_max", "global_seqlen/idle_share"),
        "data-parallel replicas wait for the one with the longest sequences",
        "raise data.train_batch_size or actor.ppo_mini_batch_size, or use fewer replicas with more tensor parallelism",
    ),
    Rule(
        "memory_near_limit",
        ("perf/memory_used_ratio",),
        lambda seen: seen.above("memory_max", "perf/memory_used_ratio"),
        "a longer batch may end the run, out of memory",
        "lower actor.ppo_max_token_len_per_gpu or rollout.gpu_memory_utilization, or offload (docs/planner.md)",
        after="at once",
    ),
)
"""All rules, in the order in which their lines are printed."""
