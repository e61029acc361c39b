"""Checks of values, and of several settings together. Ranges are in ranges.py, checks of paths in paths.py. Types,
unknown keys and required keys are checked in load.py. Checks that need the model or the data (heads divisible by TP,
columns of a file) are made where these are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from rlhf_mc.config.algorithm_schema import SEQUENCE_LOSSES, Needs
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.group_checks import check_filter_groups
from rlhf_mc.config.health_checks import check_health
from rlhf_mc.config.model_schema import TRAINING_ONLY
from rlhf_mc.config.paths import check_written
from rlhf_mc.config.profile_checks import check_profile
from rlhf_mc.config.ranges import check_range
from rlhf_mc.config.reward_checks import check_rewards
from rlhf_mc.config.reward_schema import NAMED, unnamed
from rlhf_mc.config.roles import absent_roles, needs_of, uses_critic
from rlhf_mc.config.schema import (
    FROZEN_ROLES,
    ActorConfig,
    Config,
    CriticConfig,
    DataConfig,
    MegatronConfig,
    OptimConfig,
    TrainerConfig,
    layouts,
    of_each_reward_model,
    reward_models,
    value_of,
)


def validate(cfg: Config, world_size: int) -> None:
    """Raise UserError if the settings do not allow a run on `world_size` processes. The message is one line with the
    key, its value and the values that are allowed."""
    check_written(cfg)
    _check_ranges(cfg)
    _check_optim("actor.optim", cfg.actor.optim, cfg.trainer.total_training_steps)
    _check_optim("critic.optim", cfg.critic.optim, cfg.trainer.total_training_steps)
    _check_layout(cfg, world_size)
    _check_frozen_roles(cfg)
    _check_offload(cfg)
    _check_quantization(cfg)
    _check_batches(cfg, world_size)
    _check_micro_batches(cfg)
    _check_algorithm(cfg)
    check_filter_groups(cfg)
    check_rewards(cfg)
    _check_validation(cfg)
    _check_checkpoints(cfg.trainer)
    check_health(cfg)
    check_profile(cfg.profile, world_size)


def _check_ranges(cfg: Config) -> None:
    for key, value in _leaves(cfg, ""):
        check_range(key, value)
        texts = value if isinstance(value, list) else [value]
        for text in texts:
            _require(
                not (isinstance(text, str) and "${" in text),
                f"{key} is {text!r}; references (${{...}}) are not replaced: write the value",
            )


def _leaves(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield each setting with its key."""
    for field in fields(section):
        key = f"{prefix}{field.name}"
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{key}.")
        elif key == NAMED:
            for name, named in value.items():
                yield from _leaves(named, f"{key}.{name}.")
        else:
            yield key, value


def _check_optim(key: str, optim: OptimConfig, total_steps: int | None) -> None:
    _require(optim.min_lr <= optim.lr, f"{key}.min_lr is {optim.min_lr}; it must be at most {key}.lr, {optim.lr}")
    for beta in optim.betas:
        _require(0 <= beta < 1, f"{key}.betas has {beta}; each must be at least 0 and below 1")
    _require(
        total_steps is None or optim.lr_warmup_steps <= total_steps,
        f"{key}.lr_warmup_steps is {optim.lr_warmup_steps}; it must be at most trainer.total_training_steps,"
        f" {total_steps}",
    )


def _check_layout(cfg: Config, world_size: int) -> None:
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    works = f"the {world_size} processes of this run; what would: {', '.join(map(str, divisors))}"
    for role, megatron in layouts(cfg).items():
        _check_role(f"{role}.megatron", megatron, world_size, divisors, works)
        _check_virtual_stages(cfg, role, megatron)
    rollout_tp = cfg.rollout.tensor_model_parallel_size
    _require(
        rollout_tp in divisors,
        f"rollout.tensor_model_parallel_size {rollout_tp} does not divide {works}",
    )


