"""The records of rewards/: a row to score, its score, and the failure to score it. Penalties and
metrics of scores. No torch here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from rlhf_mc.config.masking import one_line
from rlhf_mc.config.reward_schema import OverlongBufferConfig
from rlhf_mc.rewards.registry import RULES

FailureKind = Literal["raised", "timeout", "exited", "invalid", "endpoint", "no_rule", "masked"]
"""raised: the function raised. timeout: no score in time. exited: its process ended. invalid: it
returned no finite number, or the wrong number of scores. endpoint: the remote endpoint gave no
score. no_rule: nothing scores the row. masked: MaskSample was raised."""
MASKED: FailureKind = "masked"
CUSTOM = "custom"
"""The part that custom_reward_function computes."""
REMOTE = "remote"
"""The part that the endpoint of reward.remote computes."""
DEFAULT = "default_score"
"""The part of a row that could not be scored."""
ENVIRONMENT = "environment"
"""The part that the environment of a conversation gives: the sum of its rewards."""
OVERLONG = "overlong"
"""The part of a score that is the penalty of a long response."""
FUNCTIONS = frozenset({*RULES, CUSTOM, REMOTE, ENVIRONMENT})
"""The parts that reward functions and environments compute. Reward models compute all others of a
mixture."""


@dataclass(frozen=True)
class Episode:
    """The rewards and numbers that the environment of a conversation has given."""

    rewards: Sequence[tuple[int, float]]
    """By turn: index of its last token among the sampled tokens, and reward. The first observation
    of `reset` has the index -1 and the reward 0."""
    info: Mapping[str, float]
    """Last value of each number that turns returned."""
    failed_calls: Mapping[FailureKind, int]
    """Unanswered turns and failed tool calls, by kind."""
    failure: FailureKind | None
    """Failure of the environment that ended the conversation; None: no failure."""
    default_score: float
    """Score after such a failure."""
    observations: Sequence[tuple[int, int]] = ()
    """Token range [start, end) of each observation in the response."""
    max_tokens: int | None = None
    """Maximum length of the present turn, by an agent's request; None: that of the settings."""
    contexts: Sequence[int] = ()
    """Indices of the observations with which a new context begins."""

    @property
    def num_turns(self) -> int:
        """Number of turns of the model that the environment has answered."""
        return sum(index >= 0 for index, _ in self.rewards)

    @property
    def is_masked(self) -> bool:
        """MaskSample was raised in the conversation, by the environment or by a tool."""
        return MASKED in self.failed_calls

    @property
    def score(self) -> float:
        """The sum of the rewards, or the default."""
        return (
            sum(reward for _, reward in self.rewards)
            if self.failure is None
            else self.default_score
        )

    def weighted(self, weight: float) -> Episode:
        """Return the episode with its rewards times a weight."""
        return replace(self, rewards=[(index, weight * reward) for index, reward in self.rewards])


@dataclass(frozen=True)
class RewardRow:
    """One response, with the arguments of its reward functions."""

    where: str
    """The row of the dataset, with its file, for messages."""
    data_source: str
    response: str
    ground_truth: Any
    extra_info: dict[str, Any]
    parts: Mapping[str, float]
    """Weights of the parts of the score by name (mixture.py). Those of reward models are added by
    the trainer."""
    prompt: str = ""
    """The prompt as text, for the remote endpoint alone."""
    episode: Episode | None = None
    """Rewards and numbers of the row's environment; None: no environment."""
    with_special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Response text with special tokens, by the part that reads them."""

    @property
    def name(self) -> str:
        """The row with its data source, for messages."""
        return f"{self.where} (data_source {self.data_source!r})"

    def arguments(self, part: str) -> dict[str, Any]:
        """Return the keyword arguments of a RewardFunction, which computes this part."""
        return {
            "data_source": self.data_source,
            "solution_str": self.with_special_tokens.get(part, self.response),
            "ground_truth": self.ground_truth,
            "extra_info": dict(self.extra_info),
        }


@dataclass(frozen=True)
class Score:
    """The score of one response and how it came about."""

    score: float
    """The sum of `parts`."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Contribution of each part by name: its weight times its score."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of the reward functions by name, such as "acc"."""
    pred: str | None = None
    """The answer that was found in the response, which maj@k counts ("" where there is none): by
    the rule, or "pred" of the user's function. None: neither names one."""
    failure: FailureKind | None = None
    """Not None: the response could not be scored, and `score` is reward.default_score; or its
    environment failed, and the part `environment` is rollout.environment.default_score."""
    episode: Episode | None = None
    """Environment's rewards times the part's weight; None: no environment, or not scored."""

    @property
    def is_masked(self) -> bool:
        """The response is not trained on: MaskSample was raised."""
        return self.failure == MASKED or (self.episode is not None and self.episode.is_masked)

    @property
    def by_functions(self) -> float:
        """The sum of the parts that reward functions gave, without reward models and `overlong`."""
        return sum(
            value for part, value in self.parts.items() if part in FUNCTIONS or part == DEFAULT
        )

    @property
    def accuracy(self) -> float:
        """The accuracy: "acc" if a reward function returned one, else the functions' part of the
        score."""
        return self.extra.get("acc", self.by_functions)

    def plus(self, part: str, contribution: float) -> Score:
        """Return the score with a further part. A row that could not be scored keeps its default
        score."""
        if self.failure is not None:
            return self
        return replace(
            self, score=self.score + contribution, parts={**self.parts, part: contribution}
        )


