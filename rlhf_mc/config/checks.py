"""Checks of a config. Of several settings together a check is a generator of problems, each one
line with the key, its value and the values that are allowed. algorithm_checks.py has the checks of
algorithm, reward and environment, role_checks.py of each model's layout and of distillation,
paths.py of paths. Types, unknown keys and required keys are checked in load.py. Checks that need
the model or the data (heads divisible by TP, columns of a file) are made where these are read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from rlhf_mc.config import algorithm_checks, role_checks
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.fields import check_values, needs
from rlhf_mc.config.health_schema import RESPONSES, listed_responses, rolls_back
from rlhf_mc.config.paths import check_written
from rlhf_mc.config.roles import (
    PASSES,
    absent_roles,
    has_ref_pass,
    has_rollout_pool,
    in_rollout_pool,
    mini_batch_sizes,
    num_rollout_ranks,
    num_training_ranks,
    saves_checkpoints,
    shared_models,
    shares_weights,
    tokens_on_rank,
    uses_critic,
)
from rlhf_mc.config.schema import (
    Config,
    expand_named_models,
    get_setting,
    layouts,
    reward_models,
    roles,
)
from rlhf_mc.config.yaml_reader import yaml_text

_SET_BY_THE_PROGRAM = {"conversation", "tokenize", "add_generation_prompt", "return_dict"}
"""Arguments of a tokenizer's apply_chat_template."""
_AT_MOST = (
    ("actor.optim.min_lr", "actor.optim.lr"),
    ("critic.optim.min_lr", "critic.optim.lr"),
    ("actor.optim.lr_warmup_steps", "trainer.total_training_steps"),
    ("critic.optim.lr_warmup_steps", "trainer.total_training_steps"),
    ("rollout.max_num_seqs", "rollout.max_num_batched_tokens"),
    ("reward.overlong_buffer.len", "data.max_response_length"),
    ("health.ppo_kl_max", "health.ppo_kl_explosion"),
)
"""A setting, and the setting that is its largest value; null: it has none."""
_WITH_PATH = (
    ("algorithm.adv_estimator", "custom", "algorithm.custom_estimator.path"),
    ("actor.policy_loss.loss_mode", "custom", "actor.policy_loss.custom_loss.path"),
    ("rollout.name", "custom", "rollout.custom_engine.path"),
    ("trainer.resume_mode", "resume_path", "trainer.resume_from_path"),
)
"""A choice, the value of it that needs a path, and the setting of the path."""


def check_config(cfg: Config, world_size: int | None) -> None:
    """Raise UserError with the first problem if the settings do not allow a run on `world_size`
    processes; None: on any number of them."""
    check_written(cfg)
    check_values(cfg)
    problems = itertools.chain(
        _pairs(cfg),
        role_checks.problems(cfg),
        _storage(cfg),
        _adapters(cfg),
        _batches(cfg),
        _pools(cfg),
        _processes(cfg, world_size) if world_size is not None else (),
        _token_budgets(cfg),
        algorithm_checks.problems(cfg),
        _data(cfg),
        _validation(cfg),
        _checkpoints(cfg),
        _health(cfg),
        _profile(cfg),
    )
    for problem in problems:
        raise UserError(problem)


def _pairs(cfg: Config) -> Iterator[str]:
    for key, largest in _AT_MOST:
        value = get_setting(cfg, key)
        most = get_setting(cfg, largest)
        if most is not None and value > most:
            yield f"{key} is {value}; it must be at most {largest}, {most}"
    for key, choice, path in _WITH_PATH:
        chosen = get_setting(cfg, key)
        given = get_setting(cfg, path)
        if (chosen == choice) != (given is not None):
            yield (
                f"{key} is {chosen} and {path} is {yaml_text(given)}; set both ({choice}, and a "
                "path) or neither"
            )


def _pools(cfg: Config) -> Iterator[str]:
    pools = cfg.resource_pools
    if (pools.train is None) != (pools.rollout is None):
        yield (
            f"resource_pools.train is {yaml_text(pools.train)} and resource_pools.rollout is "
            f"{yaml_text(pools.rollout)}; both must be set, or neither"
        )
    if not has_rollout_pool(cfg):
        for role, section in roles(cfg).items():
            if getattr(section, "pool", "train") == "rollout":
                yield needs(cfg, f"{role}.pool", "resource_pools.rollout")
        return
    if cfg.health.out_of_memory == "halve_tokens":
        yield (
            "health.out_of_memory is halve_tokens and resource_pools is set; ranks of the rollout "
            "pool do not repeat updates: set it to stop"
        )


