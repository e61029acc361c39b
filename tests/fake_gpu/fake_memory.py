"""Device memory of the actor of a shipped config, at full size on fake CUDA devices, beside the
planner's."""

from __future__ import annotations

import contextlib
import gc
import mmap
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from fake_cases import Measured, PhaseBytes
from fake_device import FakeCuda
from fake_steps import simulation, with_targets
from gpu_parts.engines import token_batch

from rlhf_mc.algorithms.policy_losses import POLICY_LOSSES
from rlhf_mc.config.load import load_config
from rlhf_mc.config.roles import shares_weights, token_budgets
from rlhf_mc.config.schema import Config, layouts
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models import offload
from rlhf_mc.models.engine import ModelEngine, engine_layouts
from rlhf_mc.models.heads import log_prob_head
from rlhf_mc.models.offload import GRADS, OPTIMIZER, PARAMS
from rlhf_mc.planner.memory import Capacity, RankMemory, plan_memory
from rlhf_mc.planner.start import planned_shapes
from rlhf_mc.reshard.execute import aliased_views
from rlhf_mc.reshard.freeze import frozen_parameters, frozen_tensors
from rlhf_mc.reshard.placement import rollout_layouts
from rlhf_mc.reshard.plan import make_plan
from rlhf_mc.reshard.weight_sync import WeightSync
from rlhf_mc.rollout.vllm_layout import vllm_layout
from rlhf_mc.topology.groups import build_groups, simulated_rank
from rlhf_mc.topology.mesh import rollout_groups, training_mesh
from rlhf_mc.trainer.update import ActorTerms, actor_objective

SEQUENCES = 4
"""In each micro-batch."""
DEVICE_BYTES = 80 << 30


def measure(source: str, overrides: Sequence[str], world: int, rank: int) -> Measured:
    """Run scoring, two updates and a weight update of the actor on one rank, with micro-batches of
    all tokens that the settings allow, and compare the peaks with the planner's phases."""
    cfg = load_config(source, list(overrides))
    (planned,) = [
        one
        for one in plan_memory(cfg, planned_shapes(cfg), Capacity(world, DEVICE_BYTES))
        if rank in one.ranks
    ]
    shape = planned_shapes(cfg)["actor"]
    gpu = FakeCuda(shape.experts_per_token / shape.num_experts if shape.num_experts else 1.0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(simulated_rank(rank, world))
        stack.enter_context(simulation())
        stack.enter_context(mock.patch.object(offload, "available_memory", lambda: 1 << 50))
        stack.enter_context(mock.patch.object(offload, "_pages", _pages))
        stack.enter_context(gpu)
        peaks, left = _run(cfg, gpu, world, "actor" in planned.staying)
        gc.collect()
    return Measured(
        {name: PhaseBytes(peak, _planned(planned, name)) for name, peak in peaks.items()}, left
    )


def _pages(num_bytes: int) -> torch.Tensor:
    """Return memory that is never written, of any size."""
    no_reserve = 0x4000
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _planned(planned: RankMemory, name: str) -> float:
    """Return the planner's bytes of a phase without those of other models and of what is no tensor
    of the trainer."""
    (phase,) = [phase for phase in planned.phases if phase.name == name]
    parts = (
        "actor params",
        "actor grads",
        "actor optimizer",
        "activations",
        "gathered",
        "reshard buckets",
        "weights to send",
        "vLLM weights",
    )
    return sum(phase.parts.get(part, 0) for part in parts)


def _run(
    cfg: Config, gpu: FakeCuda, world: int, stays: bool
) -> tuple[dict[str, int], Counter[str]]:
    megatron = layouts(cfg)["actor"]
    gpu.phase = "build"
    engine = ModelEngine(
        "actor",
        planned_shapes(cfg)["actor"],
        megatron,
        build_groups(training_mesh(megatron, world)),
    )
    frozen = frozen_tensors("actor.freeze", cfg.actor.freeze, engine.shape)
    layout = engine_layouts(engine)[engine.groups.rank]
    engine.make_trainable(cfg.actor.optim, 10, frozen_parameters(frozen, layout))
    budgets = token_budgets(cfg)
    peaks = {}

    def begin(phase: str, *parts: str) -> None:
        gpu.phase = phase
        engine.offload.onload([name for name in parts if name in engine.offload.names])
        engine.offload.offload_all_but(parts)
        gc.collect()
        gpu.memory.reset_peak()

    share = cfg.rollout.n == SEQUENCES
    update, micro_batches = _batch(engine, budgets["update_actor"], share)
    scores = torch.zeros(len(update.rollout_log_probs))
    update = with_targets(update, scores)
    terms = ActorTerms(POLICY_LOSSES["vanilla"], cfg.actor.entropy_coeff, 0.0, 1, torch.Generator())
    loss = actor_objective(
        update, cfg.actor, engine.shape.vocab_size, cfg.rollout.temperature, terms
    )
    engine.offload.optimizer_stays = stays
    for _ in range(2):  # the first one allocates Adam's moments
        begin("update_actor", PARAMS, GRADS, *([OPTIMIZER] if stays else []))
        engine.train_step(update, micro_batches, loss)
        peaks["update_actor"] = gpu.memory.peak
    begin("old_log_prob", PARAMS)
    engine.my_scores(
        *_batch(engine, budgets["old_log_prob"], share), log_prob_head(engine.shape.vocab_size, 1.0)
    )
    peaks["old_log_prob"] = gpu.memory.peak
    begin("update_weights", PARAMS)
    _update_weights(cfg, engine)
    peaks["update_weights"] = gpu.memory.peak
    begin("offload")
    return peaks, gpu.memory.by_origin()


def _batch(
    engine: ModelEngine, budget: int, share: bool = False
) -> tuple[RaggedBatch, list[list[int]]]:
    """Return a batch whose micro-batches have all tokens of the budget, all but one of each
    sequence response tokens, and this replica's micro-batches. share: half of the tokens are a
    prompt that all sequences have."""
    mesh = engine.groups.mesh
    count = 2 * mesh.pp
    num = SEQUENCES * count * mesh.dp
    prompt = budget // 2 if share else 1
    response = (budget - prompt) // SEQUENCES if share else budget * mesh.cp // SEQUENCES - 1
    batch = token_batch(engine.shape.vocab_size, [prompt] * num, [response] * num)
    sequences = batch.tokens.view(num, -1)
    sequences[:, :prompt] = sequences[0, :prompt].clone()
    of_replica = range(engine.groups.coordinate.dp, num, mesh.dp)
    return batch, [list(of_replica[i::count]) for i in range(count)]


def _update_weights(cfg: Config, engine: ModelEngine) -> None:
    """Write the weights into the parameters of a rollout engine, of which some may alias the
    actor's."""
    mesh = engine.groups.mesh
    rank = engine.groups.rank
    size = cfg.rollout.tensor_model_parallel_size
    groups: Any = rollout_groups(mesh, size, min(8, mesh.world))
    base = engine.shape.base
    wanted = rollout_layouts(base, groups, vllm_layout)
    plan = make_plan(
        engine_layouts(engine, base),
        wanted,
        2,
        cfg.reshard.bucket_megabytes << 20,
        share=shares_weights(cfg),
    )
    sync = WeightSync([plan], rank, "off", keep_views=engine.shape.lora is None)
    views = aliased_views(sync.plan, engine.params)
    target = {
        name: views[name]
        if name in views
        else torch.empty(shape, dtype=torch.bfloat16, device="cuda:0")
        for name, shape in wanted[rank].shapes.items()
    }
    sync.run(engine.rollout_params, target)
