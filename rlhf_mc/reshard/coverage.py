"""The coverage of a checkpoint by the layouts of all ranks: each element of each tensor is on as
many ranks as the mesh says, and nothing else is. Arithmetic on shapes only; setup/layout_check.py
compares the layouts with real models."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from rlhf_mc.architectures.parameters import model_params
from rlhf_mc.architectures.rows import SPLIT_DIMS, Param
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard.layout import (
    Box,
    Half,
    Layout,
    Shard,
    box_text,
    intersection,
    logical_shapes,
    volume,
)
from rlhf_mc.topology.mesh import Mesh


@dataclass(frozen=True)
class Coverage:
    """Tensors and elements that the layouts of all ranks cover."""

    num_tensors: int
    """Tensors of the Hugging Face checkpoint that the engine has."""
    num_elements: int
    """Elements of these tensors."""
    num_held: int
    """Elements that all ranks hold together."""


def training_coverage(shape: ModelShape, mesh: Mesh, layouts: Sequence[Layout]) -> Coverage:
    """Return the coverage of a model by each rank's Megatron-Core layout. Raise UserError, with the
    first tensor that is not held as often as the mesh says."""

    def copies(param: Param, dims: Sequence[str]) -> int:
        if param.stage == "last_if_not_first" and mesh.pp == 1:
            return 0
        replicas = mesh.replicas // mesh.ep if param.stage == "expert" else mesh.replicas
        replicas //= 1 if param.is_correction_bias else mesh.shards
        return replicas if SPLIT_DIMS.intersection(dims) else replicas * mesh.tp

    return _coverage("Megatron-Core", shape, layouts, copies)


def rollout_coverage(shape: ModelShape, tp_size: int, layouts: Sequence[Layout]) -> Coverage:
    """Return the coverage of a model by each rank's layout of the rollout engine, in engines of
    tp_size ranks. Raise UserError as training_coverage does."""
    engines = len(layouts) // tp_size

    def copies(param: Param, dims: Sequence[str]) -> int:
        if param.stage == "last_if_not_first":
            return 0
        if "kv" in dims:
            return engines * max(1, tp_size // param.kv_heads)
        # split, or a bias of outputs that the ranks sum: on the first rank alone
        if param.stage == "expert":
            return engines
        return engines if SPLIT_DIMS.intersection(dims) else engines * tp_size

    return _coverage("the rollout engine", shape, layouts, copies)


def _coverage(
    engine: str,
    shape: ModelShape,
    layouts: Sequence[Layout],
    copies: Callable[[Param, Sequence[str]], int],
) -> Coverage:
    """copies: (parameter, dimensions of one of its tensors) -> number of ranks that hold an element
    of the tensor."""
    wanted: Counter[str] = Counter()
    counted: dict[str, int | None] = {}
    for param in model_params(shape):
        for name, dims in param.hf.items():
            # layers of several kinds may have it
            if counted.setdefault(name, param.kind) == param.kind:
                wanted[name] += copies(param, dims)
    # Replicas share one layout.
    shared = Counter(map(id, layouts))
    holders: dict[str, Counter[Box]] = {}
    distinct = list({id(layout): layout for layout in layouts}.values())
    vocabulary = {
        name for param in model_params(shape) for name, dims in param.hf.items() if "vocab" in dims
    }
    padded = {
        shard.local for layout in distinct for shard in layout.shards if shard.tensor in vocabulary
    }
    for layout in distinct:
        if problem := _misplaced(layout, padded | layout.zero):
            raise UserError(f"{engine}'s layout of rank {layouts.index(layout)}: {problem}")
        for shard in layout.shards:
            holders.setdefault(shard.tensor, Counter())[shard.box] += shared[id(layout)]
    total = Coverage(0, 0, 0)
    for tensor, size in logical_shapes(shape).items():
        count = wanted[_pattern(tensor)]
        if problem := _uncovered(size, holders.pop(tensor, Counter()), count):
            raise UserError(
                f"{engine}'s layouts of {len(layouts)} ranks: {tensor} {list(size)}: {problem}"
            )
        numel = math.prod(size)
        if count:
            total = Coverage(
                total.num_tensors + 1, total.num_elements + numel, total.num_held + count * numel
            )
    if holders:
        raise UserError(
            f"{engine}'s layouts of {len(layouts)} ranks: {next(iter(holders))} is no tensor of "
            "the model"
        )
    return total


def split_axes(shape: ModelShape) -> dict[str, int | None]:
    """Return for each tensor of the checkpoint the dimension that tensor parallelism splits; None:
    none."""
    axes = {
        name: next((axis for axis, dim in enumerate(dims) if dim in SPLIT_DIMS), None)
        for param in model_params(shape)
        for name, dims in param.hf.items()
    }
    return {tensor: axes[_pattern(tensor)] for tensor in logical_shapes(shape)}


def _pattern(tensor: str) -> str:
    """Return the name of a tensor as the table of parameters has it."""
    return re.sub(
        r"\.experts\.\d+\.",
        ".experts.{e}.",
        re.sub(r"^model\.layers\.\d+\.", "model.layers.{i}.", tensor),
    )


def _uncovered(size: Sequence[int], holders: Mapping[Box, int], count: int) -> str | None:
    """Return the problem of a tensor's blocks (block -> number of ranks that have it), or None:
    each element must be in one block, and each block on `count` ranks."""
    wrong = next(((box, n) for box, n in holders.items() if n != count), None)
    if wrong is not None:
        return f"{box_text(wrong[0])} is held {wrong[1]} times instead of {count}"
    overlap = next(
        (pair for pair in itertools.combinations(holders, 2) if intersection(*pair)), None
    )
    if overlap is not None:
        return f"{box_text(overlap[0])} and {box_text(overlap[1])} overlap"
    missing = math.prod(size) * (count > 0) - sum(map(volume, holders))
    return f"{missing} of {math.prod(size)} elements are on no rank" if missing else None


def _misplaced(layout: Layout, padded: Collection[str]) -> str | None:
    """Return what is wrong with the places of the shards in a rank's tensors: each element must
    belong to one shard, but for padding, in the tensors `padded`."""
    shards: dict[str, list[Shard]] = {}
    for shard in layout.shards:
        shards.setdefault(shard.local, []).append(shard)
    halves = {name: size for name, size in layout.stacked_shapes.items() if isinstance(name, Half)}
    whole = {half.tensor for half in halves}
    for name, size in ({n: s for n, s in layout.shapes.items() if n not in whole} | halves).items():
        boxes = [_place(shard, len(size)) for shard in shards.get(name, [])]
        if any(end > limit for box in boxes for (_, end), limit in zip(box, size, strict=True)):
            return f"a block of {name} is outside of {list(size)}"
        if any(intersection(*pair) for pair in itertools.combinations(boxes, 2)):
            return f"blocks of {name} overlap"
        free = math.prod(size) - sum(map(volume, boxes))
        if free and name not in padded:
            return f"{free} of {math.prod(size)} elements of {name} have no source"
    return None


def _place(shard: Shard, num_dims: int) -> Box:
    """Return the block that a shard takes in its local tensor."""
    sizes = [1] * (num_dims - len(shard.box)) + [end - start for start, end in shard.box]
    return tuple((start, start + size) for start, size in zip(shard.offset, sizes, strict=True))