def _processes(cfg: Config, world_size: int) -> Iterator[str]:
    num_training = num_training_ranks(cfg, world_size)
    num_rollout = num_rollout_ranks(cfg, world_size)
    if has_rollout_pool(cfg) and num_training + num_rollout != world_size:
        yield (
            f"resource_pools.train {num_training} + resource_pools.rollout {num_rollout} = "
            f"{num_training + num_rollout} ranks; this run has {world_size} processes"
        )
    for pool in ("train", "rollout") if has_rollout_pool(cfg) else ("train",):
        yield from _model_ranks(cfg, pool, num_training if pool == "train" else num_rollout)
    yield from _rollout_ranks(cfg, num_rollout)
    for rank in cfg.profile.ranks or ():
        if rank >= world_size:
            has = "rank 0 alone" if world_size == 1 else f"ranks 0 to {world_size - 1}"
            yield f"profile.ranks has {rank}; a run of {world_size} processes has {has}"


def _works(num_ranks: int, pool: str) -> str:
    """Return the end of a problem of a size that must divide the ranks of a pool."""
    return f"the {num_ranks} processes of {pool}; what would: {_divisors(num_ranks)}"


def _rollout_ranks(cfg: Config, num_ranks: int) -> Iterator[str]:
    rollout_tp = cfg.rollout.tensor_model_parallel_size
    if num_ranks % rollout_tp:
        works = _works(num_ranks, "resource_pools.rollout" if has_rollout_pool(cfg) else "this run")
        yield f"rollout.tensor_model_parallel_size {rollout_tp} does not divide {works}"
    tp = cfg.actor.megatron.tensor_model_parallel_size
    if tp % rollout_tp and rollout_tp % tp:
        yield (
            f"rollout.tensor_model_parallel_size {rollout_tp} and "
            f"actor.megatron.tensor_model_parallel_size {tp}: one must divide the other"
        )


