"""The models of a run: each from its checkpoint in its own layout, with optimizer and routers.
Every mistake in a checkpoint is an error before the first model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlhf_mc.architectures.parameters import with_adapters
from rlhf_mc.architectures.run_shapes import balances_experts, router_replay
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint.hf_format import HFReader, import_hf
from rlhf_mc.checkpoint.megatron_format import load_mcore
from rlhf_mc.checkpoint.peft_format import read_adapters, start_adapters
from rlhf_mc.config.errors import UserError, error_prefix
from rlhf_mc.config.roles import has_reference_model, uses_critic
from rlhf_mc.config.schema import (
    ActorConfig,
    Config,
    CriticConfig,
    MegatronConfig,
    OptimConfig,
    layouts,
    reward_models,
    teacher_paths,
)
from rlhf_mc.data.conversations import ConversationTokenizer
from rlhf_mc.models.engine import ModelEngine, engine_layouts
from rlhf_mc.models.expert_parts import RouterBalance
from rlhf_mc.models.router_replay import ExpertReplay
from rlhf_mc.models.transformer_engine import check_fp8, uses_transformer_engine
from rlhf_mc.reshard.freeze import check_experts, frozen_parameters, frozen_tensors
from rlhf_mc.rollout.base import EngineFactory
from rlhf_mc.runtime.work import working
from rlhf_mc.setup.value_heads import (
    check_value_head,
    check_vocabulary,
    reward_model_checkpoint,
    token_checkpoint,
)
from rlhf_mc.topology.groups import ProcessGroups
from rlhf_mc.trainer.offload_schedule import OffloadSchedule


@dataclass(frozen=True)
class ModelStart:
    """The start of a role's model."""

    shape: ModelShape
    reader: HFReader
    mcore: str | None = None
    """Megatron checkpoint that is read in place of the reader's weights."""
    optim: OptimConfig | None = None
    """None for a model that is never trained."""
    frozen: frozenset[str] = frozenset()
    """Names in the checkpoint of the tensors that are not trained."""
    adapter: str | None = None
    """Directory of the PEFT adapter from which its adapters start."""


def model_starts(
    cfg: Config,
    factory: EngineFactory,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Mapping[str, ConversationTokenizer],
) -> dict[str, ModelStart]:
    """Return the start of each role's model, in the order of building. Raise UserError if a model
    is not supported."""
    mcore = cfg.model.dist_checkpointing_path
    with error_prefix("model.path:"):
        reader = HFReader(cfg.model.path)
        shape = reader.shape()
    try:
        factory.check_model(shape, cfg.rollout)
    except UserError as error:
        raise UserError(f"{error} (rollout: TP {cfg.rollout.tensor_model_parallel_size})") from None
    if mcore is None:
        with error_prefix("model.path:"):
            reader.check(shape)
    check_vocabulary("model.tokenizer_path", tokenizer, shape, f"model.path {cfg.model.path}")
    starts = {"actor": _trained("actor", cfg.actor, shape, reader, mcore)}
    if has_reference_model(cfg):
        starts["ref"] = ModelStart(shape, reader, mcore)
    if uses_critic(cfg):
        starts["critic"] = _critic_start(cfg, reader, tokenizer)
    for role in reward_models(cfg):
        reward_model = reward_model_checkpoint(cfg, role, tokenizer, conversations.get(role))
        starts[role] = ModelStart(reward_model.shape(value_head=True), reward_model)
    for role, path in teacher_paths(cfg).items():
        key = f"{role}.model_path"
        teacher = token_checkpoint(key, path, cfg.data, tokenizer, value_head=False)
        starts[role] = ModelStart(teacher.shape(), teacher)
    return starts


def _critic_start(cfg: Config, reader: HFReader, tokenizer: PreTrainedTokenizerBase) -> ModelStart:
    """Return the start of the critic. reader: the actor's checkpoint."""
    mcore = cfg.model.dist_checkpointing_path
    if cfg.critic.model_path is not None:
        reader = token_checkpoint("critic.model_path", cfg.critic.model_path, cfg.data, tokenizer)
        mcore = None
    else:
        check_value_head("model.path", reader)
    shape = reader.shape(value_head=True)
    reader.check(shape)
    return _trained("critic", cfg.critic, shape, reader, mcore)


