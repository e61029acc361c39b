"""adjustments.jsonl: from which step each change of a setting is in effect, also after a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_mc.config.errors import UserError
from rlhf_mc.health.adjustments import Adjustment, Adjustments
from rlhf_mc.trainer.token_budget import TokenBudget


def reread(directory: Path) -> Adjustments:
    found = Adjustments(directory)
    found.load()
    return found


def test_learning_rate_factors_multiply_from_their_step_on(tmp_path: Path) -> None:
    made = Adjustments(tmp_path)
    for step in (8, 4):
        made.add(Adjustment("learning_rate_factor", 0.5, step, f"KL at step {step}"))
    found = reread(tmp_path)
    assert [found.learning_rate_factor(step) for step in (4, 5, 8, 9)] == [1.0, 0.5, 0.5, 0.25]
    assert found.in_effect(8) == [
        (
            "learning rates are those of the config times 0.25 (adjustments.jsonl; without the "
            "file they are the config's)"
        )
    ]
    assert found.in_effect(3) == []
    # A deterministic fault has the same text each time that the run is rolled back.
    found.add(Adjustment("learning_rate_factor", 0.5, 8, "KL at step 8"))
    assert (
        reread(tmp_path).learning_rate_factor(9) == 0.125
        and reread(tmp_path).num_made("learning_rate_factor") == 3
    )
    assert found.kl_coef(9) is None and found.max_token_len("update_actor", 9, 0) is None


def test_last_kl_coefficient_holds(tmp_path: Path) -> None:
    made = Adjustments(tmp_path)
    made.add(Adjustment("kl_coef", 0.1, 3, "KL"))
    made.add(Adjustment("kl_coef", 0.2, 5, "KL"))
    assert [reread(tmp_path).kl_coef(step) for step in (3, 4, 5, 6)] == [None, 0.1, 0.1, 0.2]


def test_token_budget_is_of_one_phase_and_from_one_update_on(tmp_path: Path) -> None:
    budget = TokenBudget("critic", 7, 512, 100, Adjustments(tmp_path))
    budget.halve(2, rank=1)
    resumed = reread(tmp_path)
    for step, updates in {6: [512, 512], 7: [512, 256], 8: [256, 256]}.items():
        of_step = TokenBudget("critic", step, 512, 100, resumed)
        assert [of_step.update_limit(0), of_step.update_limit(2)] == updates
    assert TokenBudget("actor", 8, 512, 100, resumed).update_limit(0) == 512
    assert TokenBudget("critic", 8, 128, 100, resumed).update_limit(0) == 128, (
        "a resumed run may have a smaller one"
    )
    budget.halve(2, rank=1)
    budget.halve(2, rank=1)
    assert budget.update_limit(2) == 100, "not below the longest sequence"
    with pytest.raises(
        UserError,
        match=r"^critic: rank 1 is out of memory in update 3 of step 7, with micro-batches of 100 "
        r"tokens; "
        r"lower critic.ppo_max_token_len_per_gpu, or",
    ):
        budget.halve(2, rank=1)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '{"setting": "lr", "value": 1, "after_step": 1, "reason": ""}',
        '{"setting": "kl_coef"}',
        '{"setting": "kl_coef", "value": NaN, "after_step": 1, "reason": ""}',
    ],
)
def test_a_line_that_was_edited_is_named(tmp_path: Path, line: str) -> None:
    Adjustments(tmp_path).add(Adjustment("kl_coef", 0.1, 3, "KL"))
    path = tmp_path / "adjustments.jsonl"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UserError, match=r"adjustments.jsonl, line 2: not an adjustment"):
        reread(tmp_path)


def test_line_separator_within_a_text_ends_no_line(tmp_path: Path) -> None:
    row = {"setting": "kl_coef", "value": 0.1, "after_step": 3, "reason": "a\u2028b\u0085c"}
    (tmp_path / "adjustments.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n")
    assert reread(tmp_path).kl_coef(4) == 0.1
