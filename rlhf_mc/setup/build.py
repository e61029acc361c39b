"""Building a run from its config: data, models, rollout engine, the plan of the weight update.
Every mistake in the user's input that early_checks.py has not seen is an error here, before the
first step; the cheapest checks come first.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlhf_mc import platform
from rlhf_mc.algorithms.kl import KLController
from rlhf_mc.architectures.run_shapes import model_shapes
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint.hf_format import read_config
from rlhf_mc.checkpoint.input_fingerprints import read_inputs
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.roles import (
    adapts_kl_loss,
    has_contiguous_experts,
    has_rollout_pool,
    reference_is_actor,
    shared_models,
    shares_weights,
    token_budgets,
)
from rlhf_mc.config.schema import (
    Config,
    reward_models,
    score_part,
    teachers,
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
from rlhf_mc.models.transformer_engine import uses_transformer_engine
from rlhf_mc.planner.start import Capacity, check_start
from rlhf_mc.reshard.execute import aliased_views
from rlhf_mc.reshard.layout import correction_biases
from rlhf_mc.reshard.placement import rollout_layouts, with_contiguous_experts
from rlhf_mc.reshard.plan import make_plans
from rlhf_mc.reshard.weight_sync import WeightSync
from rlhf_mc.rewards.manager import RewardManager
from rlhf_mc.rollout.base import EngineFactory, RolloutEngine
from rlhf_mc.rollout.engines import engine_factory
from rlhf_mc.rollout.remote_engines import RemoteEngines
from rlhf_mc.rollout.work_sharing import ResponseLengths
from rlhf_mc.run_directory.lock import check_free
from rlhf_mc.runtime.console import print_line
from rlhf_mc.runtime.work import importing, working
from rlhf_mc.setup.custom_functions import load_estimator, load_policy_loss
from rlhf_mc.setup.gpu_settings import for_this_device
from rlhf_mc.setup.model_building import build_models, model_starts
from rlhf_mc.setup.scorable import check_mixture, print_special_tokens, scorable
from rlhf_mc.topology.consensus import gather_objects, on_every_rank, on_rank_0, ranks_per_node
from rlhf_mc.topology.groups import (
    build_role_groups,
    exchange_group,
    pool_group,
    set_timeout_of_all_groups,
)
from rlhf_mc.topology.mesh import role_mesh, rollout_groups
from rlhf_mc.topology.shared_gpu import shared_gpu_line
from rlhf_mc.trainer.logprob_check import DEFAULT_BOUND, LogProbCheck
from rlhf_mc.trainer.offload_schedule import OffloadSchedule
from rlhf_mc.trainer.pool.group_pool import GroupPool
from rlhf_mc.trainer.pool.rollout_journal import RolloutJournal
from rlhf_mc.trainer.reward_models import RewardModel, conversation_tokenizers
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.skipped_updates import MOST_CONSECUTIVE, SkippedUpdates
from rlhf_mc.trainer.step_state import StepSchedule
from rlhf_mc.trainer.teachers import Teacher


def build_run(cfg: Config) -> Run:
    """Build all parts of a run. Every rank must call it, with the same config, which check_early
    has checked, after init_process_group."""
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
    environments = _environments(cfg, tokenizer, stops) if cfg.rollout.environment.is_set else None
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
    train_prompts, val_prompts = _scorable(
        cfg, rewards, tokenizer, train_prompts, val_prompts, conversations
    )
    schedule = _schedule(cfg, train_prompts.file_sizes, bool(val_prompts))

    starts = on_every_rank(lambda: model_starts(cfg, factory, tokenizer, conversations))
    with working("planning"):
        fit, staying = _check_memory(cfg, {role: start.shape for role, start in starts.items()})
    if fit is not None and "console" in cfg.trainer.logger:
        print_line(fit, sys.stdout, rank_0_only=True)
    inputs = read_inputs(cfg)
    meshes = {role: role_mesh(cfg, role, dist.get_world_size()) for role in starts}
    groups = build_role_groups(meshes, cfg.trainer.dist_timeout_seconds)

    offload_schedule = OffloadSchedule(shared_models(cfg))
    models = build_models(cfg, starts, groups, schedule.total_steps, offload_schedule)
    for role, model in models.items():
        model.offload.optimizer_stays = role in staying
    actor = models["actor"]
    reference = actor.without_adapters() if reference_is_actor(cfg) else models.get("ref")
    budgets = token_budgets(cfg)
    weight_sync, rollout = _rollout(cfg, factory, actor, offload_schedule)
    if environments is not None:
        environments.connect(rollout.groups)
    rollout_pool = pool_group([rank for ranks in rollout.groups for rank in ranks])
    set_timeout_of_all_groups(cfg.trainer.dist_timeout_seconds)
    return Run(
        config=cfg,
        groups=groups["actor"],
        tokenizer=tokenizer,
        stop_token_ids=stops,
        train_prompts=train_prompts,
        val_prompts=val_prompts,
        schedule=schedule,
        token_budgets=budgets,
        inputs=inputs,
        rewards=rewards,
        actor=actor,
        critic=models.get("critic"),
        reference=reference,
        reward_models=_reward_models(cfg, models, budgets, conversations),
        teachers=_teachers(cfg, models, reference, budgets),
        rollout=rollout,
        rollout_pool=rollout_pool,
        exchange=exchange_group() if has_rollout_pool(cfg) else None,
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


def _tokenizer(cfg: Config) -> PreTrainedTokenizerBase:
    template = cfg.data.chat_template_path
    if cfg.model.tokenizer_path is None:
        return load_tokenizer(cfg.model.path, "model.path", template)
    return load_tokenizer(cfg.model.tokenizer_path, "model.tokenizer_path", template)


def _environments(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, stops: tuple[int, ...]
) -> EnvironmentManager:
    """Return the environments of conversations, and their journal. Every rank must call it."""
    environment = cfg.rollout.environment

    def build() -> EnvironmentManager:
        root = None if cfg.trainer.val_only else Path(cfg.trainer.default_local_dir)
        digest = environment_digest(environment, cfg.data.max_response_length)
        bounds = len(tokenizer), cfg.data.max_response_length
        journal = ObservationJournal(root, cfg.trainer.replay, dist.get_rank(), digest, *bounds)
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
        of_key = teachers(cfg).values() if key == "data.train_files" else ()
        columns = {t.key: t.prompt_key for t in of_key if t.prompt_key is not None}
        by_rule = scored_by_rule(cfg, key)
        return load_prompts(files, tokenizer, data, most_rows, key, by_rule, messages, columns)

    train = load(
        "data.train_files", data.train_files, data.train_max_samples, train_messages or messages
    )
    if not data.val_files:
        return train, Prompts([])
    return train, load("data.val_files", data.val_files, data.val_max_samples, messages)


def _scorable(
    cfg: Config,
    rewards: RewardManager,
    tokenizer: PreTrainedTokenizerBase,
    train: Prompts,
    val: Prompts,
    conversations: Mapping[str, ConversationTokenizer],
) -> tuple[Prompts, Prompts]:
    """Return the training and the validation prompts that can be scored. Raise UserError if the
    training prompts do not fill a batch. Every rank must call it."""
    print_special_tokens(cfg, rewards, tokenizer)
    check_mixture(rewards.mixture.sources, train, val)
    on_bad_row = cfg.data.on_bad_row
    keys = [teacher.key for teacher in teachers(cfg).values()]
    train = scorable(rewards, train, on_bad_row, True, conversations.values(), keys)
    val = scorable(rewards, val, on_bad_row, False)
    check_weights(cfg.data, train.file_sizes)
    check_batch(cfg.data, len(train))
    return train, val


def _schedule(cfg: Config, file_sizes: Sequence[int], has_val_prompts: bool) -> StepSchedule:
    """Return the schedule of the run. file_sizes: training prompts of each file."""
    trainer = cfg.trainer
    order = PromptOrder(cfg.data, file_sizes, trainer.seed)
    return StepSchedule(
        trainer,
        # A step draws at least one batch.
        trainer.total_training_steps or trainer.total_epochs * order.batches_per_epoch,
        trainer.total_epochs * order.epoch_length,
        has_val_prompts,
    )


def _reward_models(
    cfg: Config,
    models: Mapping[str, ModelEngine],
    budgets: Mapping[str, int],
    conversations: Mapping[str, ConversationTokenizer],
) -> list[RewardModel]:
    return [
        RewardModel(
            role, str(scorer.model_path), models[role], budgets[role], conversations.get(role)
        )
        for role, scorer in reward_models(cfg).items()
    ]


def _teachers(
    cfg: Config,
    models: Mapping[str, ModelEngine],
    reference: ModelEngine | None,
    budgets: Mapping[str, int],
) -> list[Teacher]:
    engines = {**models, "actor": models["actor"].as_scorer()}
    if reference is not None:
        engines["ref"] = reference
    return [
        Teacher(role, section, engines[section.source or role], budgets[role])
        for role, section in teachers(cfg).items()
    ]


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


def _rollout(
    cfg: Config, factory: EngineFactory, actor: ModelEngine, offload_schedule: OffloadSchedule
) -> tuple[WeightSync, RolloutEngine]:
    """Return the rollout engine, and the synchronisation of its weights with the actor's. Raise
    UserError on all ranks if the engine cannot be built on one. Every rank must call it."""
    rank = dist.get_rank()
    per_node = ranks_per_node()
    tp = cfg.rollout.tensor_model_parallel_size
    engine_ranks = rollout_groups(actor.groups.mesh, tp, per_node, cfg.resource_pools.rollout)
    trained = engine_layouts(actor, actor.shape.base)
    if has_contiguous_experts(cfg):
        trained = with_contiguous_experts(trained, actor.groups.mesh)
    with working("planning the weight update"):
        dtype = DTYPES[cfg.actor.megatron.dtype]
        plans = make_plans(
            trained,
            rollout_layouts(actor.shape.base, engine_ranks, factory.layout),
            correction_biases(actor.shape),
            dtype.itemsize,
            cfg.reshard.bucket_megabytes << 20,
            per_node,
            shares_weights(cfg),
        )
        weight_sync = WeightSync(
            plans,
            rank,
            cfg.reshard.verify,
            dtype,
            # with quantization each update writes temporary tensors, with adapters it reads them
            keep_views=cfg.rollout.quantization is None
            and actor.shape.lora is None
            and actor.strategy.has_weights,
        )
    with working(f"starting {factory.title}"):
        # make_trainable has moved the actor's parameters to their final storage before.
        storage = aliased_views(weight_sync.plan, actor.params) if shares_weights(cfg) else {}
        rollout = on_every_rank(
            lambda: (
                factory.build(cfg, actor.shape.base, engine_ranks, rank, storage)
                if any(rank in ranks for ranks in engine_ranks)
                else RemoteEngines(engine_ranks)
            )
        )
    if cfg.rollout.free_cache_engine and not has_rollout_pool(cfg):
        offload_schedule.add_rollout(rollout)
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
