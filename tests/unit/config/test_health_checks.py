"""Health settings that the run cannot carry out are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import validated

from rlhf_mc.config.errors import UserError

ROLL_BACK = "health.roll_back=kl_explosion"
FIXED = "health.kl_coef=0.1"
HALVE = "health.out_of_memory=halve_tokens"
ALONE = ("actor.megatron.overlap_grad_reduce=false", "critic.megatron.overlap_grad_reduce=false")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [ROLL_BACK],
            (
                "health.roll_back has kl_explosion; that needs checkpoints: trainer.save_freq of "
                "at least"
            ),
        ),
        (
            [FIXED],
            (
                "health.kl_coef is 0.1; that needs a KL term: algorithm.use_kl_in_reward or "
                "actor.use_kl_loss: true"
            ),
        ),
        ([HALVE], "that needs actor.megatron.overlap_grad_reduce: false (now null)"),
        ([HALVE, "actor.strategy=fsdp2"], "that needs actor.strategy: megatron"),
        (
            [HALVE, ALONE[0], "critic.megatron.overlap_grad_reduce=true"],
            "that needs critic.megatron.overlap_grad_reduce",
        ),
        (
            [HALVE, *ALONE, "actor.megatron.tensor_model_parallel_size=2"],
            (
                "that needs actor.megatron.tensor_model_parallel_size: 1 (now 2), since no rank "
                "may wait for another"
            ),
        ),
        (
            ["health.ppo_kl_max=0.7"],
            "health.ppo_kl_max is 0.7; it must be at most health.ppo_kl_explosion, 0.5",
        ),
        (["health.roll_back=grad_norm_growing"], "health.roll_back: found"),
        (
            ["health.stop=kl_explosoin"],
            "each entry one of not_finite, kl_explosion, policy_collapsed, ppo_kl_high",
        ),
        (["health.rollback_lr_factor=0"], "health.rollback_lr_factor"),
        (["health.max_rollbacks=0"], "health.max_rollbacks"),
    ],
)
def test_settings_that_cannot_be_carried_out_are_refused(
    config_file: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        validated(config_file, *overrides)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [ROLL_BACK, "trainer.save_freq=5"],
        [ROLL_BACK, "health.enable=false"],
        [FIXED, "algorithm.use_kl_in_reward=true"],
        [HALVE, *ALONE],
        [HALVE, ALONE[0], "algorithm.adv_estimator=grpo", "rollout.n=2"],
    ],
)
def test_settings_that_can_be_are_not(config_file: Path, overrides: list[str]) -> None:
    validated(config_file, *overrides)
