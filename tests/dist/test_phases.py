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
