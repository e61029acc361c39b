"""Building a run from its config: data, models, rollout engine, the plan of the weight update.
Every mistake in the user's input that early_checks.py has not seen is an error here, before the
first step; the cheapest checks come first.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlhf_mc import platform
from rlhf_mc.algorithms.kl import KLController
from rlhf_mc.architectures.run_shapes import balances_experts, model_shapes, router_replay
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint.hf_format import HFReader, import_hf, read_config
from rlhf_mc.checkpoint.input_fingerprints import read_inputs
from rlhf_mc.checkpoint.megatron_format import load_mcore
from rlhf_mc.config.errors import UserError, error_prefix
from rlhf_mc.config.roles import (
    adapts_kl_loss,
    has_contiguous_experts,
    token_budgets,
    uses_critic,
    uses_reference,
)
from rlhf_mc.config.schema import (
    Config,
    MegatronConfig,
    OptimConfig,
    layouts,
    reward_models,
    score_part,
)
from rlhf_mc.config.unread import unread_line
from rlhf_mc.data.conversations import ConversationTokenizer
from rlhf_mc.data.dataset import Prompts
from rlhf_mc.data.order import PromptOrder, check_batch, check_weights
from rlhf_mc.data.prompts import load_prompts
from rlhf_mc.data.source import scored_by_rule
from rlhf_mc.data.tokenizer import load_tokenizer
from rlhf_mc.environments.environment_manager import EnvironmentManager
from rlhf_mc.environments.journal import ObservationJournal, environment_digest
from rlhf_mc.health.adjustments import Adjustments
from rlhf_mc.machine.facts import available_memory
from rlhf_mc.models.engine import ModelEngine, engine_layouts
from rlhf_mc.models.gpt_model import DTYPES
from rlhf_mc.models.router_balance import RouterBalance
from rlhf_mc.models.router_replay import ExpertReplay
from rlhf_mc.models.transformer_engine import check_fp8, uses_transformer_engine
from rlhf_mc.planner.start import Capacity, check_start
from rlhf_mc.reshard.execute import aliased_views
from rlhf_mc.reshard.freeze import check_experts, frozen_parameters, frozen_tensors
from rlhf_mc.reshard.grouping import choose_rollout_groups
from rlhf_mc.reshard.layout import correction_biases
from rlhf_mc.reshard.placement import rollout_layouts, with_contiguous_experts
from rlhf_mc.reshard.weight_sync import WeightSync, plan_weight_sync
from rlhf_mc.rewards.manager import RewardManager
from rlhf_mc.rollout.base import EngineFactory, RolloutEngine
from rlhf_mc.rollout.engines import engine_factory
from rlhf_mc.rollout.work_sharing import ResponseLengths
from rlhf_mc.run_directory.lock import check_free
from rlhf_mc.runtime.console import print_line
from rlhf_mc.runtime.work import importing, working
from rlhf_mc.setup.custom_functions import load_estimator, load_policy_loss
from rlhf_mc.setup.gpu_settings import for_this_device
from rlhf_mc.setup.scorable import check_mixture, print_special_tokens, scorable
from rlhf_mc.setup.value_heads import check_value_head, reward_model_checkpoint, value_checkpoint
from rlhf_mc.topology.consensus import gather_objects, on_every_rank, on_rank_0, ranks_per_node
from rlhf_mc.topology.groups import ProcessGroups, build_role_groups, set_timeout_of_all_groups
from rlhf_mc.topology.mesh import training_mesh
from rlhf_mc.topology.shared_gpu import shared_gpu_line
from rlhf_mc.trainer.logprob_check import DEFAULT_BOUND, LogProbCheck
from rlhf_mc.trainer.offload_schedule import OffloadSchedule
from rlhf_mc.trainer.pool.group_pool import GroupPool
from rlhf_mc.trainer.pool.rollout_journal import RolloutJournal
from rlhf_mc.trainer.reward_models import RewardModel, conversation_tokenizers
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.skipped_updates import MOST_CONSECUTIVE, SkippedUpdates
from rlhf_mc.trainer.step_schedule import StepSchedule


def build_run(cfg: Config) -> Run:
    """Build all parts of a run. Every rank must call it, with the same config, which check_early
    has checked, after init_process_group."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    cfg = for_this_device(cfg)
    for line in filter(None, (shared_gpu_line(), unread_line(cfg))):
        print_line(line, rank_0_only=True)
    factory = on_every_rank(lambda: engine_factory(cfg.rollout))
    journal = on_every_rank(lambda: RolloutJournal(cfg))
    with importing(f"importing {factory.title}"):
        on_every_rank(factory.check_installation)
    check_free(Path(cfg.trainer.default_local_dir))
    tokenizer = on_every_rank(lambda: _tokenizer(cfg))
    conversations = on_every_rank(lambda: conversation_tokenizers(cfg))
    vocab_size = on_every_rank(lambda: model_shapes(cfg)["actor"][1].vocab_size)
    stops = on_every_rank(lambda: stop_token_ids(cfg.model.path, tokenizer, vocab_size))
    environments = (
        _environments(cfg, tokenizer, stops, rank) if cfg.rollout.environment.is_set else None
    )
    train_prompts, val_prompts = _prompts(cfg, tokenizer, bool(conversations), environments)
    # The user's files may be missing on one node.
    estimator = on_every_rank(lambda: load_estimator(cfg.algorithm))
    policy_loss = on_every_rank(lambda: load_policy_loss(cfg.actor))
    scorers = {score_part(role): f"{role}.model_path" for role in reward_models(cfg)}
    rewards = on_every_rank(
        lambda: RewardManager(
            cfg.custom_reward_function, cfg.reward, scorers, cfg.rollout.environment
        )
    )
    print_special_tokens(cfg, rewards, tokenizer)
    check_mixture(rewards.mixture.sources, train_prompts, val_prompts)
    train_prompts = scorable(
        rewards, train_prompts, cfg.data.on_bad_row, True, conversations.values()
    )
    val_prompts = scorable(rewards, val_prompts, cfg.data.on_bad_row, False)
    check_weights(cfg.data, train_prompts.file_sizes)
    check_batch(cfg.data, len(train_prompts))
    order = PromptOrder(cfg.data, train_prompts.file_sizes, cfg.trainer.seed)
    total_prompts = cfg.trainer.total_epochs * order.epoch_length
    # A step draws at least one batch.
    total_steps = (
        cfg.trainer.total_training_steps or cfg.trainer.total_epochs * order.batches_per_epoch
    )

    starts = on_every_rank(lambda: _starts(cfg, factory, tokenizer, conversations))
    with working("planning"):
        fit, staying = _check_memory(cfg, {role: start.shape for role, start in starts.items()})
    if fit is not None and "console" in cfg.trainer.logger:
        print_line(fit, sys.stdout, rank_0_only=True)
    inputs = read_inputs(cfg)
    meshes = {role: training_mesh(layouts(cfg)[role], world) for role in starts}
    groups = build_role_groups(meshes, cfg.trainer.dist_timeout_seconds)

    offload_schedule = OffloadSchedule()
    models = _build_models(cfg, starts, groups, total_steps, offload_schedule)
    for role, model in models.items():
        model.offload.optimizer_stays = role in staying
    actor = models["actor"]
    _set_routers(cfg, actor)
    budgets = token_budgets(cfg)
    weight_sync, rollout = _rollout(cfg, factory, actor, rank)
    if environments is not None:
        environments.connect(rollout.groups)
    if cfg.rollout.free_cache_engine:
        offload_schedule.add_rollout(rollout)
    set_timeout_of_all_groups(cfg.trainer.dist_timeout_seconds)
    return Run(
        config=cfg,
        groups=groups["actor"],
        tokenizer=tokenizer,
        stop_token_ids=stops,
        train_prompts=train_prompts,
        val_prompts=val_prompts,
        schedule=StepSchedule(cfg.trainer, total_steps, total_prompts, bool(val_prompts)),
        token_budgets=budgets,
        inputs=inputs,
        rewards=rewards,
        actor=actor,
        critic=models.get("critic"),
        reference=models.get("ref"),
        reward_models=[
            RewardModel(
                role, str(scorer.model_path), models[role], budgets[role], conversations.get(role)
            )
            for role, scorer in reward_models(cfg).items()
        ],
        rollout=rollout,
        environments=environments,
        group_pool=GroupPool(),
        journal=journal,
        response_lengths=ResponseLengths(),
        weight_sync=weight_sync,
        offload_schedule=offload_schedule,
        estimator=estimator,
        policy_loss=policy_loss,
        kl_controller=_kl_controller(cfg),
        log_prob_check=_log_prob_check(cfg, tokenizer),
        adjustments=Adjustments(Path(cfg.trainer.default_local_dir)),
        skipped=SkippedUpdates(MOST_CONSECUTIVE, Path(cfg.trainer.default_local_dir)),
    )


