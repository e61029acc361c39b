"""algorithm.filter_groups in the whole loop: groups of equal scores are dropped, layouts keep the
same groups, and a resume is bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import filter_cases
import numpy as np
import pytest
from tiny import make_workspace, write_config

N = 2
KEPT = 4
DRAWN = 6
STEPS = 3
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(map(ord, solution_str)) % 2)
"""
SECTIONS: dict[str, dict[str, Any]] = {
    "data": {"train_batch_size": KEPT, "gen_batch_size": DRAWN},
    "rollout": {"n": N},
    "algorithm": {
        "adv_estimator": "grpo",
        "filter_groups": {"enable": True, "max_num_gen_batches": 5},
    },
    "trainer": {
        "total_training_steps": STEPS,
        "save_freq": 1,
        "test_freq": -1,
        "val_before_train": False,
    },
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_workspace(tmp_path_factory.mktemp("filter_groups"), num_hidden_layers=2)
    (directory / "reward.py").write_text(REWARD)
    return write_config(directory, **SECTIONS)


@pytest.fixture(scope="module")
def on_two_ranks(pool: Any, config: Path) -> list[dict[str, Any]]:
    """Return each rank's result, with an engine of its own and the model replicated."""
    results: list[dict[str, Any]] = pool(2).run(
        filter_cases.train, config_path=str(config), overrides=[]
    )
    return results


def test_groups_of_equal_scores_are_dropped(
    config: Path, on_two_ranks: list[dict[str, Any]]
) -> None:
    first, second = on_two_ranks
    assert [step["step"] for step in first["steps"]] == [1, 2, 3]
    drawn = 0
    for step, other in zip(first["steps"], second["steps"], strict=True):
        assert all(step[key] == other[key] for key in ("prompts", "tokens", "scores")), (
            "the ranks decide alike"
        )
        scores = np.array(step["scores"]).reshape(KEPT, N)
        assert (scores.min(axis=1) == 0).all() and (scores.max(axis=1) == 1).all()
        metrics = step["metrics"]
        batches = metrics["train/num_gen_batches"]
        drawn += batches
        assert metrics["training/epoch"] == (drawn - 1) // (24 // DRAWN)
        kept = 1 - metrics["train/dropped_groups_ratio"] - metrics["train/surplus_groups_ratio"]
        assert kept == pytest.approx(KEPT / (DRAWN * batches))
        assert metrics["critic/score/mean"] == 0.5 and metrics["actor/grad_norm"] > 0
    means = [step["metrics"]["critic/score/arithmetic/mean"] for step in first["steps"]]
    assert set(means) != {0.5}, "the means of all responses, of dropped groups too"
    assert (
        drawn > STEPS
        and sum(step["metrics"]["train/dropped_groups_ratio"] for step in first["steps"]) > 0
    )
    rows = (config.parent / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(row)["train/num_gen_batches"] for row in rows) == drawn


def test_other_layout_keeps_the_same_groups(
    pool: Any, config: Path, on_two_ranks: list[dict[str, Any]]
) -> None:
    overrides = ["trainer.default_local_dir=" + str(config.parent / "one"), "trainer.save_freq=-1"]
    one = pool(1).run(filter_cases.train, config_path=str(config), overrides=overrides)[0]
    for step, other in zip(one["steps"], on_two_ranks[0]["steps"], strict=True):
        assert all(step[key] == other[key] for key in ("prompts", "tokens", "scores"))
        assert step["metrics"]["actor/loss"] == pytest.approx(
            other["metrics"]["actor/loss"], rel=1e-3, abs=1e-5
        )


def test_resume_is_bit_exact(pool: Any, config: Path, on_two_ranks: list[dict[str, Any]]) -> None:
    start = config.parent / "run" / "global_step_1"
    overrides = [f"trainer.default_local_dir={config.parent / 'resumed'}", "trainer.save_freq=-1"]
    overrides += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={start}"]
    results = pool(2).run(filter_cases.train, config_path=str(config), overrides=overrides)
    for resumed, whole in zip(results, on_two_ranks, strict=True):
        assert [step["step"] for step in resumed["steps"]] == [2, 3]
        for step, other in zip(resumed["steps"], whole["steps"][1:], strict=True):
            assert all(step[key] == other[key] for key in ("prompts", "tokens", "scores"))
            assert step["metrics"]["actor/loss"] == other["metrics"]["actor/loss"]
        assert len(resumed["last"]) == len(whole["last"]) > 0
        for (key, *_, mine), (same_key, *_, theirs) in zip(
            resumed["last"], whole["last"], strict=True
        ):
            assert key == same_key and np.array_equal(mine, theirs), key


def test_too_few_groups_end_the_run_after_a_save(
    pool: Any, config: Path, on_two_ranks: list[dict[str, Any]]
) -> None:
    start = config.parent / "run" / "global_step_2"
    (config.parent / "constant.py").write_text("def compute_score(**arguments):\n    return 1.0\n")
    directory = config.parent / "too_few"
    overrides = [f"trainer.default_local_dir={directory}", "trainer.save_freq=-1"]
    overrides += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={start}"]
    overrides += [f"custom_reward_function.path={config.parent / 'constant.py'}"]
    result = pool(1).run(filter_cases.train, config_path=str(config), overrides=overrides)[0]
    assert result["steps"] == [] and result["error"] == (
        "step 3: in 5 batches 0 of 30 groups have responses that differ in acc (the others have "
        "one value: 1 in 30), and data.train_batch_size is 4; "
        "algorithm.filter_groups.max_num_gen_batches is 5: raise it, or use prompts that the model "
        "answers partly right, a larger rollout.n or a smaller data.train_batch_size; the "
        "checkpoint of step 2 is complete"
    )
    assert (directory / "global_step_2").is_dir()
