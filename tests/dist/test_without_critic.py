"""Runs whose advantage estimator needs no critic: no critic is built, saved or logged, and a resume
is bit for bit. Layouts agree with a loss of sequences, a selection of tokens and a greedy
baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import resume_cases
from tiny import make_workspace, write_config

from rlhf_mc.checkpoint.training_state import stored_models

KL_LOSS = ["algorithm.use_kl_in_reward=false", "actor.use_kl_loss=true", "actor.kl_loss_coef=0.05"]
"""The controller of the workspace's algorithm.kl_ctrl then sets the coefficient of the loss."""
GRPO = ["algorithm.adv_estimator=grpo", "rollout.n=3", *KL_LOSS]
COMPARED = (
    "actor/loss",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/entropy",
    "critic/advantages/max",
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        make_workspace(tmp_path_factory.mktemp("without_critic"), num_hidden_layers=2)
    )


def test_grpo_saves_and_resumes_without_a_critic(pool: Any, config: Path, tmp_path: Path) -> None:
    def train(name: str, *overrides: str) -> dict[str, Any]:
        settings = [
            *GRPO,
            "trainer.save_freq=1",
            f"trainer.default_local_dir={tmp_path / name}",
            *overrides,
        ]
        result: dict[str, Any] = pool(1).run(
            resume_cases.train, config_path=str(config), overrides=settings, record_at=1
        )[0]
        return result

    whole = train("whole")
    saved = tmp_path / "whole" / "global_step_1"
    assert list(stored_models(saved)) == ["actor"]
    resumed = train(
        "resumed", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}"
    )
    assert resumed["steps"] == [2]
    assert len(whole["last"]) == len(resumed["last"]) > 0
    for (key, *_, mine), (same_key, *_, theirs) in zip(whole["last"], resumed["last"], strict=True):
        assert key == same_key and key.startswith("actor.")
        assert np.array_equal(mine, theirs), key


@pytest.mark.parametrize(
    "overrides",
    [
        [*GRPO, "actor.policy_loss.loss_mode=gspo", "actor.loss_agg_mode=seq-mean-token-mean"],
        [
            "algorithm.adv_estimator=remax",
            "actor.policy_loss.loss_mode=clip_cov",
            "actor.policy_loss.clip_cov_ratio=0.1",
            "actor.policy_loss.clip_cov_lb=0.0",
            "actor.loss_agg_mode=seq-mean-token-sum-norm",
            "actor.entropy_coeff_end=0.0",
        ],
        [
            "algorithm.adv_estimator=gdpo",
            "rollout.n=3",
            *KL_LOSS,
            "actor.policy_loss.loss_mode=dppo_tv",
            "actor.positive_nll_coef=0.1",
        ],
    ],
    ids=["grpo, gspo", "remax, clip_cov", "gdpo, dppo, nll"],
)
def test_layouts_agree_without_a_critic(
    pool: Any, config: Path, tmp_path: Path, overrides: list[str]
) -> None:
    one = cases.run_two_steps(pool(1), config, (1, 1, 1), tmp_path / "one", overrides)[0]
    two = cases.run_two_steps(pool(2), config, (1, 1, 1), tmp_path / "two", overrides)[0]
    assert one["digests"] == two["digests"]
    assert not any("critic" in line for line in one["headlines"])
    for mine, other in zip(one["steps"], two["steps"], strict=True):
        assert (
            not {"critic/values/mean", "critic/vf_loss", "critic/lr", "critic/vf_explained_var"}
            & mine.keys()
        )
        assert mine["actor/grad_norm"] > 0
        for key in COMPARED:
            assert other[key] == pytest.approx(mine[key], rel=1e-3, abs=1e-5), key
    if "algorithm.adv_estimator=remax" in overrides:
        assert (
            one["steps"][0]["critic/greedy_score/mean"]
            == two["steps"][0]["critic/greedy_score/mean"]
        )
        assert [step["actor/entropy_coeff"] for step in one["steps"]] == [0.01, 0.0]
        assert one["steps"][0]["actor/pg_clipfrac"] > 0
    else:
        _check_kl_coefficients(one["steps"])


def _check_kl_coefficients(steps: list[dict[str, float]]) -> None:
    """Check the coefficient of each step's KL loss against the controller's formula (arXiv
    1909.08593, section 2.2):
    24 sequences a step, horizon 100, target 0.1."""
    coefficient = 0.05
    for step in steps:
        error = max(-0.2, min(0.2, step["actor/controlled_kl"] / 0.1 - 1))
        coefficient *= 1 + error * 24 / 100
        assert step["actor/kl_coef"] == pytest.approx(coefficient)
        assert "actor/reward_kl_penalty" not in step
