"""The steps after which validation, export and checkpoint are due, and the end of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_mc.config.roles import saves_checkpoints
from rlhf_mc.config.schema import TrainerConfig


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
