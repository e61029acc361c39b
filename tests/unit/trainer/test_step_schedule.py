"""When validation, export and checkpoints are due, and when a run ends."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_mc.config.schema import TrainerConfig
from rlhf_mc.trainer.step_state import StepSchedule

STEPS = 7


def schedule(has_val_prompts: bool = True, **settings: Any) -> StepSchedule:
    return StepSchedule(
        TrainerConfig(default_local_dir="", **settings), STEPS, STEPS, has_val_prompts
    )


@pytest.mark.parametrize(
    ("freq", "steps"), [(-1, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (9, [7])]
)
def test_validation_is_due_every_test_freq_steps_and_after_the_last(
    freq: int, steps: list[int]
) -> None:
    found = schedule(test_freq=freq)
    assert [step for step in range(1, STEPS + 1) if found.is_validation_due(step, step)] == steps


def test_validation_before_training_needs_prompts() -> None:
    assert schedule(val_before_train=True).is_first_validation_due()
    assert not schedule(val_before_train=False).is_first_validation_due()
    assert not schedule(has_val_prompts=False, val_before_train=True).is_first_validation_due()


def test_export_is_due_every_export_freq_steps() -> None:
    assert [
        step for step in range(1, STEPS + 1) if schedule(export_freq=3).is_export_due(step)
    ] == [3, 6]
    assert not any(schedule(export_freq=-1).is_export_due(step) for step in range(1, STEPS + 1))


def test_checkpoint_is_due_every_save_freq_steps_and_at_the_end() -> None:
    found = schedule(save_freq=3, test_freq=1, target_val_acc=0.5)
    assert [step for step in range(1, STEPS + 1) if found.is_save_due(step, step, None)] == [
        3,
        6,
        7,
    ]
    assert found.is_save_due(4, 4, 0.5) and not found.is_save_due(4, 4, 0.4)
    assert not any(
        schedule(save_freq=-1).is_save_due(step, step, 1.0) for step in range(1, STEPS + 1)
    )


def test_checkpoints_of_save_minutes_are_kept_apart() -> None:
    """Check too that a roll-back does not depend on them."""
    assert schedule(save_freq=3).kinds([2, 3, 6]) == ([2, 3, 6], [])
    assert schedule(save_freq=3, save_minutes=1).kinds([2, 3, 5, 6]) == ([3, 6], [2, 5])
    assert schedule(save_minutes=1).kinds([2, 3]) == ([], [2, 3])
    assert [schedule(save_freq=3).milestone_before(step, 5) for step in (6, 7)] == [5, 5]
    assert [
        schedule(save_freq=3, save_minutes=1).milestone_before(step, 5) for step in (3, 4, 6, 7)
    ] == [0, 3, 3, 6]
    assert [step for step in (6, 7) if schedule(save_minutes=1).is_save_due(step, step, None)] == [
        7
    ]


def test_run_ends_with_its_last_step_or_at_its_target() -> None:
    found = schedule(test_freq=1, target_val_acc=0.5)
    assert [step for step in range(STEPS + 3) if found.is_last(step, step, None)] == [7, 8, 9]
    assert found.is_last(2, 2, 0.5) and found.is_last(2, 2, 0.6) and not found.is_last(2, 2, 0.4)
    assert not schedule(target_val_acc=None).is_last(2, 2, 1.0)


def test_run_of_epochs_ends_when_their_prompts_are_drawn() -> None:
    """Draw several batches in a step, as algorithm.filter_groups does: there are fewer steps
    then."""
    found = schedule(test_freq=5, save_freq=5)
    drawn = {1: 3, 2: 6, 3: 9}
    assert [step for step, count in drawn.items() if found.is_last(step, count, None)] == [3]
    assert [step for step, count in drawn.items() if found.is_validation_due(step, count)] == [3]
    assert [step for step, count in drawn.items() if found.is_save_due(step, count, None)] == [3]
    by_steps = schedule(total_training_steps=STEPS)
    assert [step for step in range(1, STEPS + 1) if by_steps.is_last(step, 3 * step, None)] == [
        STEPS
    ]
