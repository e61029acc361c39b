"""The state of one step: its timer, and what its phases pass to later ones. The position of a run
between two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.data.batch import Prompt, RaggedBatch
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.rewards.results import Score
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.topology.consensus import start_max_over_ranks


@dataclass
class Position:
    """The position of a run between two steps, without its models."""

    step: int = 0
    """The last complete step."""
    num_prompts: int = 0
    """Position in the order of prompts (data/order.py) after the prompts that steps up to this one
    have drawn. Groups in the pool do not count; groups dropped as too stale do."""
    accuracy: float | None = None
    """Mean validation accuracy after that step; None without a validation."""
    best_step: int | None = None
    """The saved step of the highest trainer.best_metric, the latest of equal ones."""
    best_accuracy: float | None = None
    """That step's trainer.best_metric."""
    best_metric: str | None = None
    """The trainer.best_metric of best_accuracy."""
    last_healthy_step: int | None = None
    """The latest saved step after which the next one was healthy too: the metrics of a step show
    the weights before its updates."""


@dataclass
class StepState:
    """The state of one step that its phases share."""

    step: int
    """1 for the first; 0 before it."""
    timer: PhaseTimer
    metrics: dict[str, float] = field(default_factory=dict)
    num_prompts: int = 0
    """Position in the order of prompts (data/order.py) after the prompts that the run has drawn so
    far."""
    num_rollouts: int = 0
    """Rollouts of this step that were replayed (trainer.replay)."""
    num_generated: int = 0
    """Response tokens that this step has generated, greedy ones included."""
    draws: Counter[int] = field(default_factory=Counter)
    """Draws of each prompt in this step, by its index."""
    prompts: Sequence[Prompt] = ()
    """The prompt of each response of this step's batch."""
    scores: Sequence[Score] = ()
    """The score of each response of this step's batch, with its parts."""
    greedy: RaggedBatch | None = None
    """One response to each prompt at temperature 0, if the advantage estimator needs its score."""
    idle_seconds: dict[str, float] = field(default_factory=dict)
    """By pool the seconds that its ranks have waited for the other one, on average."""
    sent: list[dist.Work] = field(default_factory=list)
    """Scores of models of the rollout pool that this rank has begun to send."""
    slowest: dict[str, Callable[[], float]] = field(default_factory=dict)
    """By `timing_s/<phase>` the function that returns the seconds of the slowest rank."""


def begin_step(step: int, status: RankStatus, num_prompts: int = 0) -> StepState:
    """Return the state of a new step, whose timer keeps `status` up to date. num_prompts: position
    in the order of prompts after those that earlier steps have drawn."""
    status.step = step
    return StepState(step, PhaseTimer(platform.synchronize, status), num_prompts=num_prompts)


def start_slowest_rank(state: StepState, phase: str, group: dist.ProcessGroup) -> None:
    """Start to compute the time of a phase that has ended on the slowest rank of the group. Only
    phases at whose end no rank waits for the others need it. Every rank of the group must call
    it."""
    key = f"timing_s/{phase}"
    state.slowest[key] = start_max_over_ranks(state.timer.result()[key], group)


def slowest_rank_times(state: StepState) -> dict[str, float]:
    """Return `timing_s/<phase>` of the slowest rank, of the phases of `start_slowest_rank`. Every
    rank must call it."""
    return {key: seconds() for key, seconds in state.slowest.items()}
