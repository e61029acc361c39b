"""The steps after which validation, export and checkpoint are due, and the end of the run."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_mc.config.schema import TrainerConfig


@dataclass(frozen=True)
class StepSchedule:
    """The schedule of a run. A rank may call the methods by itself: all ranks get the same answers."""

    trainer: TrainerConfig
    total_steps: int
    has_val_prompts: bool

    def is_validation_due(self, step: int) -> bool:
        """Return whether trainer.test_freq asks for a validation after the step, or trainer.val_before_train for one
        before the first (step 0)."""
        if step == 0:
            return self.trainer.val_before_train and self.has_val_prompts
        freq = self.trainer.test_freq
        return freq > 0 and (step % freq == 0 or step == self.total_steps)

    def is_export_due(self, step: int) -> bool:
        """Return whether trainer.export_freq asks for an export after the step."""
        freq = self.trainer.export_freq
        return freq > 0 and step % freq == 0

    def is_save_due(self, step: int, accuracy: float | None) -> bool:
        """Return whether trainer.save_freq asks for a checkpoint of the step, with its validation accuracy if any."""
        freq = self.trainer.save_freq
        return freq > 0 and (step % freq == 0 or self.is_last(step, accuracy))

    def is_last(self, step: int, accuracy: float | None) -> bool:
        """Return whether the run ends after the step, with its validation accuracy if any."""
        return step >= self.total_steps or self.reaches_target(accuracy)

    def reaches_target(self, accuracy: float | None) -> bool:
        """Return whether a validation accuracy reaches trainer.target_val_acc. accuracy None: no validation."""
        target = self.trainer.target_val_acc
        return accuracy is not None and target is not None and accuracy >= target