def _trained(
    role: str,
    settings: ActorConfig | CriticConfig,
    shape: ModelShape,
    reader: HFReader,
    mcore: str | None,
) -> ModelStart:
    """Return the start of a model that is trained, with its adapters. Raise UserError if it cannot
    have them, or cannot freeze the tensors that its settings freeze."""
    shape = with_adapters(shape, f"{role}.lora", settings.lora)
    key = f"{role}.freeze"
    frozen = frozen_tensors(key, settings.freeze, shape)
    if uses_transformer_engine() and shape.lora is None:
        check_experts(key, frozen, shape)
    adapter = settings.lora.adapter_path
    return ModelStart(shape, reader, mcore, settings.optim, frozen, adapter)


def build_models(
    cfg: Config,
    starts: Mapping[str, ModelStart],
    groups: Mapping[str, ProcessGroups],
    total_steps: int,
    offload_schedule: OffloadSchedule,
) -> dict[str, ModelEngine]:
    """Return the models by role, with their optimizers. Each is offloaded before the next is built,
    and all of them before the rollout engine measures free memory."""
    models: dict[str, ModelEngine] = {}
    for role, start in starts.items():
        with working(f"building {role}"):
            models[role] = _load(role, start, layouts(cfg)[role], groups[role], cfg.trainer.seed)
            if start.optim is not None:
                frozen = frozen_parameters(
                    start.frozen, engine_layouts(models[role])[dist.get_rank()]
                )
                # The actor's learning-rate schedule counts the steps in which the actor is updated.
                warmup = cfg.trainer.critic_warmup if role == "actor" else 0
                models[role].make_trainable(start.optim, max(1, total_steps - warmup), frozen)
                if cfg.health.out_of_memory == "halve_tokens":
                    models[role].recover_memory()
            offload_schedule.add(role, models[role])
    models["actor"].predicts_observations = cfg.actor.env_loss_coef > 0
    _set_routers(cfg, models["actor"])
    return models


def _load(
    role: str, start: ModelStart, megatron: MegatronConfig, groups: ProcessGroups, seed: int
) -> ModelEngine:
    """Return a role's model in its own layout with its initial weights, from the Megatron
    checkpoint if there is one, else from the safetensors. A value head that the checkpoint lacks
    stays zero: the first values are 0. seed: of new adapters."""
    check_fp8(f"{role}.megatron", megatron)
    engine = ModelEngine(role, start.shape, megatron, groups)
    has_head = start.shape.value_head
    if start.mcore is not None:
        with error_prefix("model.dist_checkpointing_path:"):
            load_mcore(
                engine.model if groups.is_member else None,
                start.mcore,
                skip_prefixes=("output_layer.",) if has_head else (),
            )
    else:
        skip = ("score.weight",) if has_head and "score.weight" not in start.reader.names else ()
        base = engine_layouts(engine, start.shape.base)[groups.rank]
        import_hf(start.reader, base, engine.params, skip=skip)
    layout = engine_layouts(engine)[groups.rank]
    if start.adapter is not None:
        key = f"{role}.lora.adapter_path"
        read_adapters(key, start.adapter, engine.params, layout, start.shape)
    elif start.shape.lora is not None:
        start_adapters(engine.params, layout, start.shape, seed)
    return engine


def _set_routers(cfg: Config, actor: ModelEngine) -> None:
    """Set router replay and the losses of the actor's routers, where the run has them."""
    if not actor.groups.is_member:
        return
    shape = actor.shape
    if (mode := router_replay(cfg, shape)) != "off":
        actor.replay = ExpertReplay(mode, shape, actor.groups, actor.chunks)
    if balances_experts(cfg, shape):
        actor.balance = RouterBalance(cfg.actor, shape, actor.groups, actor.chunks)