def _model_ranks(cfg: Config, pool: str, num_ranks: int) -> Iterator[str]:
    works = _works(num_ranks, f"resource_pools.{pool}" if has_rollout_pool(cfg) else "this run")
    replicas = {}
    for role, megatron in layouts(cfg).items():
        if in_rollout_pool(cfg, role) != (pool == "rollout"):
            continue
        tp = megatron.tensor_model_parallel_size
        pp = megatron.pipeline_model_parallel_size
        cp = megatron.context_parallel_size
        ep = megatron.expert_model_parallel_size
        replicas[role] = num_ranks // (tp * pp * cp)
        if num_ranks % (tp * pp * cp):
            context = f" x {role}.megatron.context_parallel_size {cp}" if cp > 1 else ""
            yield (
                f"{role}.megatron.tensor_model_parallel_size {tp} x "
                f"{role}.megatron.pipeline_model_parallel_size"
                f" {pp}{context} = {tp * pp * cp} does not divide {works}"
            )
        size = megatron.fsdp.fsdp_size if megatron.fsdp is not None else -1
        if size > 0 and num_ranks % size:
            yield f"{role}.fsdp_config.fsdp_size {size} does not divide {works}"
        if megatron.dynamic_context_parallel and (cp == 1 or cp & (cp - 1)):
            yield (
                f"{role}.megatron.context_parallel_size is {cp}; with "
                f"{role}.megatron.dynamic_context_parallel it must"
                " be a power of two from 2 on, the largest size"
            )
        if (copies := num_ranks // (tp * pp)) % ep:
            yield (
                f"{role}.megatron.expert_model_parallel_size {ep} does not divide the {copies} "
                f"replicas of this run; what would: {_divisors(copies)}"
            )
    for role, mini in mini_batch_sizes(cfg).items():
        if role in replicas and mini * cfg.rollout.n < replicas[role]:
            yield (
                f"{role}.ppo_mini_batch_size {mini} x rollout.n {cfg.rollout.n} is fewer sequences "
                f"than the {replicas[role]} data-parallel ranks of {role}.megatron, each of which "
                "needs one"
            )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _storage(cfg: Config) -> Iterator[str]:
    if cfg.actor.megatron.param_offload and shares_weights(cfg):
        yield (
            "actor.megatron.param_offload is true and reshard.share_weights is true; weights that "
            "the engine shares cannot be offloaded: set one of them to false"
        )
    if cfg.rollout.quantization is None:
        return
    key = f"rollout.quantization is {cfg.rollout.quantization!r} and"
    if cfg.actor.megatron.dtype != "bfloat16":
        yield f"{key} actor.megatron.dtype is {cfg.actor.megatron.dtype}; vLLM quantizes bfloat16"
    if shares_weights(cfg):
        yield (
            f"{key} reshard.share_weights is true; vLLM cannot share weights that it quantizes: set"
            " reshard.share_weights to false"
        )


def _adapters(cfg: Config) -> Iterator[str]:
    for role, section in (("actor", cfg.actor), ("critic", cfg.critic)):
        if section.lora.rank == 0:
            continue
        key = f"{role}.lora.rank is {section.lora.rank} and"
        if section.freeze:
            yield f"{key} {role}.freeze is set; all but the adapters is frozen: remove it"
        if section.megatron.fp8 is not None:
            yield f"{key} {role}.megatron.fp8 is set; adapters have no fp8: set it to null"
        if section.strategy != "megatron":
            yield f"{key} {role}.strategy is {section.strategy}; adapters need megatron"
    if cfg.actor.lora.rank == 0:
        return
    key = f"actor.lora.rank is {cfg.actor.lora.rank} and"
    if cfg.actor.moe_router_bias_update_rate > 0:
        yield (
            f"{key} actor.moe_router_bias_update_rate is {cfg.actor.moe_router_bias_update_rate}; "
            "routers are frozen: set it to 0"
        )


def _batches(cfg: Config) -> Iterator[str]:
    batch = cfg.data.train_batch_size
    for role, mini in mini_batch_sizes(cfg).items():
        if batch % mini:
            yield (
                f"{role}.ppo_mini_batch_size is {mini}; it must divide data.train_batch_size, "
                f"{batch}, and be no larger"
            )


def _token_budgets(cfg: Config) -> Iterator[str]:
    prompt = cfg.data.max_prompt_length
    response = cfg.data.max_response_length
    longest = prompt + response
    exempt = {*absent_roles(cfg), *([] if has_ref_pass(cfg) else ["ref"])}
    # A reward model with a tokenizer of its own truncates what it reads.
    exempt |= {role for role, section in reward_models(cfg).items() if section.tokenizer_path}
    passes = (*PASSES.values(), "teacher_model.log_prob")
    models = {"rollout": "actor", **shared_models(cfg)}
    for key in (f"{name}_max_token_len_per_gpu" for name in expand_named_models(cfg, passes)):
        budget = get_setting(cfg, key)
        role = key.rpartition(".")[0]
        cp = layouts(cfg)[models.get(role, role)].context_parallel_size
        if budget < tokens_on_rank(longest, cp) and role not in exempt:
            share = (
                f", of which each of {cp} ranks has {tokens_on_rank(longest, cp)}" if cp > 1 else ""
            )
            yield (
                f"{key} is {budget}; it must be at least the longest sequence, "
                f"data.max_prompt_length {prompt} + data.max_response_length {response} = "
                f"{longest}{share}"
            )


def _data(cfg: Config) -> Iterator[str]:
    data = cfg.data
    if not data.train_files:
        yield "data.train_files is empty; it must name at least one file"
    if len(data.train_file_weights) not in (0, len(data.train_files)):
        yield (
            f"data.train_file_weights has {len(data.train_file_weights)} weights; data.train_files "
            f"has {len(data.train_files)} files, and each needs one"
        )
    for name in data.apply_chat_template_kwargs:
        if name in _SET_BY_THE_PROGRAM:
            yield f"data.apply_chat_template_kwargs: {name!r} is set by the program; remove it"
    if data.truncation != "error" and data.filter_overlong_prompts:
        yield (
            f"data.truncation is {data.truncation} and data.filter_overlong_prompts is true, so "
            "that nothing is left to truncate: set truncation to error, or filter_overlong_prompts "
            "to false"
        )


def _validation(cfg: Config) -> Iterator[str]:
    val = cfg.rollout.val_kwargs
    trainer = cfg.trainer
    if val.n > 1 and val.temperature == 0:
        yield (
            f"rollout.val_kwargs.n is {val.n} at temperature 0, where all responses are the same;"
            " set rollout.val_kwargs.temperature above 0, or n to 1"
        )
    if val.temperature == 0 and (val.top_p, val.top_k) != (1.0, -1):
        yield (
            f"rollout.val_kwargs: top_p {val.top_p} and top_k {val.top_k} do nothing at "
            "temperature 0, which is greedy;"
            " set rollout.val_kwargs.temperature above 0, or leave them out"
        )
    if not cfg.data.val_files and (trainer.val_only or trainer.validation_data_dir):
        yield "trainer.val_only and trainer.validation_data_dir need data.val_files, which is empty"
    if trainer.best_metric is not None and not trainer.keep_best:
        yield needs(cfg, "trainer.best_metric", "trainer.keep_best: true")
    if trainer.test_freq != -1 and not cfg.data.val_files:
        yield needs(cfg, "trainer.test_freq", "data.val_files, which is empty")
    if trainer.target_val_acc is not None and trainer.test_freq == -1:
        yield needs(cfg, "trainer.target_val_acc", "trainer.test_freq of at least 1")


def _checkpoints(cfg: Config) -> Iterator[str]:
    trainer = cfg.trainer
    if trainer.max_ckpt_to_keep and not saves_checkpoints(trainer):
        saves = "trainer.save_freq of at least 1, or trainer.save_minutes"
        yield needs(cfg, "trainer.max_ckpt_to_keep", saves)
    if trainer.keep_best and trainer.save_freq == -1:
        yield needs(cfg, "trainer.keep_best", "trainer.save_freq of at least 1")
    if trainer.keep_best and (trainer.test_freq == -1 or trainer.save_freq % trainer.test_freq):
        validates = f"a validation at every save: trainer.test_freq is {trainer.test_freq}, which"
        divides = f"{validates} must divide trainer.save_freq, {trainer.save_freq}"
        yield needs(cfg, "trainer.keep_best", divides)


def _health(cfg: Config) -> Iterator[str]:
    health = cfg.health
    for rule in itertools.chain.from_iterable(getattr(health, response) for response in RESPONSES):
        listed = listed_responses(health, rule)
        if len(listed) > 1:
            settings = [
                f"health.{'kl_coef' if response == 'fixed_kl_coef' else response}"
                for response in listed
            ]
            yield f"{' and '.join(settings)} are both responses to {rule}; a rule has one"
    if rolls_back(health) and cfg.trainer.save_freq == -1:
        yield (
            f"health.roll_back has {health.roll_back[0]}; that needs checkpoints: "
            "trainer.save_freq of at least 1"
            f" (now {cfg.trainer.save_freq})"
        )
    if health.enable and health.kl_coef is not None and not has_ref_pass(cfg):
        term = "a KL term: algorithm.use_kl_in_reward or actor.use_kl_loss: true"
        yield needs(cfg, "health.kl_coef", term)
    if health.out_of_memory == "halve_tokens":
        yield from _halving(cfg)


_ALONE = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "overlap_grad_reduce": False,
}
"""The settings of MegatronConfig with which a rank computes its gradients without another."""


def _halving(cfg: Config) -> Iterator[str]:
    key = "health.out_of_memory"
    for role in ("actor", "critic") if uses_critic(cfg) else ("actor",):
        if get_setting(cfg, f"{role}.strategy") != "megatron":
            strategy = f"{role}.strategy: megatron, since ranks gather weights in an update"
            yield needs(cfg, key, strategy)
        for name, wanted in _ALONE.items():
            if (value := getattr(layouts(cfg)[role], name)) != wanted:
                yield needs(
                    cfg,
                    key,
                    f"{role}.megatron.{name}: {yaml_text(wanted)} (now {yaml_text(value)}), since "
                    "no rank may wait for another within an update",
                )


def _profile(cfg: Config) -> Iterator[str]:
    profile = cfg.profile
    if profile.contents and not profile.steps:
        yield needs(cfg, "profile.contents", "profile.steps, which is empty")
    if profile.contents and profile.ranks == []:
        yield needs(cfg, "profile.contents", "traces, and profile.ranks is empty")
