"""The settings that a run reads only together with another one. Set without it they do nothing, and
a line at the start names them. docs/settings.md has the table. No torch here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rlhf_mc.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    TrainerConfig,
    get_setting,
    layouts,
    roles,
)


@dataclass(frozen=True)
class Dependence:
    """Settings that are read under one condition."""

    section: str
    names: str
    """The settings of the section, with blanks between them."""
    condition: str
    """The condition in words."""
    holds: Callable[[Config], Any]

    @property
    def keys(self) -> list[str]:
        """The settings as section.name."""
        return [f"{self.section}.{name}" for name in self.names.split()]


def _switch(setting: str, section: str, names: str) -> Dependence:
    """Return the dependence on another setting that is not null, false, 0 or empty."""
    return Dependence(section, names, setting, lambda cfg: get_setting(cfg, setting))


def _choice(setting: str, values: str, section: str, names: str) -> Dependence:
    """Return the dependence on another setting with one of these values, with blanks between them.
    A function of the user's, for the value custom, may read everything."""
    allowed = [*values.split(), "custom"]
    condition = f"{setting} {', '.join(allowed[:-1])}"
    return Dependence(section, names, condition, lambda cfg: get_setting(cfg, setting) in allowed)


def _zero(setting: str, section: str, names: str, value: str = "0") -> Dependence:
    """Return the dependence on another setting that is 0 or null, as `value` says."""
    return Dependence(
        section, names, f"{setting} {value}", lambda cfg: not get_setting(cfg, setting)
    )


def _uses_kl(cfg: Config) -> bool:
    return cfg.algorithm.use_kl_in_reward or cfg.algorithm.kl_ctrl.type == "adaptive"


def _uses_lam(cfg: Config) -> bool:
    lambdas = cfg.algorithm
    return lambdas.gae_lambda_value is None or (
        lambdas.gae_lambda_policy is None and lambdas.length_adaptive_alpha == 0
    )


