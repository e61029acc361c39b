"""The state of one step: its timer, and what its phases pass to later ones. The position of a run
between two steps, and the schedule of what is due after a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.config.roles import saves_checkpoints
from rlhf_mc.config.schema import TrainerConfig
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


@dataclass(frozen=True)
class StepSchedule:
    """The schedule of a run. A rank may call the methods by itself: all ranks get the same
    answers."""

    trainer: TrainerConfig
    total_steps: int
    """Steps of the run at most."""
    total_prompts: int
    """Position in the order of prompts at the end of trainer.total_epochs, where the run ends
    without trainer.total_training_steps."""
    has_val_prompts: bool

    @property
    def ends_by_epochs(self) -> bool:
        """The run ends with trainer.total_epochs."""
        return self.trainer.total_training_steps is None

    def is_first_validation_due(self) -> bool:
        """Return whether trainer.val_before_train asks for a validation before the first step."""
        return self.trainer.val_before_train and self.has_val_prompts

    def is_validation_due(self, step: int, num_prompts: int) -> bool:
        """Return whether trainer.test_freq asks for a validation after the step. num_prompts:
        position in the order of prompts so far."""
        freq = self.trainer.test_freq
        return freq > 0 and (step % freq == 0 or self.is_at_end(step, num_prompts))

    def is_export_due(self, step: int) -> bool:
        """Return whether trainer.export_freq asks for an export after the step."""
        freq = self.trainer.export_freq
        return freq > 0 and step % freq == 0

    def is_save_due(self, step: int, num_prompts: int, accuracy: float | None) -> bool:
        """Return whether trainer.save_freq asks for a checkpoint of the step, with its validation
        accuracy if any, or the end of the run does."""
        is_last = self.is_last(step, num_prompts, accuracy) and saves_checkpoints(self.trainer)
        return is_last or (self.trainer.save_freq > 0 and step % self.trainer.save_freq == 0)

    def kinds(self, saved: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the saved steps that trainer.save_freq asks for, and those that save_minutes
        does."""
        freq = self.trainer.save_freq
        of_freq = [
            step
            for step in saved
            if self.trainer.save_minutes is None or (freq > 0 and step % freq == 0)
        ]
        return of_freq, [step for step in saved if step not in of_freq]

    def milestone_before(self, step: int, saved: int | None) -> int | None:
        """Return the last step before this one that trainer.save_freq asked for: the last saved
        one, unless save_minutes saves others too. A roll-back depends on it, and must not depend on
        a clock."""
        freq = self.trainer.save_freq
        return (
            saved if self.trainer.save_minutes is None or freq == -1 else (step - 1) // freq * freq
        )

    def is_last(self, step: int, num_prompts: int, accuracy: float | None) -> bool:
        """Return whether the run ends after the step, with its validation accuracy if any."""
        return self.is_at_end(step, num_prompts) or self.reaches_target(accuracy)

    def is_at_end(self, step: int, num_prompts: int) -> bool:
        """Return whether the step is the last of trainer.total_training_steps, or has trained on
        the last prompt of trainer.total_epochs."""
        return (
            num_prompts >= self.total_prompts if self.ends_by_epochs else step >= self.total_steps
        )

    def reaches_target(self, accuracy: float | None) -> bool:
        """Return whether a validation accuracy reaches trainer.target_val_acc. accuracy None: no
        validation."""
        target = self.trainer.target_val_acc
        return accuracy is not None and target is not None and accuracy >= target