def _build_models(
    cfg: Config,
    starts: Mapping[str, _Start],
    groups: Mapping[str, ProcessGroups],
    total_steps: int,
    offload_schedule: OffloadSchedule,
) -> dict[str, ModelEngine]:
    """Return the models by role, with their optimizers. Each is offloaded before the next is built,
    and all of them before the rollout engine measures free memory."""
    models: dict[str, ModelEngine] = {}
    for role, start in starts.items():
        with working(f"building {role}"):
            models[role] = _load(role, start, layouts(cfg)[role], groups[role])
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
    return models


def _tokenizer(cfg: Config) -> PreTrainedTokenizerBase:
    template = cfg.data.chat_template_path
    if cfg.model.tokenizer_path is None:
        return load_tokenizer(cfg.model.path, "model.path", template)
    return load_tokenizer(cfg.model.tokenizer_path, "model.tokenizer_path", template)


def _environments(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, stops: tuple[int, ...], rank: int
) -> EnvironmentManager:
    """Return the environments of conversations, and their journal. Every rank must call it."""
    environment = cfg.rollout.environment

    def build() -> EnvironmentManager:
        root = None if cfg.trainer.val_only else Path(cfg.trainer.default_local_dir)
        digest = environment_digest(environment, cfg.data.max_response_length)
        bounds = len(tokenizer), cfg.data.max_response_length
        journal = ObservationJournal(root, cfg.trainer.replay, rank, digest, *bounds)
        return EnvironmentManager(environment, cfg.data, tokenizer, stops, journal)

    return on_every_rank(build, "rollout.environment")