ESTIMATOR = "algorithm.adv_estimator"
CORRECTION = "algorithm.rollout_correction"
LOSS = "actor.policy_loss"
LOSS_MODE = f"{LOSS}.loss_mode"
LAYOUT = "actor.megatron"
DISTILLATION = "distillation.distillation_loss"
DECAYS = "linear cosine"
ENVIRONMENT = "rollout.environment"
ENVIRONMENT_CLASS = "kwargs first_observation split_special_tokens"
TOOLS = f"{ENVIRONMENT}.function_tool_path or tool_config_path"
DEPENDENCES = (
    _switch("data.val_files", "data", "val_max_samples"),
    _switch("data.val_files", "rollout.val_kwargs", "temperature top_p top_k n"),
    _switch("data.val_files", "trainer", "log_val_generations"),
    _zero("trainer.total_training_steps", "trainer", "total_epochs", "null"),
    _choice(ESTIMATOR, "gae gae_turn grpo_turn reinforce_plus_plus", "algorithm", "gamma"),
    _choice(
        ESTIMATOR,
        "gae gae_turn",
        "algorithm",
        "lam gae_lambda_value gae_lambda_policy length_adaptive_alpha",
    ),
    _zero("algorithm.length_adaptive_alpha", "algorithm", "gae_lambda_policy"),
    Dependence(
        "algorithm",
        "lam",
        "algorithm.gae_lambda_value null, or gae_lambda_policy null and length_adaptive_alpha 0",
        _uses_lam,
    ),
    _choice(ESTIMATOR, "grpo grpo_turn grpo_passk gdpo", "algorithm", "norm_adv_by_std_in_grpo"),
    Dependence(
        "algorithm",
        "kl_penalty",
        "algorithm.use_kl_in_reward or algorithm.kl_ctrl.type adaptive",
        _uses_kl,
    ),
    _switch("algorithm.use_kl_in_reward", "algorithm.kl_ctrl", "kl_coef"),
    _choice("algorithm.kl_ctrl.type", "adaptive", "algorithm.kl_ctrl", "target_kl horizon"),
    _switch(
        "algorithm.filter_groups.enable", "algorithm.filter_groups", "metric max_num_gen_batches"
    ),
    _switch(
        f"{CORRECTION}.rollout_is", CORRECTION, "rollout_is_threshold rollout_is_batch_normalize"
    ),
    *(
        _switch(f"{role}.lora.rank", f"{role}.lora", "alpha exclude_modules adapter_path")
        for role in ("actor", "critic")
    ),
    _switch("actor.use_kl_loss", "actor", "kl_loss_coef kl_loss_type"),
    _choice(
        LOSS_MODE,
        "vanilla gspo geo_mean cispo sao dppo_tv dppo_kl clip_cov",
        "actor",
        "clip_ratio_low clip_ratio_high",
    ),
    _choice(LOSS_MODE, "vanilla dppo_tv dppo_kl", "actor", "clip_ratio_c"),
    _choice(LOSS_MODE, "clip_cov", LOSS, "clip_cov_ratio clip_cov_lb clip_cov_ub"),
    _choice(LOSS_MODE, "kl_cov", LOSS, "kl_cov_ratio ppo_kl_coef"),
    _choice(LOSS_MODE, "sapo", LOSS, "tau_pos tau_neg"),
    _zero("actor.optim.lr_warmup_steps", "actor.optim", "lr_warmup_steps_ratio"),
    _zero("critic.optim.lr_warmup_steps", "critic.optim", "lr_warmup_steps_ratio"),
    _choice("actor.optim.lr_decay_style", DECAYS, "actor.optim", "min_lr"),
    _choice("critic.optim.lr_decay_style", DECAYS, "critic.optim", "min_lr"),
    Dependence(
        LAYOUT,
        "cp_comm_type",
        f"{LAYOUT}.context_parallel_size of at least 2",
        lambda cfg: cfg.actor.megatron.context_parallel_size > 1,
    ),
    Dependence(
        LAYOUT,
        "share_prompts",
        f"{LAYOUT}.context_parallel_size 1 or dynamic_context_parallel",
        lambda cfg: (
            cfg.actor.megatron.context_parallel_size == 1
            or cfg.actor.megatron.dynamic_context_parallel
        ),
    ),
    Dependence(
        "actor.fsdp_config",
        "fsdp_size reshard_after_forward offload_policy",
        "strategy fsdp2 of a role",
        lambda cfg: any(layout.fsdp is not None for layout in layouts(cfg).values()),
    ),
    _switch(
        "rollout.partial_rollout", "rollout", "max_off_policy_threshold max_off_policy_strategy"
    ),
    _switch("rollout.free_cache_engine", "rollout", "offload_cuda_graphs"),
    _switch(f"{ENVIRONMENT}.path", ENVIRONMENT, ENVIRONMENT_CLASS),
    _choice(f"{ENVIRONMENT}.name", "openai", ENVIRONMENT, "other_sampling rewritten_history"),
    Dependence(
        ENVIRONMENT,
        "format",
        f"{TOOLS}, name openai",
        lambda cfg: cfg.rollout.environment.has_tools or cfg.rollout.environment.is_agent,
    ),
    Dependence(
        ENVIRONMENT, "max_parallel_calls", TOOLS, lambda cfg: cfg.rollout.environment.has_tools
    ),
    Dependence(
        ENVIRONMENT,
        "max_turns max_tokens_per_turn max_observation_length truncate timeout_seconds num_workers "
        "default_observation default_score skip_special_tokens",
        f"{ENVIRONMENT}.path, command, {TOOLS}",
        lambda cfg: cfg.rollout.environment.is_set,
    ),
    Dependence(
        "actor",
        "env_loss_coef",
        f"{ENVIRONMENT}.path, {TOOLS}",
        lambda cfg: cfg.rollout.environment.is_set,
    ),
    _switch(
        "custom_reward_function.path",
        "custom_reward_function",
        "name reward_kwargs skip_special_tokens",
    ),
    _switch(
        "distillation.enabled",
        DISTILLATION,
        "loss_mode topk use_task_rewards distillation_loss_coef use_policy_gradient loss_max_clamp "
        "log_prob_min_clamp",
    ),
    _choice(
        f"{DISTILLATION}.loss_mode", "forward_kl_topk", DISTILLATION, "topk log_prob_min_clamp"
    ),
    _switch(f"{DISTILLATION}.use_task_rewards", DISTILLATION, "distillation_loss_coef"),
    _switch("reward.overlong_buffer.len", "reward.overlong_buffer", "penalty_factor"),
    _switch(
        "reward.remote.url", "reward.remote", "api timeout_seconds max_retries max_concurrency"
    ),
    _choice("reward.remote.api", "openai", "reward.remote", "template"),
    _switch(
        "health.enable",
        "health",
        "disable note warn stop roll_back kl_coef patience window ppo_kl_max ppo_kl_explosion "
        "ref_kl_max entropy_min truncated_max",
    ),
    _switch("health.roll_back", "health", "rollback_lr_factor max_rollbacks"),
    _switch("profile.steps", "profile", "ranks"),
)


def unread(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield each setting that differs from its default and is not read, and the condition under
    which it is."""
    for row in DEPENDENCES:
        for key in row.keys if not row.holds(cfg) else ():
            if get_setting(cfg, key) != get_setting(_defaults(), key):
                yield key, row.condition
    inherited = vars(cfg.actor.fsdp_config)
    for role, section in roles(cfg).items():
        for name, value in vars(section.fsdp_config).items():
            if value != inherited[name] and section.strategy != "fsdp2":
                yield f"{role}.fsdp_config.{name}", f"{role}.strategy fsdp2"


@functools.cache
def _defaults() -> Config:
    return Config(DataConfig([]), ModelConfig(""), TrainerConfig(""))


def unread_line(cfg: Config) -> str | None:
    """Return a line that names the settings that are set and not read; None without one."""
    conditions: dict[str, list[str]] = {}
    for key, condition in unread(cfg):
        conditions.setdefault(condition, []).append(key)
    parts = [f"{', '.join(keys)} (read with {condition})" for condition, keys in conditions.items()]
    return f"warning: set, but not read: {'; '.join(parts)}" if parts else None
