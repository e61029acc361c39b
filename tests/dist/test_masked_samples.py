"""Responses that are not trained on, in the whole loop: whatever their score is, it changes no
weight, and no update has them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import filter_cases
import numpy as np
import pytest
from tiny import make_workspace, write_config

N = 2
PROMPTS = 8
REWARD = """
from rlhf_mc.rewards.results import MaskSample

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if int(ground_truth) % 5 == 0 or sum(map(ord, solution_str)) % 4 == 0:
        raise MaskSample("no service")
    return float(sum(map(ord, solution_str)) % 3)
"""
GRPO = [
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=false",
    "algorithm.kl_ctrl.type=fixed",
]
ONE_UPDATE = ["actor.ppo_epochs=1", f"actor.ppo_mini_batch_size={PROMPTS}", "rollout.n=4"]
RUNS = {
    "gae": ["algorithm.kl_ctrl.type=fixed"],
    "gae_overlong": ["algorithm.overlong_filtering=true"],
    "grpo_one_update": [*GRPO, *ONE_UPDATE],
    "grpo_filter_groups": [
        *GRPO,
        "algorithm.filter_groups.enable=true",
        "rollout.n=4",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_batch_normalize=true",
    ],
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_workspace(tmp_path_factory.mktemp("masked"), num_hidden_layers=2)
    (directory / "reward.py").write_text(REWARD)
    ends = {"eos_token_id": list(range(4, 40))}  # some responses end, others are truncated
    (directory / "model" / "generation_config.json").write_text(json.dumps(ends))
    (directory / "all.py").write_text(REWARD.replace("% 4 == 0", "% 1 == 0"))
    trainer = {"total_training_steps": 2, "test_freq": -1, "val_before_train": False}
    return write_config(directory, trainer=trainer, rollout={"n": N})


@pytest.fixture(scope="module")
def train(pool: Any, config: Path) -> Any:
    """Return train(world, *overrides): each rank's result. Equal arguments have one run."""
    numbers = iter(range(100))

    @functools.cache
    def run(world: int, *overrides: str) -> list[dict[str, Any]]:
        directory = f"trainer.default_local_dir={config.parent / str(next(numbers))}"
        results: list[dict[str, Any]] = pool(world).run(
            filter_cases.train_and_record_updates,
            config_path=str(config),
            overrides=[directory, *overrides],
        )
        return results

    return run


@pytest.mark.parametrize("name", RUNS)
def test_scores_of_masked_responses_change_nothing(train: Any, name: str) -> None:
    """Compare runs whose masked responses score 1e5 and -1e5, bit for bit; and updates with the
    responses that are left."""
    found, other = (
        train(1, *RUNS[name], f"reward.default_score={score}")[0] for score in ("1e5", "-1e5")
    )
    assert found["error"] == other["error"] == "" and len(found["steps"]) == 2
    for (key, *_, mine), (same_key, *_, theirs) in zip(found["last"], other["last"], strict=True):
        assert key == same_key and np.array_equal(mine, theirs), key
    num_masked = 0
    for step, same in zip(found["steps"], other["steps"], strict=True):
        mask = np.array(step["sample_mask"])
        assert step["sample_mask"] == same["sample_mask"] and mask.any()
        num_masked += (~mask).sum()
        assert step["metrics"]["train/masked_samples_ratio"] == np.mean(~mask)
        assert max(step["scores"]) == 1e5 or mask.all()
        assert step["metrics"]["critic/score/max"] <= 2
        if name == "grpo_filter_groups":
            assert (mask.reshape(PROMPTS, -1).sum(axis=1) >= 2).all(), "no group is masked whole"
        trained = {n for n, kept in zip(step["numbers"], mask, strict=True) if kept}
        for model in ("actor", "critic") if name.startswith("gae") else ("actor",):
            rows = [
                rows for role, at, rows in found["updates"] if (role, at) == (model, step["step"])
            ]
            assert {n for numbers in rows for n in numbers} == trained, model
    assert num_masked > 0
    assert any(step["metrics"]["reward/num_failed"] for step in found["steps"])


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("gae", []),
        ("gae", ["actor.megatron.tensor_model_parallel_size=2"]),
        ("grpo_one_update", []),
    ],
)
def test_layouts_are_equal(train: Any, name: str, overrides: list[str]) -> None:
    settings = [*RUNS[name], "reward.default_score=1e5"]
    one = train(1, *settings)[0]
    for rank in train(2, *settings, *overrides):
        for step, wanted in zip(rank["steps"], one["steps"], strict=True):
            assert all(step[key] == wanted[key] for key in ("tokens", "sample_mask"))
            for key in ("actor/loss", "actor/grad_norm", "actor/entropy"):
                assert step["metrics"][key] == pytest.approx(
                    wanted["metrics"][key], rel=2e-3, abs=1e-5
                )


@pytest.mark.parametrize("name", ["gae", "grpo_one_update"])
def test_a_step_without_a_response_to_train_on_changes_no_weight(
    train: Any, config: Path, name: str
) -> None:
    everything = f"custom_reward_function.path={config.parent / 'all.py'}"
    default = "reward.default_score=null"
    one_step, whole = (
        train(1, *RUNS[name], default, everything, f"trainer.total_training_steps={steps}")[0]
        for steps in (1, 2)
    )
    assert whole["error"] == "" and whole["updates"] == [] and len(whole["steps"]) == 2
    for step in whole["steps"]:
        assert step["metrics"]["train/masked_samples_ratio"] == 1.0
        assert not {"actor/loss", "critic/score/mean"} & step["metrics"].keys()
    for (_, *_, mine), (_, *_, theirs) in zip(one_step["last"], whole["last"], strict=True):
        assert np.array_equal(mine, theirs)
