"""Layouts of a run's ranks, and the bytes that follow from them alone. They are cached across
plans: a search plans the same layouts with many settings."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.model_schema import MegatronConfig
from rlhf_mc.config.roles import overlaps_reduction
from rlhf_mc.planner.model_state import ITEMSIZES, ModelState, frozen_state, trained_state
from rlhf_mc.reshard.aliasing import find_aliases
from rlhf_mc.reshard.freeze import frozen_parameters, frozen_tensors
from rlhf_mc.reshard.layout import Layout, RankLayout
from rlhf_mc.reshard.placement import row_shard, training_layout, with_contiguous_experts
from rlhf_mc.topology.mesh import Coordinate, Mesh, rollout_groups

SomeSettings = tuple[tuple[str, Any], ...]
"""Name and value of some settings of a MegatronConfig: a cache key that other settings do not
change."""


def some_settings(megatron: MegatronConfig, *names: str) -> SomeSettings:
    """Return these settings."""
    return tuple((name, getattr(megatron, name)) for name in names)


def model_coordinate(mesh: Mesh, rank: int) -> Coordinate:
    """Return the coordinates of a rank that its layout follows from: without the replica."""
    return replace(mesh.coordinate(rank), dp=0, cp=0)


def choice_bytes_of_stage(shape: ModelShape, mesh: Mesh, stage: int) -> int:
    """Return the bytes of a token's chosen experts in the layers of a pipeline stage."""
    layers = {layer for chunk in mesh.chunk_layers(shape.num_layers, stage) for layer in chunk}
    return shape.choice_bytes * len(layers & set(shape.expert_layers))


@functools.lru_cache(maxsize=1024)
def layout_at(shape: ModelShape, mesh: Mesh, coordinate: Coordinate, cuda: bool) -> Layout:
    """Return the layout of a Megatron-Core model on the ranks of a coordinate. cuda: with
    Transformer Engine."""
    return training_layout(shape, mesh, coordinate, transformer_engine=cuda)


def planned_layouts(shape: ModelShape, mesh: Mesh) -> list[Layout]:
    """Return each rank's layout on GPUs. Replicas share one object, for which make_plan plans
    once."""
    return [
        _rank_layout(shape, mesh, model_coordinate(mesh, rank), rank % mesh.shards)
        for rank in range(mesh.world)
    ]


@functools.lru_cache(maxsize=1024)
def _rank_layout(shape: ModelShape, mesh: Mesh, coordinate: Coordinate, part: int) -> Layout:
    layout = layout_at(shape, mesh, coordinate, True)
    return layout if mesh.shards == 1 else row_shard(layout, part, mesh.shards)


@functools.lru_cache(maxsize=64)
def rollout_tp_ranks(
    mesh: Mesh, rollout_tp: int, gpus_per_node: int, pool: int | None
) -> Mapping[int, int]:
    """Return the tensor-parallel rank in its rollout engine of each rank that has one. pool:
    resource_pools.rollout."""
    engine_ranks = rollout_groups(mesh, rollout_tp, gpus_per_node, pool)
    return {rank: tp_rank for ranks in engine_ranks for tp_rank, rank in enumerate(ranks)}


def rank_state(
    role: str,
    shape: ModelShape,
    megatron: MegatronConfig,
    mesh: Mesh,
    coordinate: Coordinate,
    freeze: Sequence[str] | None,
    cuda: bool,
) -> ModelState:
    """Return the state of a role's model on the ranks of a coordinate. freeze: patterns of tensors
    that are not trained; None: the model is never trained."""
    overlaps = overlaps_reduction(megatron, mesh.replicas, cuda)
    patterns = None if freeze is None else tuple(freeze)
    settings = some_settings(megatron, "dtype", "use_distributed_optimizer")
    if not freeze:  # the experts of all ranks have the same sizes
        coordinate = replace(coordinate, ep=0)
    return _cached_state(role, shape, settings, mesh, coordinate, patterns, cuda, overlaps)


@functools.lru_cache(maxsize=4096)
def _cached_state(
    role: str,
    shape: ModelShape,
    settings: SomeSettings,
    mesh: Mesh,
    coordinate: Coordinate,
    freeze: tuple[str, ...] | None,
    cuda: bool,
    overlaps: bool,
) -> ModelState:
    layout = layout_at(shape, mesh, coordinate, cuda)
    megatron = MegatronConfig(**dict(settings))
    if freeze is None:
        return frozen_state(layout, megatron)
    frozen = frozen_parameters(frozen_tensors(f"{role}.freeze", freeze, shape), layout)
    return trained_state(
        layout, megatron, mesh, coordinate.pp, frozen, overlaps, shape.shares_embeddings
    )


@functools.lru_cache(maxsize=4096)
def own_rollout_weights(
    shape: ModelShape,
    mesh: Mesh,
    coordinate: Coordinate,
    tp_rank: int,
    tp: int,
    layout: RankLayout,
    dtype: str,
    shares: bool,
    cuda: bool,
    contiguous_experts: bool = False,
) -> Mapping[str, int]:
    """Return the bytes of the rollout engine's parameters by name, without those that alias the
    actor's, on the ranks of a coordinate in the training mesh and of this tensor-parallel rank of
    an engine. layout: the engine's; shares: reshard.share_weights; contiguous_experts:
    has_contiguous_experts."""
    target = layout(shape, tp_rank, tp)
    itemsize = ITEMSIZES[dtype]
    source = layout_at(shape, mesh, coordinate, cuda)
    if contiguous_experts:
        (source,) = with_contiguous_experts([source], mesh)
    aliased = find_aliases(source, target, itemsize) if shares else {}
    stored = {name: size for name, size in target.stacked_shapes.items() if name not in aliased}
    return {
        name: math.prod(size) * target.itemsize(name, itemsize) for name, size in stored.items()
    }