class FailureReason(NamedTuple):
    """A failure as a worker process sends it."""

    kind: FailureKind
    problem: str
    """One line, without the row."""
    origin: str | None = None
    """The setting that failed; None: the user's function or the rule."""


class Failure(Exception):
    """The reason why a row has no score. It is raised while the row is scored."""

    def __init__(
        self, kind: FailureKind, problem: str, origin: str | None = None, is_killed: bool = False
    ) -> None:
        """kind, problem, origin: as FailureReason has them. is_killed: its process was killed, for
        memory perhaps."""
        super().__init__(kind, problem, origin, is_killed)
        self.kind = kind
        self.problem = problem
        self.origin = origin
        self.is_killed = is_killed

    @property
    def reason(self) -> FailureReason:
        """Failure without the information about its process."""
        return FailureReason(self.kind, self.problem, self.origin)


class MaskSample(Failure):
    """Raised by a reward function, an environment or a tool whose response must not be trained on,
    such as one of a sandbox that has died."""

    def __init__(self, reason: object = "") -> None:
        super().__init__(MASKED, f"raised {type(self).__name__}: {one_line(str(reason))}")


# ---------------------------------------------------------------- scores of a step


def overlong_penalty(length: int, max_length: int, buffer_len: int, penalty_factor: float) -> float:
    """Return DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, equation 13), times
    penalty_factor: 0 up to max_length - buffer_len tokens, then linear, -penalty_factor at
    max_length. Lengths are in tokens."""
    excess = length - (max_length - buffer_len)
    return -penalty_factor * min(excess, buffer_len) / buffer_len if excess > 0 else 0.0


def penalize_overlong(
    scores: Sequence[Score],
    response_lens: Sequence[int],
    max_response_length: int,
    cfg: OverlongBufferConfig,
) -> list[Score]:
    """Return the scores with the part `overlong`. response_lens: tokens of each response."""
    return [
        score.plus(
            OVERLONG, overlong_penalty(length, max_response_length, cfg.len, cfg.penalty_factor)
        )
        for score, length in zip(scores, response_lens, strict=True)
    ]


def reward_metrics(data_sources: Sequence[str], scores: Sequence[Score]) -> dict[str, float]:
    """Return of each data source: score (mean, max, min), mean contribution of each part of the
    score, mean of each further number that a reward function returned, and the failures by kind.
    Masked responses count in the failures alone, unless all are. data_sources, scores: one entry
    per response."""
    by_source: dict[str, list[Score]] = defaultdict(list)
    for source, score in zip(data_sources, scores, strict=True):
        by_source[source].append(score)
    metrics: dict[str, float] = {
        "reward/num_failed": sum(score.failure is not None for score in scores)
    }
    metrics |= _turn_metrics([score.episode for score in scores if score.episode is not None])
    for source, responses in sorted(by_source.items()):
        group = [score for score in responses if not score.is_masked] or responses
        values = [score.score for score in group]
        metrics[f"critic/score/{source}/mean"] = sum(values) / len(values)
        metrics[f"critic/score/{source}/max"] = max(values)
        metrics[f"critic/score/{source}/min"] = min(values)
        for part, total in _sums(score.parts.items() for score in group).items():
            metrics[f"reward/{source}/{part}"] = total / len(group)
        times = Counter(name for score in group for name in score.extra)
        for name, total in _sums(score.extra.items() for score in group).items():
            metrics[f"reward_extra/{source}/{name}"] = total / times[name]
        for kind, count in sorted(
            Counter(score.failure for score in responses if score.failure).items()
        ):
            metrics[f"reward/{source}/num_failed/{kind}"] = count
    return metrics


def _turn_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the turns of the conversations, and the calls of their environments that failed, by
    kind."""
    if not episodes:
        return {}
    metrics = turn_counts(episodes)
    failed = _sums(episode.failed_calls.items() for episode in episodes)
    num_turns = sum(episode.num_turns for episode in episodes)
    metrics["environment/failed_calls"] = sum(failed.values())
    metrics["environment/failed_calls_ratio"] = sum(failed.values()) / max(1, num_turns)
    return metrics | {
        f"environment/failed_calls/{kind}": count for kind, count in sorted(failed.items())
    }


def turn_counts(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return mean, maximum and minimum of the conversations' turns; nothing without
    conversations."""
    nums = [episode.num_turns for episode in episodes]
    if not nums:
        return {}
    return {
        "num_turns/mean": sum(nums) / len(nums),
        "num_turns/max": max(nums),
        "num_turns/min": min(nums),
    }


def _sums(rows: Iterable[Iterable[tuple[str, float]]]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for row in rows:
        for name, value in row:
            sums[name] += value
    return sums