def _check_role(section: str, megatron: MegatronConfig, world_size: int, divisors: list[int], works: str) -> None:
    tp = megatron.tensor_model_parallel_size
    pp = megatron.pipeline_model_parallel_size
    _require(
        tp * pp in divisors,
        f"{section}.tensor_model_parallel_size {tp} x {section}.pipeline_model_parallel_size {pp} = {tp * pp}"
        f" does not divide {works}",
    )
    ep = megatron.expert_model_parallel_size
    dp = world_size // (tp * pp)
    _require(
        dp % ep == 0,
        f"{section}.expert_model_parallel_size {ep} does not divide the {dp} data-parallel replicas of this run"
        f"; what would: {', '.join(str(n) for n in range(1, dp + 1) if dp % n == 0)}",
    )
    _require(
        tp > 1 or not megatron.sequence_parallel,
        f"{section}.sequence_parallel is true; that needs {section}.tensor_model_parallel_size of at least 2",
    )
    _require(
        megatron.fp8 is None or megatron.dtype == "bfloat16",
        f"{section}.fp8 is {megatron.fp8!r} and {section}.dtype is {megatron.dtype}; fp8 needs bfloat16",
    )
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        layers = getattr(megatron, name)
        _require(
            layers is None or pp > 1,
            f"{section}.{name} is {layers}; that needs {section}.pipeline_model_parallel_size of at least 2",
        )


def _check_virtual_stages(cfg: Config, role: str, megatron: MegatronConfig) -> None:
    section = f"{role}.megatron"
    chunks = megatron.virtual_pipeline_model_parallel_size
    if chunks is None:
        return
    key = f"{section}.virtual_pipeline_model_parallel_size"
    _require(chunks >= 2, f"{key} is {chunks}; it must be at least 2, or null")
    _require(
        megatron.pipeline_model_parallel_size > 1,
        f"{key} is {chunks}; that needs {section}.pipeline_model_parallel_size of at least 2",
    )
    for other in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        _require(
            getattr(megatron, other) is None,
            f"{key} is {chunks}; with it all stages have as many layers: set {section}.{other} to null",
        )
    has_own_checkpoint = unnamed(role) == "reward_model" or (role == "critic" and cfg.critic.model_path is not None)
    _require(
        cfg.model.dist_checkpointing_path is None or has_own_checkpoint,
        f"{key} is {chunks}; with it weights come from the safetensors of model.path: set"
        " model.dist_checkpointing_path to null",
    )


def _check_frozen_roles(cfg: Config) -> None:
    defaults = MegatronConfig()
    frozen = [role for role in layouts(cfg) if unnamed(role) in FROZEN_ROLES]
    for role, name in itertools.product(frozen, TRAINING_ONLY):
        value = getattr(layouts(cfg)[role], name)
        _require(
            value == getattr(defaults, name),
            f"{role}.megatron.{name} is {str(value).lower()}; it does nothing for a model that is never trained:"
            " leave it out",
        )


def _check_offload(cfg: Config) -> None:
    _require(
        not (cfg.actor.megatron.param_offload and cfg.reshard.share_weights),
        "actor.megatron.param_offload is true and reshard.share_weights is true; weights that vLLM shares cannot be"
        " offloaded: set one of them to false",
    )


def _check_quantization(cfg: Config) -> None:
    quantization = cfg.rollout.quantization
    dtype = cfg.actor.megatron.dtype
    key = f"rollout.quantization is {quantization!r} and"
    _require(
        quantization is None or dtype == "bfloat16",
        f"{key} actor.megatron.dtype is {dtype}; vLLM quantizes bfloat16",
    )
    _require(
        quantization is None or not cfg.reshard.share_weights,
        f"{key} reshard.share_weights is true; vLLM cannot share weights that it quantizes: set"
        " reshard.share_weights to false",
    )


