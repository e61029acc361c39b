"""Checks of the models of a run, in the form of checks.py: of each model's layout by itself, and
of distillation. checks.py has the checks of the layouts on the run's processes. Teachers'
tokenizers, vocabularies and rows are checked where these are read.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_mc.config.algorithm_schema import SELECTING_LOSSES
from rlhf_mc.config.fields import needs
from rlhf_mc.config.model_schema import UNSPLIT, RoleLayout
from rlhf_mc.config.reward_schema import TEACHERS, unnamed
from rlhf_mc.config.roles import shared_models, uses_critic
from rlhf_mc.config.schema import Config, get_setting, layouts, roles
from rlhf_mc.config.yaml_reader import yaml_text


def problems(cfg: Config) -> Iterator[str]:
    """Yield the problems of the models' layouts and of distillation."""
    for role, megatron in layouts(cfg).items():
        yield from _layout(cfg, f"{role}.megatron", megatron)
        yield from _sharding(cfg, role, megatron)
        yield from _virtual_stages(cfg, role, megatron)
    for role in shared_models(cfg):
        yield from _shared(cfg, role)
    yield from _distillation(cfg)


def _sharding(cfg: Config, role: str, layout: RoleLayout) -> Iterator[str]:
    if layout.fsdp is None:
        return
    for name, wanted in UNSPLIT.items():
        if (value := getattr(layout, name)) != wanted:
            yield (
                f"{role}.strategy is fsdp2 and {role}.megatron.{name} is {yaml_text(value)}; set "
                f"it to {yaml_text(wanted)}, or {role}.strategy to megatron"
            )
    for name in ("param_offload", "optimizer_offload"):
        if layout.fsdp.offload_policy and getattr(layout, name):
            yield (
                f"{role}.fsdp_config.offload_policy and {role}.megatron.{name} are true; the first "
                "keeps all in host memory: set the second to false"
            )
    if cfg.model.dist_checkpointing_path is not None and not _has_own_checkpoint(cfg, role):
        yield (
            f"{role}.strategy is fsdp2; its weights come from the safetensors of model.path: set "
            "model.dist_checkpointing_path to null"
        )


def _shared(cfg: Config, role: str) -> Iterator[str]:
    """Yield the settings that a role without a model of its own does not have."""
    reason = f"actor.lora.rank is {cfg.actor.lora.rank}"
    model = "the reference is the actor without its adapters"
    if (source := getattr(roles(cfg)[role], "source", None)) is not None:
        reason = f"{role}.source is {source}"
        model = f"the teacher has the layout of {source}"
    names = ["strategy", *(f"megatron.{name}" for name in vars(roles(cfg)[role].megatron))]
    expected = {f"{role}.{name}": get_setting(cfg, f"actor.{name}") for name in names}
    pools = [f"{role}.pool", *(["ref.pool"] if source == "ref" else [])]
    for key, value in {**dict.fromkeys(pools, "train"), **expected}.items():
        if (here := get_setting(cfg, key)) != value:
            yield f"{reason} and {key} is {here}; {model}: remove it"


def _has_own_checkpoint(cfg: Config, role: str) -> bool:
    return unnamed(role) in ("reward_model", "teacher_model") or (
        role == "critic" and cfg.critic.model_path is not None
    )


def _layout(cfg: Config, section: str, megatron: RoleLayout) -> Iterator[str]:
    if megatron.tensor_model_parallel_size == 1 and megatron.sequence_parallel:
        ranks = f"{section}.tensor_model_parallel_size of at least 2"
        yield needs(cfg, f"{section}.sequence_parallel", ranks)
    if megatron.fp8 is not None and megatron.dtype != "bfloat16":
        yield (
            f"{section}.fp8 is {megatron.fp8!r} and {section}.dtype is {megatron.dtype}; fp8 needs "
            "bfloat16"
        )
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        if getattr(megatron, name) is not None and megatron.pipeline_model_parallel_size == 1:
            stages = f"{section}.pipeline_model_parallel_size of at least 2"
            yield needs(cfg, f"{section}.{name}", stages)


def _virtual_stages(cfg: Config, role: str, megatron: RoleLayout) -> Iterator[str]:
    section = f"{role}.megatron"
    chunks = megatron.virtual_pipeline_model_parallel_size
    if chunks is None:
        return
    key = f"{section}.virtual_pipeline_model_parallel_size is {chunks};"
    if megatron.pipeline_model_parallel_size == 1:
        yield f"{key} that needs {section}.pipeline_model_parallel_size of at least 2"
    for other in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        if getattr(megatron, other) is not None:
            yield f"{key} with it all stages have as many layers: set {section}.{other} to null"
    if cfg.model.dist_checkpointing_path is not None and not _has_own_checkpoint(cfg, role):
        yield (
            f"{key} with it weights come from the safetensors of model.path: set "
            "model.dist_checkpointing_path to null"
        )


def _distillation(cfg: Config) -> Iterator[str]:
    if not cfg.distillation.enabled:
        return
    teachers = cfg.distillation.teacher_models
    if not teachers:
        yield f"distillation.enabled is true and {TEACHERS} is empty; it needs a teacher"
    for name, teacher in teachers.items():
        if (teacher.model_path is None) == (teacher.source is None):
            yield (
                f"{TEACHERS}.{name} has model_path {yaml_text(teacher.model_path)} and source "
                f"{yaml_text(teacher.source)}; a teacher has one of them"
            )
        if teacher.prompt_key is not None and cfg.rollout.environment.is_agent:
            yield (
                f"{TEACHERS}.{name}.prompt_key is {teacher.prompt_key}, and an agent's requests "
                "have its prompts: remove it"
            )
    keys = [teacher.key for teacher in teachers.values()]
    for name, teacher in teachers.items() if len(keys) > 1 else ():
        if teacher.key is None or keys.count(teacher.key) > 1:
            yield (
                f"{TEACHERS}.{name}.key is {yaml_text(teacher.key)}; of {len(keys)} teachers each "
                "needs the data source that it scores, and a data source has one"
            )
    loss = cfg.distillation.distillation_loss
    section = "distillation.distillation_loss"
    if loss.loss_mode in ("k1", "kl") and not loss.use_policy_gradient:
        yield (
            f"{section}.loss_mode is {loss.loss_mode}, whose gradient does not depend on the "
            f"teacher, and {section}.use_policy_gradient is false; set it to true, or another mode"
        )
    mode = cfg.actor.policy_loss.loss_mode
    if mode in SELECTING_LOSSES and (loss.use_policy_gradient or not loss.use_task_rewards):
        yield (
            f"actor.policy_loss.loss_mode is {mode}, which selects tokens by the rewards' "
            f"advantages, and {section} changes them in the update; set another loss"
        )
    if uses_critic(cfg) and not loss.use_task_rewards:
        yield (
            f"{section}.use_task_rewards is false and algorithm.adv_estimator is "
            f"{cfg.algorithm.adv_estimator}, whose critic no loss of the actor would read; set "
            "another, such as reinforce_plus_plus"
        )
