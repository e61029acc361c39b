"""Settings that change the phases of a step, in the loop on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from tiny import make_reward_model, make_workspace, write_config


def test_actor_is_unchanged_during_critic_warmup(pool: Any, tmp_path: Path) -> None:
    make_workspace(tmp_path)
    result = cases.run_two_steps(
        pool(1), write_config(tmp_path), (1, 1, 1), tmp_path / "out", ["trainer.critic_warmup=1"]
    )[0]
    first, second = result["steps"]
    assert "actor/loss" not in first and "actor/loss" in second
    assert first["critic/grad_norm"] > 0 and second["critic/values/mean"] != first["critic/values/mean"]
    result = cases.run_two_steps(
        pool(1), tmp_path / "config.yaml", (1, 1, 1), tmp_path / "during_warmup", ["trainer.critic_warmup=2"]
    )[0]
    start, during_warmup = (cases.exported_weights(str(tmp_path / name)) for name in ("model", "during_warmup"))
    moved = cases.exported_weights(str(tmp_path / "out"))
    assert all(torch.equal(start[name], during_warmup[name]) for name in start)
    assert any(not torch.equal(start[name], moved[name]) for name in start)


def test_reward_model_scores_and_critic_starts_from_it(pool: Any, tmp_path: Path) -> None:
    """Run with a reward model, partly frozen models, and micro-batches of a fixed number of sequences."""
    make_workspace(tmp_path)
    model = make_reward_model(tmp_path / "reward_model")
    result = cases.run_two_steps(
        pool(1),
        write_config(tmp_path),
        (1, 1, 1),
        tmp_path / "out",
        [
            f"reward_model.model_path={model}",
            "reward.mixture={'*': {reward_model: 0.5, custom: 1.0}}",
            "reward.overlong_buffer.len=4",
            f"critic.model_path={model}",
            "critic.freeze=[model.*]",
            "actor.freeze=[model.embed_tokens.*, model.layers.0.*]",
            "actor.use_dynamic_bsz=false",
            "actor.ppo_micro_batch_size_per_gpu=3",
            "actor.ppo_max_token_len_per_gpu=1",
        ],
    )[0]
    for step in result["steps"]:
        tenths = step["critic/score/min"] * 10  # a whole number with tiny's reward function
        assert abs(tenths - round(tenths)) > 1e-3
        parts = [step[f"reward/arithmetic/{part}"] for part in ("reward_model", "custom", "overlong")]
        assert min(map(abs, parts)) > 0 and sum(parts) == pytest.approx(step["critic/score/mean"], abs=1e-6)
        assert step["critic/values/max"] > step["critic/values/min"], "a value head from the checkpoint, not zeros"
        assert step["actor/grad_norm"] > 0 and step["critic/grad_norm"] > 0
    start, out = (cases.exported_weights(str(tmp_path / name)) for name in ("model", "out"))
    frozen = [name for name in start if torch.equal(start[name], out[name])]
    assert frozen == [n for n in start if n == "model.embed_tokens.weight" or n.startswith("model.layers.0.")]
    assert result["different"] == []


def test_rollout_correction_and_bypass(pool: Any, tmp_path: Path) -> None:
    """Weigh and reject tokens in one run. Skip the pass of the old log-probs in another, after the first step."""
    config = write_config(make_workspace(tmp_path))
    section = "algorithm.rollout_correction"
    settings = [
        f"{section}.rollout_is=sequence",
        f"{section}.rollout_rs=[token_k3]",
        f"{section}.rollout_rs_threshold=[1e-13]",  # float32 engines agree to about 1e-6: some tokens are above
    ]
    corrected = cases.run_two_steps(pool(1), config, (1, 1, 1), tmp_path / "corrected", settings)[0]["steps"]
    for step in corrected:
        assert 0 < step["rollout_corr/rejected_tokens"] < 1
        assert step["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-3)
        assert step["rollout_corr/pearson"] > 0.999 and step["actor/grad_norm"] > 0
    plain, bypassed = (
        cases.run_two_steps(pool(1), config, (1, 1, 1), tmp_path / name, [f"{section}.bypass_mode={name}"])[0]
        for name in ("false", "true")
    )
    assert plain["digests"][0] == bypassed["digests"][0]
    for step, other in zip(plain["steps"], bypassed["steps"], strict=True):
        assert "training/rollout_logprobs_diff_mean" in step and "rollout_corr/k3_kl" in step
        assert not any(key.startswith(("training/rollout_", "rollout_corr/")) for key in other)
    # vLLM's log-probs are the old ones: the numbers differ by rounding, and they do differ.
    first = plain["steps"][0]
    other = bypassed["steps"][0]
    assert (
        other["actor/loss"] == pytest.approx(first["actor/loss"], abs=1e-4)
        and other["actor/loss"] != first["actor/loss"]
    )