def _check_batches(cfg: Config, world_size: int) -> None:
    batch = cfg.data.train_batch_size
    trained: list[tuple[str, ActorConfig | CriticConfig]] = [("actor", cfg.actor)]
    trained += [("critic", cfg.critic)] if uses_critic(cfg) else []
    for role, section in trained:
        key = f"{role}.ppo_mini_batch_size"
        mini = cfg.actor.ppo_mini_batch_size if section.ppo_mini_batch_size is None else section.ppo_mini_batch_size
        megatron = section.megatron
        dp = world_size // (megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size)
        _require(
            batch % mini == 0,
            f"{key} is {mini}; it must divide data.train_batch_size, {batch}, and be no larger",
        )
        _require(
            mini * cfg.rollout.n >= dp,
            f"{key} {mini} x rollout.n {cfg.rollout.n} is fewer sequences than the {dp} data-parallel ranks"
            f" of {role}.megatron, each of which needs one",
        )
    _require(
        cfg.rollout.max_num_batched_tokens >= cfg.rollout.max_num_seqs,
        f"rollout.max_num_batched_tokens is {cfg.rollout.max_num_batched_tokens};"
        f" it must be at least rollout.max_num_seqs, {cfg.rollout.max_num_seqs}",
    )


_TOKEN_BUDGETS = {
    "actor.ppo_max_token_len_per_gpu": "actor.ppo_micro_batch_size_per_gpu",
    "critic.ppo_max_token_len_per_gpu": "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_max_token_len_per_gpu": "critic.forward_micro_batch_size_per_gpu",
    "rollout.log_prob_max_token_len_per_gpu": "rollout.log_prob_micro_batch_size_per_gpu",
    "ref.log_prob_max_token_len_per_gpu": "ref.log_prob_micro_batch_size_per_gpu",
    "reward_model.forward_max_token_len_per_gpu": "reward_model.forward_micro_batch_size_per_gpu",
}
"""Limits of a micro-batch in each pass: token budget (with actor.use_dynamic_bsz) -> number of sequences (without)."""


def _check_micro_batches(cfg: Config) -> None:
    dynamic = cfg.actor.use_dynamic_bsz
    for size in of_each_reward_model(cfg, _TOKEN_BUDGETS.values()):
        _require(
            value_of(cfg, size) is None or not dynamic,
            f"{size} is {value_of(cfg, size)}; that needs actor.use_dynamic_bsz: false",
        )
    _require(
        dynamic or cfg.actor.ppo_micro_batch_size_per_gpu is not None,
        "actor.use_dynamic_bsz is false; that needs actor.ppo_micro_batch_size_per_gpu, which is null",
    )
    prompt = cfg.data.max_prompt_length
    response = cfg.data.max_response_length
    absent = [f"{role}." for role in absent_roles(cfg)]
    # A reward model with a tokenizer of its own truncates what it reads.
    absent += [f"{role}." for role, section in reward_models(cfg).items() if section.tokenizer_path is not None]
    for key in of_each_reward_model(cfg, _TOKEN_BUDGETS):
        budget = value_of(cfg, key)
        _require(
            budget >= prompt + response or not dynamic or key.startswith(tuple(absent)),
            f"{key} is {budget}; it must be at least the longest sequence,"
            f" data.max_prompt_length {prompt} + data.max_response_length {response} = {prompt + response}",
        )


def _check_algorithm(cfg: Config) -> None:
    _check_estimator(cfg)
    _check_losses(cfg)
    _check_rollout_correction(cfg)
    kl_ctrl = cfg.algorithm.kl_ctrl
    if kl_ctrl.type == "adaptive":
        _range(cfg, "algorithm.kl_ctrl.target_kl", lambda value: value > 0, "above 0 where kl_ctrl.type is adaptive")
        _require(
            cfg.algorithm.use_kl_in_reward or cfg.actor.use_kl_loss,
            "algorithm.kl_ctrl.type is adaptive; that needs algorithm.use_kl_in_reward or actor.use_kl_loss: true",
        )


