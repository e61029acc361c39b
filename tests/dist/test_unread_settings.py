"""config/unread.py says which settings do nothing: two values of every number of algorithm and
losses, with each estimator, policy loss and use of the KL."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import unread_cases
from tiny import make_workspace, write_config

from rlhf_mc.config.algorithm_schema import SEQUENCE_LOSSES, AdvEstimator, LossMode
from rlhf_mc.config.fields import number_range
from rlhf_mc.config.load import leaf_hints, load_config
from rlhf_mc.config.schema import get_setting
from rlhf_mc.config.unread import DEPENDENCES, unread, unread_line

KL_LOSS = "actor.use_kl_loss=true"
NOT_IN_REWARD = "algorithm.use_kl_in_reward=false"
ADAPTIVE = "algorithm.kl_ctrl.type=adaptive"
BY_SEQUENCES = "actor.loss_agg_mode=seq-mean-token-mean"
USES_OF_KL: dict[str, list[str]] = {
    "in the reward": [],
    "in the reward, adaptive": [ADAPTIVE],
    "in the loss": [NOT_IN_REWARD, KL_LOSS],
    "in the loss, adaptive": [NOT_IN_REWARD, KL_LOSS, ADAPTIVE],
    "in reward and loss, adaptive": [KL_LOSS, ADAPTIVE],
    "none, weights": [NOT_IN_REWARD, "algorithm.rollout_correction.rollout_is=token"],
}
ESTIMATORS = {
    name: [f"algorithm.adv_estimator={name}"]
    for name in get_args(AdvEstimator)
    if name != "custom" and not name.endswith("_turn")  # those need an environment
}
LOSSES = {
    name: [
        f"actor.policy_loss.loss_mode={name}",
        *([BY_SEQUENCES] if name in SEQUENCE_LOSSES else []),
        # of probabilities, which are small in a model that has learned nothing
        *(["actor.clip_ratio_high=0.005"] if name.startswith("dppo") else []),
        "actor.policy_loss.clip_cov_ratio=0.9",
        "actor.policy_loss.kl_cov_ratio=0.5",
    ]
    for name in get_args(LossMode)
    if name != "custom"
}
CHANGES = {
    "actor.clip_ratio_c": "2.0",
    "actor.policy_loss.clip_cov_lb": "-1.0",
    "actor.policy_loss.clip_cov_ub": "2.0",
    "algorithm.gae_lambda_value": "0.7",
    "algorithm.gae_lambda_policy": "0.7",
    "algorithm.rollout_correction.rollout_token_veto_threshold": "0.5",
    "actor.entropy_coeff_end": "0.02",
}
"""Other values of settings. That of the rest is by 0.7 of the value, or 0.3 in place of 0."""
ELSEWHERE = (
    "ppo_mini_batch_size",
    "ppo_epochs",
    "token_len",
    "moe_",
    ".lora.",
    ".optim.",
    ".megatron.",
    ".fsdp_config.",
    "loss_scale_factor",
    "filter_groups",
    "rollout_rs",
)
"""Settings of the batch, of other models, of memory and optimizer; those that checks.py refuses
where they are not read."""
ALWAYS = {
    "actor.entropy_coeff",
    "actor.entropy_coeff_end",
    "actor.positive_nll_coef",
    "critic.cliprange_value",
    "algorithm.rollout_correction.rollout_token_veto_threshold",
}
"""Numbers that every run reads."""


def test_what_is_not_read_changes_no_number(pool: Any, tmp_path: Path) -> None:
    make_workspace(tmp_path, num_hidden_layers=2)
    once = {"ppo_epochs": 1, "ppo_mini_batch_size": 8, "optim": {"lr": 0.0}}
    config = write_config(
        tmp_path,
        actor={**once, "ppo_max_token_len_per_gpu": 512},
        critic={"optim": {"lr": 0.0}, "ppo_max_token_len_per_gpu": 512},
        algorithm={"kl_ctrl": {"type": "fixed"}},
    )
    keys = [
        key
        for key, hint in leaf_hints().items()
        if key.startswith(("algorithm.", "actor.", "critic."))
        and number_range(hint) is not None
        and not any(part in key for part in ELSEWHERE)
    ]
    cfg = load_config(str(config), [])
    changes = {key: CHANGES.get(key) or str(0.7 * get_setting(cfg, key) or 0.3) for key in keys}
    changes["algorithm.kl_ctrl.horizon"] = "70"
    variants = {
        **{
            name: (overrides, ("algorithm.", "critic.", "actor.kl_loss"))
            for name, overrides in USES_OF_KL.items()
        },
        **{name: (overrides, ("algorithm.",)) for name, overrides in ESTIMATORS.items()},
        **{name: (overrides, ("actor.",)) for name, overrides in LOSSES.items()},
    }
    by_variant = {
        name: (
            overrides,
            {key: value for key, value in changes.items() if key.startswith(sections)},
        )
        for name, (overrides, sections) in variants.items()
    }
    found = pool(1).run(unread_cases.effects, config_path=str(config), variants=by_variant)[0]
    unlike = []
    for variant, effects in found.items():
        for key, has_effect in effects.items():
            changed = load_config(str(config), [*by_variant[variant][0], f"{key}={changes[key]}"])
            if has_effect == (key in dict(unread(changed))):
                unlike.append(
                    f"{variant}: {key} {'changes a number' if has_effect else 'is not read'}"
                )
    assert not unlike, "\n".join(unlike)
    assert {
        key for row in DEPENDENCES for key in row.keys if number_range(leaf_hints()[key])
    } >= set(changes) - ALWAYS


def test_the_line_names_what_is_not_read_and_when_it_is(tmp_path: Path) -> None:
    config = str(
        write_config(tmp_path, algorithm={"use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}})
    )
    defaults = ["algorithm.kl_ctrl.kl_coef=0.001", "algorithm.kl_ctrl.horizon=10000"]
    assert unread_line(load_config(config, defaults)) is None
    given = ["algorithm.adv_estimator=grpo", "algorithm.lam=0.9", "actor.policy_loss.tau_pos=2"]
    assert unread_line(load_config(config, given)) == (
        "warning: set, but not read: algorithm.lam (read with algorithm.adv_estimator gae, "
        "gae_turn); algorithm.kl_ctrl.kl_coef "
        "(read with algorithm.use_kl_in_reward); algorithm.kl_ctrl.horizon (read with "
        "algorithm.kl_ctrl.type adaptive);"
        " actor.policy_loss.tau_pos (read with actor.policy_loss.loss_mode sapo)"
    )


@pytest.mark.parametrize(
    ("given", "reads"),
    [
        (
            "actor.optim.lr_warmup_steps_ratio=0.1 actor.optim.lr_warmup_steps=3",
            "actor.optim.lr_warmup_steps=0",
        ),
        (
            "trainer.total_epochs=3 trainer.total_training_steps=4",
            "trainer.total_training_steps=null",
        ),
        ("data.val_max_samples=8 data.val_files=[]", "data.val_files=[a]"),
        ("rollout.val_kwargs.temperature=0.5 data.val_files=[]", "data.val_files=[a]"),
        (
            "algorithm.gae_lambda_policy=0.9 algorithm.length_adaptive_alpha=0.05",
            "algorithm.length_adaptive_alpha=0",
        ),
        (
            "algorithm.lam=0.9 algorithm.gae_lambda_value=1 algorithm.length_adaptive_alpha=0.05",
            "algorithm.gae_lambda_value=null",
        ),
        (
            "algorithm.lam=0.9 algorithm.gae_lambda_value=1 algorithm.gae_lambda_policy=0.8",
            "algorithm.gae_lambda_policy=null",
        ),
        ("health.patience=3 health.enable=false", "health.enable=true"),
        ("reward.remote.template=x reward.remote.url=http://a", "reward.remote.api=openai"),
        ("rollout.environment.first_observation=true", "rollout.environment.path=game.py"),
        ("rollout.environment.other_sampling=ignore", "rollout.environment.name=openai"),
        ("actor.megatron.cp_comm_type=a2a", "actor.megatron.context_parallel_size=2"),
        ("ref.fsdp_config.offload_policy=true", "ref.strategy=fsdp2"),
        (
            "critic.fsdp_config.fsdp_size=2 actor.strategy=fsdp2 critic.strategy=megatron",
            "actor.fsdp_config.fsdp_size=2",
        ),
        (
            "actor.megatron.share_prompts=false actor.megatron.context_parallel_size=2",
            "actor.megatron.dynamic_context_parallel=true",
        ),
    ],
)
def test_settings_beside_the_algorithm_are_named(tmp_path: Path, given: str, reads: str) -> None:
    config = str(write_config(tmp_path))
    key = given.partition("=")[0]
    assert key in dict(unread(load_config(config, given.split())))
    assert key not in dict(unread(load_config(config, [*given.split(), reads])))


def test_settings_of_an_environment_that_is_not_there_are_named(tmp_path: Path) -> None:
    config = str(write_config(tmp_path))
    section = "rollout.environment"
    keys = {f"{section}.{name}" for name in ("max_turns", "format", "kwargs", "first_observation")}
    given = [f"{section}.max_turns=3", f"{section}.format=glm45", f"{section}.kwargs={{a: 1}}"]
    given.append(f"{section}.first_observation=true")
    for more, named in (
        ([], keys),
        ([f"{section}.path=game.py"], {f"{section}.format"}),
        (
            [f"{section}.function_tool_path=tools.py"],
            {f"{section}.{name}" for name in ("kwargs", "first_observation")},
        ),
    ):
        assert {key for key, _ in unread(load_config(config, [*given, *more]))} & keys == named
    settings = {key for key in leaf_hints() if key.startswith(f"{section}.")}
    read_alone = {
        f"{section}.{name}"
        for name in ("name", "path", "command", "function_tool_path", "tool_config_path")
    }
    assert (
        settings
        == {key for row in DEPENDENCES for key in row.keys if row.section == section} | read_alone
    )
