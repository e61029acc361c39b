"""Which tensors of a target layout need no memory of their own, because on the same rank the source holds them
block for block: plain data, no torch. Everything else moves by plan.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_mc.reshard.layout import STACK, Layout, Shard

ALIGNMENT = 16
"""Bytes. A tensor that would begin elsewhere in the source's is copied: GPU kernels load 16 bytes at a time."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A local tensor of the target that is `rows` rows of a local tensor of the source, from `row` on."""

    dst_local: str
    src_local: str
    row: int
    rows: int
    numel: int
    """Its elements, less padding."""


def find_aliases(source: Layout, target: Layout, itemsize: int) -> dict[str, Alias]:
    """By local name, the tensors of one rank's target that are consecutive whole rows of one of its source tensors.

    Padding may lie under padding only as far as the source has rows for it; what it contains is nobody's business."""
    held: dict[str, list[Shard]] = {}
    for shard in source.stacked:
        if STACK in shard.local:
            continue  # experts' tensors have memory of their own each
        held.setdefault(shard.tensor, []).append(shard)
    found = {}
    shapes = source.stacked_shapes
    for local, shards in target.by_local.items():
        if not all(shard.tensor in held for shard in shards):
            continue
        size = target.stacked_shapes[local]
        places = {_place(shard, held[shard.tensor], shapes, size) for shard in shards}
        if len(places) != 1 or (place := places.pop()) is None:
            continue
        src_local, row = place
        in_bounds = row >= 0 and row + size[0] <= shapes[src_local][0]
        if in_bounds and row * math.prod(size[1:]) * itemsize % ALIGNMENT == 0:
            numel = sum(math.prod(end - start for start, end in shard.box) for shard in shards)
            found[local] = Alias(local, src_local, row, size[0], numel)
    return found


def _place(
    shard: Shard, held: list[Shard], shapes: Mapping[str, tuple[int, ...]], size: tuple[int, ...]
) -> tuple[str, int] | None:
    """(source tensor, its row at which a target tensor of this size would begin) if the target's shard lies there."""
    for other in held:
        inside = all(a <= c and d <= b for (a, b), (c, d) in zip(other.box, shard.box, strict=True))
        if not inside or shapes[other.local][1:] != size[1:]:
            continue
        at = other.offset_of(shard.box)
        if at[1:] == shard.offset[1:]:
            return other.local, at[0] - shard.offset[0]
    return None
