"""Settings that change the phases of a step, in the loop on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from tiny import make_reward_model, make_workspace, write_config


def test_actor_is_unchanged_during_critic_warmup(pool: Any, tmp_path: Path) -> None:
    config = write_config(make_workspace(tmp_path, num_hidden_layers=2))
    settings = ["trainer.critic_warmup=2"]
    first, second = cases.run_two_steps(pool(1), config, (1, 1, 1), tmp_path / "out", settings)[0][
        "steps"
    ]
    assert "actor/loss" not in first.keys() | second.keys()
    assert (
        first["critic/grad_norm"] > 0
        and second["critic/values/mean"] != first["critic/values/mean"]
    )
    start, out = (cases.exported_weights(str(tmp_path / name)) for name in ("model", "out"))
    assert all(torch.equal(start[name], out[name]) for name in start)


def test_reward_model_scores_and_critic_starts_from_it(pool: Any, tmp_path: Path) -> None:
    """Run with a reward model and partly frozen models."""
    make_workspace(tmp_path, num_hidden_layers=2)
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
        ],
    )[0]
    for step in result["steps"]:
        tenths = step["critic/score/min"] * 10  # a whole number with tiny's reward function
        assert abs(tenths - round(tenths)) > 1e-3
        parts = [
            step[f"reward/arithmetic/{part}"] for part in ("reward_model", "custom", "overlong")
        ]
        assert min(map(abs, parts)) > 0 and sum(parts) == pytest.approx(
            step["critic/score/mean"], abs=1e-6
        )
        assert step["critic/values/max"] > step["critic/values/min"], (
            "a value head from the checkpoint, not zeros"
        )
        assert step["actor/grad_norm"] > 0 and step["critic/grad_norm"] > 0
    start, out = (cases.exported_weights(str(tmp_path / name)) for name in ("model", "out"))
    frozen = [name for name in start if torch.equal(start[name], out[name])]
    assert frozen == [
        n for n in start if n == "model.embed_tokens.weight" or n.startswith("model.layers.0.")
    ]
    assert result["different"] == []


def test_two_reward_models_add_up_to_the_single_ones(pool: Any, tmp_path: Path) -> None:
    """Compare the first step, whose responses are the same in all runs. The second model reads
    conversations of
    its own template."""
    config = write_config(make_workspace(tmp_path, num_hidden_layers=2))
    model = make_reward_model(tmp_path / "reward_model")
    (tmp_path / "template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    )
    own = [f"tokenizer_path={model}", f"chat_template_path={tmp_path}/template.jinja"]
    runs = {
        "one": [f"reward_model.model_path={model}"],
        "other": [f"reward_model.{setting}" for setting in (f"model_path={model}", *own)],
        "both": [
            f"reward_models.one.model_path={model}",
            *(f"reward_models.other.{setting}" for setting in (f"model_path={model}", *own)),
            "reward_models.other.megatron.param_offload=true",
            "reward.mixture={'*': {one: 0.5, other: -2.0, custom: 1.0}}",
        ],
    }
    found = {
        name: cases.run_two_steps(pool(1), config, (1, 1, 1), tmp_path / name, settings)[0]
        for name, settings in runs.items()
    }
    assert len({run["digests"][0] for run in found.values()}) == 1
    steps = {name: run["steps"][0] for name, run in found.items()}
    both = {part: steps["both"][f"reward/arithmetic/{part}"] for part in ("one", "other", "custom")}
    single = {name: steps[name]["critic/score/mean"] for name in ("one", "other")}
    assert abs(single["one"] - single["other"]) > 1e-3
    assert both["one"] == pytest.approx(0.5 * single["one"], abs=1e-6)
    assert both["other"] == pytest.approx(-2.0 * single["other"], abs=1e-6)
    assert steps["both"]["critic/score/mean"] == pytest.approx(sum(both.values()), abs=1e-6)
    assert (
        steps["both"]["reward/num_truncated/other"] == 0
        and "reward/num_truncated/one" not in steps["both"]
    )
    rows = {line.partition(" ")[0] for line in found["both"]["headlines"]}
    assert {"reward_models.one", "reward_models.other", "rollout"} <= rows


def test_rollout_correction_and_bypass(pool: Any, tmp_path: Path) -> None:
    """Weigh and reject tokens in one run. Skip the pass of the old log-probs in another, after the
    first step."""
    config = write_config(make_workspace(tmp_path, num_hidden_layers=2))
    section = "algorithm.rollout_correction"
    settings = [
        f"{section}.rollout_is=sequence",
        f"{section}.rollout_rs=[token_k3]",
        # float32 engines agree to about 1e-6: some tokens are above
        f"{section}.rollout_rs_threshold=[1e-13]",
    ]
    corrected = cases.run_two_steps(pool(1), config, (1, 1, 1), tmp_path / "corrected", settings)[
        0
    ]["steps"]
    for step in corrected:
        assert 0 < step["rollout_corr/rollout_rs_token_k3_masked_fraction"] < 1
        assert (
            step["rollout_corr/rollout_rs_masked_fraction"]
            == step["rollout_corr/rollout_rs_token_k3_masked_fraction"]
        )
        assert step["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-3)
        assert (
            step["training/rollout_actor_probs_pearson_corr"] > 0.999
            and step["actor/grad_norm"] > 0
        )
    plain, bypassed = (
        cases.run_two_steps(
            pool(1), config, (1, 1, 1), tmp_path / name, [f"{section}.bypass_mode={name}"]
        )[0]
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