def _check_estimator(cfg: Config) -> None:
    custom = cfg.algorithm.custom_estimator
    name = cfg.algorithm.adv_estimator
    needs = needs_of(cfg.algorithm)
    key = f"algorithm.adv_estimator is {name}"
    _require(
        (name == "custom") == (custom.path is not None),
        f"{key} and algorithm.custom_estimator.path is {custom.path}; set both (custom, and a path) or neither",
    )
    given = [f"needs_{need.name}" for need in fields(Needs) if getattr(custom, f"needs_{need.name}")]
    _require(
        name == "custom" or not given,
        f"algorithm.custom_estimator.{', '.join(given)} is true and {key}; it is for adv_estimator custom",
    )
    _require(
        not needs.group or cfg.rollout.n >= 2,
        f"{key}, which compares the responses of a prompt; rollout.n is {cfg.rollout.n}; it must be at least 2",
    )
    enable = cfg.critic.enable
    _require(
        enable is None or enable == needs.critic,
        f"critic.enable is {str(enable).lower()} and {key}, which needs {'a' if needs.critic else 'no'} critic;"
        " set critic.enable to null",
    )
    _require(
        needs.critic or cfg.critic.model_path is None,
        f"critic.model_path is {cfg.critic.model_path} and {key}, which needs no critic; leave it out",
    )
    _require(
        needs.critic or cfg.trainer.critic_warmup == 0,
        f"trainer.critic_warmup is {cfg.trainer.critic_warmup} and {key}, which needs no critic; set it to 0",
    )


def _check_rollout_correction(cfg: Config) -> None:
    section = "algorithm.rollout_correction"
    found = cfg.algorithm.rollout_correction
    _require(
        len(found.rollout_rs) == len(found.rollout_rs_threshold),
        f"{section}.rollout_rs has {len(found.rollout_rs)} statistics and {section}.rollout_rs_threshold has"
        f" {len(found.rollout_rs_threshold)}; each statistic needs one threshold",
    )
    for name, threshold in zip(found.rollout_rs, found.rollout_rs_threshold, strict=True):
        _require(
            threshold > 1 or not name.endswith("k1"),
            f"{section}.rollout_rs_threshold of {name} is {threshold}; it bounds a ratio and must be above 1",
        )
    _require(
        found.rollout_rs_threshold_lower is None or any(name.endswith("k1") for name in found.rollout_rs),
        f"{section}.rollout_rs_threshold_lower is {found.rollout_rs_threshold_lower}, a bound of the ..._k1 statistics;"
        f" {section}.rollout_rs has none of them",
    )
    given = [name for name in ("rollout_is", "rollout_rs", "rollout_token_veto_threshold") if getattr(found, name)]
    _require(
        not (found.bypass_mode and given),
        f"{section}.bypass_mode is true and {section}.{' and '.join(given)} set; it needs the trainer's log-probs, and"
        " bypass_mode skips their pass: set one or the other",
    )


def _check_losses(cfg: Config) -> None:
    loss = cfg.actor.policy_loss
    mode = cfg.actor.loss_agg_mode
    key = f"actor.policy_loss.loss_mode is {loss.loss_mode}"
    _require(
        (loss.loss_mode == "custom") == (loss.custom_loss.path is not None),
        f"{key} and actor.policy_loss.custom_loss.path is {loss.custom_loss.path}; set both (custom, and a path) or"
        " neither",
    )
    _require(
        loss.loss_mode not in SEQUENCE_LOSSES or mode == "seq-mean-token-mean",
        f"{key}, a loss of sequences; actor.loss_agg_mode is {mode}; it must be seq-mean-token-mean",
    )
    _require(
        loss.clip_cov_lb < loss.clip_cov_ub,
        f"actor.policy_loss.clip_cov_lb is {loss.clip_cov_lb}; it must be below clip_cov_ub, {loss.clip_cov_ub}",
    )
    trained: tuple[tuple[str, ActorConfig | CriticConfig], ...] = (("actor", cfg.actor), ("critic", cfg.critic))
    for role, section in trained:
        _require(
            section.loss_scale_factor is None or section.loss_agg_mode == "seq-mean-token-sum-norm",
            f"{role}.loss_scale_factor is {section.loss_scale_factor}; that needs {role}.loss_agg_mode"
            f" seq-mean-token-sum-norm, and it is {section.loss_agg_mode}",
        )