def _prompts(
    cfg: Config,
    tokenizer: PreTrainedTokenizerBase,
    train_messages: bool,
    environments: EnvironmentManager | None,
) -> tuple[Prompts, Prompts]:
    """Return the training and the validation prompts. train_messages: the former keep their
    messages; with environments both do. Every rank must call it."""
    data = cfg.data
    messages = environments is not None
    if environments is not None:
        data = replace(data, apply_chat_template_kwargs=environments.translator.prompt_arguments)

    def load(key: str, files: Sequence[str], most_rows: int, messages: bool) -> Prompts:
        return load_prompts(
            files, tokenizer, data, most_rows, key, scored_by_rule(cfg, key), messages
        )

    train = load(
        "data.train_files", data.train_files, data.train_max_samples, train_messages or messages
    )
    if not data.val_files:
        return train, Prompts([])
    return train, load("data.val_files", data.val_files, data.val_max_samples, messages)


@dataclass(frozen=True)
class _Start:
    """The start of a role's model."""

    shape: ModelShape
    reader: HFReader
    mcore: str | None = None
    """Megatron checkpoint that is read in place of the reader's weights."""
    optim: OptimConfig | None = None
    """None for a model that is never trained."""
    frozen: frozenset[str] = frozenset()
    """Names in the checkpoint of the tensors that are not trained."""


def _starts(
    cfg: Config,
    factory: EngineFactory,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Mapping[str, ConversationTokenizer],
) -> dict[str, _Start]:
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
    _check_checkpoint(cfg, shape, reader, tokenizer)
    starts = {
        "actor": _Start(
            shape, reader, mcore, cfg.actor.optim, _frozen("actor", cfg.actor.freeze, shape)
        )
    }
    if uses_reference(cfg):
        starts["ref"] = _Start(shape, reader, mcore)
    if uses_critic(cfg):
        starts["critic"] = _critic_start(cfg, reader, tokenizer)
    for role in reward_models(cfg):
        reward_model = reward_model_checkpoint(cfg, role, tokenizer, conversations.get(role))
        starts[role] = _Start(reward_model.shape(value_head=True), reward_model)
    if "critic" in starts:
        starts["critic"].reader.check(starts["critic"].shape)
    return starts


