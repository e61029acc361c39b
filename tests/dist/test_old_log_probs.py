"""Old log-probs without a pass of their own: the only optimizer step of a batch computes them. The
weights have the same bits as with the pass, and every metric keeps its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import old_log_prob_cases
import pytest
import resume_cases
import torch
from tiny import make_workspace, write_config

GRPO = {
    "actor": {"ppo_mini_batch_size": 8, "ppo_epochs": 1},
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}},
}
MEGATRON = "actor.megatron"
CORRECTION = "algorithm.rollout_correction"
OF_PASS = {
    "timing_s/old_log_prob",
    "timing_s/sum_log_probs",
    "timing_per_token_ms/old_log_prob",
    "perf/mfu/actor_infer",
}
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one rank, PPO": (
        1,
        ["actor.shuffle=true", "actor.use_kl_loss=true", "algorithm.adv_estimator=gae"],
    ),
    "data parallel": (
        2,
        [
            f"{CORRECTION}.rollout_is=token",
            "actor.ppo_max_token_len_per_gpu=160",
            f"{MEGATRON}.recompute_granularity=selective",
        ],
    ),
    "tensor parallel": (
        2,
        [
            f"{MEGATRON}.tensor_model_parallel_size=2",
            f"{MEGATRON}.sequence_parallel=true",
            f"{CORRECTION}.rollout_is=sequence",
        ],
    ),
    "pipeline": (
        2,
        [
            f"{MEGATRON}.pipeline_model_parallel_size=2",
            f"{MEGATRON}.recompute_granularity=full",
            "actor.policy_loss.loss_mode=geo_mean",
            "actor.loss_agg_mode=seq-mean-token-mean",
            f"{CORRECTION}.rollout_is=token",
        ],
    ),
    "shared prompts": (
        2,
        [f"{MEGATRON}.share_prompts=true", "rollout.n=4", f"{MEGATRON}.dtype=bfloat16"],
    ),
    "context parallel": (
        2,
        [
            f"{MEGATRON}.context_parallel_size=2",
            "actor.policy_loss.loss_mode=gspo",
            "actor.loss_agg_mode=seq-mean-token-mean",
        ],
    ),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(make_workspace(tmp_path_factory.mktemp("old"), num_hidden_layers=2), **GRPO)


def both(
    pool: Any, config: Path, world: int, overrides: list[str]
) -> tuple[list[list[dict[str, Any]]], list[list[dict[str, Any]]]]:
    """Return old_log_prob_cases.two_steps of each rank, with and without the pass."""
    with_pass, without = (
        pool(world).run(
            old_log_prob_cases.two_steps,
            config_path=str(config),
            overrides=overrides,
            with_pass=has_pass,
        )
        for has_pass in (True, False)
    )
    for ranks, has_pass in ((with_pass, True), (without, False)):
        for rank in ranks:
            for step in rank:
                assert ("timing_s/old_log_prob" in step["metrics"]) == has_pass
    return with_pass, without


def compare(mine: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare a step with the pass and one without, to the last bit."""
    assert mine["metrics"].keys() - OF_PASS == other["metrics"].keys() - OF_PASS
    for name, value in mine["weights"].items():
        assert torch.equal(value, other["weights"][name]), name
    for name, value in mine["batch"].items():
        assert (value is None) == (other["batch"][name] is None), name
        assert value is None or torch.equal(value, other["batch"][name]), name
    for key, value in mine["metrics"].items():
        if key.startswith(("actor/", "training/", "rollout_corr/", "critic/")):
            assert other["metrics"][key] == value, key


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_have_the_same_bits_without_the_pass(pool: Any, config: Path, name: str) -> None:
    world, overrides = LAYOUTS[name]
    with_pass, without = both(pool, config, world, overrides)
    for mine, other in zip(with_pass, without, strict=True):
        for step, same_step in zip(mine, other, strict=True):
            compare(step, same_step)
            assert same_step["metrics"]["actor/ppo_kl"] == 0.0
            assert same_step["metrics"]["actor/grad_norm"] > 0.0
            assert "training/rollout_logprobs_diff_mean" in same_step["metrics"]
            assert "rollout_corr/k3_kl" in same_step["metrics"]
        assert not all(
            torch.equal(x, other[1]["weights"][n]) for n, x in other[0]["weights"].items()
        )
        is_corrected = any("rollout_is" in one for one in overrides)
        assert (other[0]["batch"]["is_weights"] is not None) == is_corrected


def test_replayed_experts_are_those_of_the_update(
    pool: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = make_workspace(
        tmp_path_factory.mktemp("experts"),
        family="qwen3_moe",
        tied=False,
        num_hidden_layers=2,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
    )
    overrides = [f"{MEGATRON}.expert_model_parallel_size=2", f"{MEGATRON}.dtype=bfloat16"]
    with_pass, without = both(pool, write_config(directory, **GRPO), 2, overrides)
    for step, same_step in zip(with_pass[0], without[0], strict=True):
        compare(step, same_step)
        share = same_step["metrics"]["actor/expert_choices_diff"]
        assert share == same_step["metrics"]["training/expert_choices_diff"] > 0.0


def test_a_skipped_update_has_the_old_log_probs_of_its_pass(
    pool: Any, config: Path, tmp_path: Path
) -> None:
    """Let weights be NaN in the second step."""
    name = "decoder.final_layernorm.weight"
    ((first, second),) = pool(1).run(
        old_log_prob_cases.two_steps,
        config_path=str(config),
        overrides=[f"trainer.default_local_dir={tmp_path}"],
        with_pass=False,
        broken=name,
    )
    assert "timing_s/old_log_prob" not in second["metrics"]
    assert second["metrics"]["actor/skipped"] == 1.0
    assert second["batch"]["old_log_probs"].isnan().all()
    for key, value in first["weights"].items():
        assert torch.equal(value, second["weights"][key]), key


def test_a_resumed_run_has_the_same_bits(pool: Any, config: Path, tmp_path: Path) -> None:
    def train(name: str, *overrides: str) -> dict[str, Any]:
        directory = f"trainer.default_local_dir={tmp_path / name}"
        result: dict[str, Any] = pool(1).run(
            resume_cases.train,
            config_path=str(config),
            overrides=["trainer.save_freq=1", directory, *overrides],
            record_at=1,
        )[0]
        return result

    whole = train("whole")
    saved = tmp_path / "whole" / "global_step_1"
    again = train("again", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}")
    assert whole["steps"] == [1, 2] and again["steps"] == [2]
    for (key, *_, mine), (same_key, *_, other) in zip(whole["last"], again["last"], strict=True):
        assert key == same_key and np.array_equal(mine, other), key
    rows = (tmp_path / "again" / "metrics.jsonl").read_text()
    assert "training/rollout_logprobs_diff_mean" in rows and "timing_s/old_log_prob" not in rows


def test_critic_warmup_has_the_pass(pool: Any, config: Path) -> None:
    """Take a first step without an update of the actor."""
    first, second = pool(1).run(
        old_log_prob_cases.two_steps,
        config_path=str(config),
        overrides=["algorithm.adv_estimator=gae", "trainer.critic_warmup=1"],
        with_pass=False,
    )[0]
    assert "timing_s/old_log_prob" in first["metrics"]
    assert "timing_s/old_log_prob" not in second["metrics"]
    for step in (first, second):
        assert step["metrics"]["training/rollout_logprobs_diff_max"] < 1e-4
