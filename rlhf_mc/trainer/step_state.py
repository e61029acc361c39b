"""The state of one step: its timer, and what its phases pass to later ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlhf_mc import platform
from rlhf_mc.data.batch import Prompt, RaggedBatch
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.rewards.results import Score
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.topology.consensus import start_max_over_ranks


@dataclass
class StepState:
    """The state of one step that its phases share."""

    step: int
    """1 for the first; 0 before it."""
    timer: PhaseTimer
    metrics: dict[str, float] = field(default_factory=dict)
    num_batches: int = 0
    """Batches of prompts that the run has drawn so far."""
    num_rollouts: int = 0
    """Rollouts of this step that were replayed (trainer.replay)."""
    num_generated: int = 0
    """Response tokens that this step has generated, greedy ones included."""
    drawn: Counter[int] = field(default_factory=Counter)
    """Number of times that this step has drawn each prompt, by its index."""
    prompts: Sequence[Prompt] = ()
    """The prompt of each response of this step's batch."""
    scores: Sequence[Score] = ()
    """The score of each response of this step's batch, with its parts."""
    greedy: RaggedBatch | None = None
    """One response to each prompt at temperature 0, if the advantage estimator needs its score."""
    slowest: dict[str, Callable[[], float]] = field(default_factory=dict)
    """By `timing_s/<phase>` the function that returns the seconds of the slowest rank."""


def begin_step(step: int, status: RankStatus, num_batches: int | None = None) -> StepState:
    """Return the state of a new step, whose timer keeps `status` up to date. num_batches: batches of prompts that
    earlier steps have drawn; None: one each."""
    status.step = step
    num_batches = max(step - 1, 0) if num_batches is None else num_batches
    return StepState(step, PhaseTimer(platform.synchronize, status), num_batches=num_batches)


def start_slowest_rank(state: StepState, phase: str) -> None:
    """Start to compute the time of a phase that has ended on its slowest rank. Only phases at whose end no rank waits
    for the others need it. Every rank must call it."""
    key = f"timing_s/{phase}"
    state.slowest[key] = start_max_over_ranks(state.timer.result()[key])


def slowest_rank_times(state: StepState) -> dict[str, float]:
    """Return `timing_s/<phase>` of the slowest rank, of the phases of `start_slowest_rank`. Every rank must call it."""
    return {key: seconds() for key, seconds in state.slowest.items()}