def _check_data(data: DataConfig) -> None:
    _require(len(data.train_files) > 0, "data.train_files is empty; it must name at least one file")
    weights = data.train_file_weights
    _require(
        len(weights) in (0, len(data.train_files)),
        f"data.train_file_weights has {len(weights)} weights; data.train_files has {len(data.train_files)} files, and"
        " each needs one",
    )
    _require(
        data.truncation == "error" or not data.filter_overlong_prompts,
        f"data.truncation is {data.truncation} and data.filter_overlong_prompts is true, so that nothing is left to"
        " truncate: set truncation to error, or filter_overlong_prompts to false",
    )


def _check_validation(cfg: Config) -> None:
    _check_data(cfg.data)
    val = cfg.rollout.val_kwargs
    _require(
        val.n == 1 or val.temperature > 0,
        f"rollout.val_kwargs.n is {val.n} at temperature 0, where all responses are the same;"
        " set rollout.val_kwargs.temperature above 0, or n to 1",
    )
    _require(
        val.temperature > 0 or (val.top_p == 1.0 and val.top_k == -1),
        f"rollout.val_kwargs: top_p {val.top_p} and top_k {val.top_k} do nothing at temperature 0, which is greedy; set"
        " rollout.val_kwargs.temperature above 0, or leave them out",
    )
    _require(
        len(cfg.data.val_files) > 0 or not (cfg.trainer.val_only or cfg.trainer.validation_data_dir),
        "trainer.val_only and trainer.validation_data_dir need data.val_files, which is empty",
    )
    _require(
        cfg.trainer.best_metric is None or cfg.trainer.keep_best,
        f"trainer.best_metric is {cfg.trainer.best_metric}; that needs trainer.keep_best: true",
    )
    _require(
        cfg.trainer.test_freq == -1 or len(cfg.data.val_files) > 0,
        f"trainer.test_freq is {cfg.trainer.test_freq}; that needs data.val_files, which is empty",
    )
    _require(
        cfg.trainer.target_val_acc is None or cfg.trainer.test_freq > 0,
        f"trainer.target_val_acc is {cfg.trainer.target_val_acc}; that needs trainer.test_freq of at least 1",
    )


def _check_checkpoints(trainer: TrainerConfig) -> None:
    _require(
        (trainer.resume_mode == "resume_path") == (trainer.resume_from_path is not None),
        f"trainer.resume_mode is {trainer.resume_mode} and trainer.resume_from_path is {trainer.resume_from_path}; set"
        " both (resume_path, and a path) or neither",
    )
    for key in ("max_ckpt_to_keep", "keep_best"):
        value = getattr(trainer, key)
        _require(
            not value or trainer.save_freq > 0,
            f"trainer.{key} is {value}; that needs trainer.save_freq of at least 1",
        )
    _require(
        not trainer.keep_best or (trainer.test_freq > 0 and trainer.save_freq % trainer.test_freq == 0),
        f"trainer.keep_best is true; that needs a validation at every save: trainer.test_freq is {trainer.test_freq},"
        f" which must divide trainer.save_freq, {trainer.save_freq}",
    )


def _range(cfg: Config, key: str, ok: Callable[[Any], bool], want: str) -> None:
    """Raise UserError unless the value of the key is null or satisfies `ok`. want: the condition in words."""
    value = value_of(cfg, key)
    _require(value is None or ok(value), f"{key} is {value}; it must be {want}")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)