def _critic_start(cfg: Config, reader: HFReader, tokenizer: PreTrainedTokenizerBase) -> _Start:
    """Return the start of the critic. reader: the actor's checkpoint."""
    mcore = cfg.model.dist_checkpointing_path
    if cfg.critic.model_path is not None:
        reader = value_checkpoint("critic.model_path", cfg.critic.model_path, cfg.data, tokenizer)
        mcore = None
    else:
        check_value_head("model.path", reader)
    shape = reader.shape(value_head=True)
    return _Start(
        shape, reader, mcore, cfg.critic.optim, _frozen("critic", cfg.critic.freeze, shape)
    )


def _frozen(role: str, patterns: Sequence[str], shape: ModelShape) -> frozenset[str]:
    """Return the tensors that a role's patterns freeze. Raise UserError if its model cannot freeze
    them."""
    key = f"{role}.freeze"
    frozen = frozen_tensors(key, patterns, shape)
    if uses_transformer_engine():
        check_experts(key, frozen, shape)
    return frozen


def _check_checkpoint(
    cfg: Config, shape: ModelShape, reader: HFReader, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise UserError if the actor's checkpoint, its config.json and the tokenizer do not match."""
    if cfg.model.dist_checkpointing_path is None:
        with error_prefix("model.path:"):
            reader.check(shape)
    if len(tokenizer) > shape.vocab_size:
        raise UserError(
            f"model.tokenizer_path: the tokenizer has {len(tokenizer)} tokens, more than the "
            f"model's vocab_size {shape.vocab_size}; it belongs to another model"
        )


def _set_routers(cfg: Config, actor: ModelEngine) -> None:
    """Set router replay and the losses of the actor's routers, where the run has them."""
    shape = actor.shape
    if (mode := router_replay(cfg, shape)) != "off":
        actor.replay = ExpertReplay(mode, shape, actor.groups, actor.chunks)
    if balances_experts(cfg, shape):
        actor.balance = RouterBalance(cfg.actor, shape, actor.groups, actor.chunks)


def _check_memory(
    cfg: Config, shapes: Mapping[str, ModelShape]
) -> tuple[str | None, frozenset[str]]:
    """Return in one line whether the run fits by the planner, and the roles whose optimizer state
    stays on the device between the steps of an update; None and no role if trainer.planner is
    "off". Raise UserError on every rank if the run does not fit and trainer.planner is "refuse".
    Every rank must call it, and gets the same."""
    if cfg.trainer.planner == "off":
        return None, frozenset()
    cuda = platform.use_cuda()
    ranks_per_gpu = platform.ranks_per_gpu()
    smallest = (
        min(gather_objects(platform.device_memory())) // ranks_per_gpu
        if cuda
        else _smallest_share()
    )
    capacity = Capacity(
        dist.get_world_size(),
        smallest,
        cuda,
        ranks_per_node(),
        transformer_engine=uses_transformer_engine(),
        ranks_per_gpu=ranks_per_gpu,
    )
    return on_rank_0(lambda: check_start(cfg, shapes, capacity))


def _smallest_share() -> int:
    """Return the bytes of host memory that a rank can have: of the node with the least, its
    available memory and the memory of its ranks, in equal parts. Every rank must call it."""
    nodes: dict[str, list[tuple[int, int]]] = {}
    memory = (available_memory(), platform.process_memory())
    for host, rank_memory in gather_objects((socket.gethostname(), memory)):
        nodes.setdefault(host, []).append(rank_memory)
    return min(
        (min(available for available, _ in ranks) + sum(used for _, used in ranks)) // len(ranks)
        for ranks in nodes.values()
    )


def _load(role: str, start: _Start, megatron: MegatronConfig, groups: ProcessGroups) -> ModelEngine:
    """Return a role's model in its own layout with its initial weights, from the Megatron
    checkpoint if there is one, else from the safetensors. A value head that the checkpoint lacks
    stays zero: the first values are 0."""
    check_fp8(f"{role}.megatron", megatron)
    engine = ModelEngine(role, start.shape, megatron, groups)
    has_head = start.shape.value_head
    if start.mcore is not None:
        with error_prefix("model.dist_checkpointing_path:"):
            load_mcore(
                engine.model, start.mcore, skip_prefixes=("output_layer.",) if has_head else ()
            )
    else:
        skip = ("score.weight",) if has_head and "score.weight" not in start.reader.names else ()
        import_hf(start.reader, engine_layouts(engine)[groups.rank], engine.params, skip=skip)
    return engine


def _rollout(
    cfg: Config, factory: EngineFactory, actor: ModelEngine, rank: int
) -> tuple[WeightSync, RolloutEngine]:
    """Return the rollout engine, and the synchronisation of its weights with the actor's."""
    per_node = ranks_per_node()
    tp = cfg.rollout.tensor_model_parallel_size
    engine_ranks = choose_rollout_groups(
        actor.shape, actor.groups.mesh, tp, factory.layout, per_node
    )
    trained = engine_layouts(actor)
    if has_contiguous_experts(cfg):
        trained = with_contiguous_experts(trained, actor.groups.mesh)
    with working("planning the weight update"):
        weight_sync = plan_weight_sync(
            trained,
            rollout_layouts(actor.shape, engine_ranks, factory.layout),
            correction_biases(actor.shape),
            rank,
            DTYPES[cfg.actor.megatron.dtype],
            cfg.reshard.verify,
            cfg.reshard.bucket_megabytes << 20,
            per_node,
            cfg.reshard.share_weights,
            # with it each update writes temporary tensors
            keep_views=cfg.rollout.quantization is None,
        )
    with working(f"starting {factory.title}"):
        # make_trainable has moved the actor's parameters to their final storage before.
        storage = aliased_views(weight_sync.plan, actor.params) if cfg.reshard.share_weights else {}
        rollout = factory.build(cfg, actor.shape, engine_ranks, rank, storage)
    return weight_sync, rollout


def _log_prob_check(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> LogProbCheck:
    megatron = cfg.actor.megatron
    dtype = megatron.dtype if megatron.fp8 is None and cfg.rollout.quantization is None else "fp8"
    bound = cfg.trainer.max_rollout_logprob_diff
    return LogProbCheck(
        bound=DEFAULT_BOUND[dtype] if bound is None else bound,
        temperature=cfg.rollout.temperature,
        dtype=dtype,
        token_text=lambda token: str(tokenizer.decode([token])),
    )


def stop_token_ids(
    model_path: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> tuple[int, ...]:
    """Return the end tokens of the tokenizer and of generation_config.json, as vLLM and
    transformers use them. Raise UserError for one that the model does not have. vocab_size: of the
    model."""
    ids = {int(tokenizer.eos_token_id)}
    path = Path(model_path) / "generation_config.json"
    if path.exists():
        extra = read_config(model_path, path.name).get("eos_token_id")
        tokens = extra if isinstance(extra, list) else [] if extra is None else [extra]
        if not all(type(token) is int for token in tokens):
            raise UserError(
                f"{path}: eos_token_id is {str(extra)[:80]}; expected a token's number, or a list "
                "of them"
            )
        ids.update(tokens)
    for token in ids:
        if not 0 <= token < vocab_size:
            source = (
                "the tokenizer's eos_token"
                if token == tokenizer.eos_token_id
                else f"{path}: eos_token_id"
            )
            raise UserError(
                f"{source} is {token}; the model's vocab_size is {vocab_size} (config.json)"
            )
    return tuple(sorted(ids))


def _kl_controller(cfg: Config) -> KLController:
    control = cfg.algorithm.kl_ctrl
    if control.type == "adaptive":
        initial = cfg.actor.kl_loss_coef if adapts_kl_loss(cfg) else control.kl_coef
        return KLController(initial, control.target_kl, control.horizon)
    return KLController(control.kl_coef)
