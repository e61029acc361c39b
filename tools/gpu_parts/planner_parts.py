"""The part that compares the planner's bytes with a model's on this device."""

from __future__ import annotations

import gc
from typing import Any

import torch

from gpu_parts import measure
from gpu_parts.engines import (
    mesh_groups,
    my_micro_batches,
    objective,
    random_engine,
    token_batch,
    with_targets,
)
from gpu_parts.report import Report
from gpu_parts.sizes import Sizes
from rlhf_mc import platform
from rlhf_mc.config.roles import overlaps_reduction
from rlhf_mc.config.schema import MegatronConfig
from rlhf_mc.models.engine import ModelEngine, engine_layouts
from rlhf_mc.models.heads import log_prob_head
from rlhf_mc.models.offload import distinct_storages, optimizer_tensors, tensors_besides
from rlhf_mc.models.transformer_engine import uses_transformer_engine
from rlhf_mc.planner.activations import Activations, MicroBatchPass
from rlhf_mc.planner.model_state import trained_state
from rlhf_mc.planner.reserved import besides_tensors
from rlhf_mc.topology.groups import ProcessGroups

GB = 10**9
RECOMPUTATION = {"none": None, "selective": "selective", "full": "full"}
WITHIN = 0.1
"""Largest relative difference of the activations of an update, and of a log-prob pass."""


def planned_memory(report: Report, sizes: Sizes) -> None:
    """Compare parameters, gradients, optimizer state, and the activations of an update and of a
    log-prob pass with the planner's, for each kind of recomputation; on a GPU also what the process
    takes besides tensors."""
    cuda = uses_transformer_engine()
    texts = []
    with mesh_groups(1, 1) as groups:
        for name, recompute in RECOMPUTATION.items():
            settings: dict[str, Any] = {"recompute_granularity": recompute}
            engine = random_engine(sizes.half_billion, groups, **settings)
            megatron = MegatronConfig(**settings)
            measured = _state(engine) | _activations(engine, sizes)
            planned = _planned(engine, megatron, groups, sizes, cuda)
            report.record(**{f"{name}_{key}_gb": size / GB for key, size in measured.items()})
            report.record(
                **{f"{name}_{key}_planned_gb": size / GB for key, size in planned.items()}
            )
            for part in ("params", "grads", "optimizer"):
                text = (
                    f"{name}: {part} take {measured[part]} bytes, planned are {planned[part]:.0f}"
                )
                # Of the replicas the planner takes the one whose share of the optimizer state is
                # largest.
                report.check(measured[part] <= planned[part] <= 1.05 * measured[part], text)
            ratios = {work: planned[work] / measured[work] for work in ("update", "log_prob")}
            for work, ratio in ratios.items():
                # gloo's threads free tensors unseen by the profiler
                if groups.mesh.world == 1 or platform.use_cuda():
                    text = (
                        f"{name}: {work} takes {measured[work]} bytes, planned are "
                        f"{planned[work]:.0f}"
                    )
                    report.expect(abs(ratio - 1) < WITHIN, text)
            texts.append(f"{name} {ratios['update']:.2f}")
            del engine
            gc.collect()
    report.summarize(
        f"state as planned; planned / measured activations of an update: {', '.join(texts)}"
    )
    if platform.use_cuda():
        _besides_tensors(report, groups)


def _state(engine: ModelEngine) -> dict[str, float]:
    engine.load_progress({"optimizer_steps": 1, "schedule_steps": 1})  # Adam's moments
    params = list(engine.named_parameters().values())
    grads = [
        buffer.grad_data
        for ddp in engine.strategy.buffered
        for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)
    ]
    optimizer = list(tensors_besides(optimizer_tensors(engine.strategy.optimizer), params))
    parts = {"params": params, "grads": grads, "optimizer": optimizer}
    return {
        name: sum(s.nbytes() for s in distinct_storages(tensors)) for name, tensors in parts.items()
    }


def _activations(engine: ModelEngine, sizes: Sizes) -> dict[str, float]:
    count, prompt, response = sizes.planned_lens
    world = engine.groups.mesh.world
    batch = token_batch(
        engine.shape.vocab_size, [prompt] * count * world, [response] * count * world
    )
    batch = with_targets(engine, batch)
    micro_batches = my_micro_batches(engine, batch, count * (prompt + response))
    loss = objective(engine, batch, "token-mean")
    head = log_prob_head(engine.shape.vocab_size, 1.0)
    return {
        "update": measure.activation_peak(lambda: engine.backward(batch, micro_batches, loss)),
        "log_prob": measure.activation_peak(lambda: engine.score(batch, micro_batches, head)),
    }


def _planned(
    engine: ModelEngine, megatron: MegatronConfig, groups: ProcessGroups, sizes: Sizes, cuda: bool
) -> dict[str, float]:
    count, prompt, response = sizes.planned_lens
    work = MicroBatchPass(count * (prompt + response), count * response, 1)
    shape = engine.shape
    activations = Activations(shape, megatron, cuda)
    mesh = groups.mesh
    overlaps = overlaps_reduction(megatron, mesh.dp, platform.use_cuda())
    layout = engine_layouts(engine)[groups.rank]
    state = trained_state(layout, megatron, mesh, 0, (), overlaps, shape.shares_embeddings)
    return {
        **vars(state),
        "update": activations.update_peak(mesh, 0, work, entropy=True),
        "log_prob": activations.forward_peak(mesh, 0, work),
    }


def _besides_tensors(report: Report, groups: ProcessGroups) -> None:
    """Record what this process takes of the device besides torch's memory: context, kernels,
    communicators."""
    if platform.ranks_per_gpu() > 1:  # other ranks' memory is in it
        return
    free, total = torch.cuda.mem_get_info()
    besides = total - free - torch.cuda.memory_reserved()
    planned = besides_tensors(frozenset([groups.mesh]), torch.cuda.device_count())
    report.record(besides_tensors_gb=besides / GB, besides_tensors_planned_gb=planned / GB)
