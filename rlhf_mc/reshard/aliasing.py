"""Aliasing: target tensors that can be views of source tensors of the same rank, with no copy.
Plain data, no torch. plan.py plans the moves of all other tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_mc.reshard.layout import Layout, Shard, Stack

ALIGNMENT = 16
"""Bytes. A tensor whose view would not be aligned is copied: GPU kernels load 16 bytes at a
time."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A target tensor that is a view of a source tensor: `rows` rows, beginning with `row`."""

    dst_local: str
    src_local: str
    row: int
    rows: int
    numel: int
    """Number of elements, without padding."""


def find_aliases(source: Layout, target: Layout, itemsize: int) -> dict[str, Alias]:
    """Return, by local name, one rank's target tensors that are consecutive complete rows of one of
    its source tensors.

    The target's padding must lie within the source tensor. The values there are never used."""
    sources: dict[str, list[Shard]] = {}
    for shard in source.stacked:
        if isinstance(shard.local, Stack) and shard.local not in source.contiguous:
            continue  # each expert has memory of its own in the source
        sources.setdefault(shard.tensor, []).append(shard)
    aliases = {}
    shapes = source.stacked_shapes
    for local, shards in target.by_local.items():
        if local in target.float32 or not all(shard.tensor in sources for shard in shards):
            continue
        size = target.stacked_shapes[local]
        starts = {_start(shard, sources[shard.tensor], shapes, size) for shard in shards}
        if len(starts) != 1 or (start := starts.pop()) is None:
            continue
        src_local, row = start
        in_bounds = row >= 0 and row + size[0] <= shapes[src_local][0]
        if in_bounds and row * math.prod(size[1:]) * itemsize % ALIGNMENT == 0:
            numel = sum(math.prod(b - a for a, b in shard.box) for shard in shards)
            aliases[local] = Alias(local, src_local, row, size[0], numel)
    return aliases


def _start(
    shard: Shard,
    sources: list[Shard],
    shapes: Mapping[str, tuple[int, ...]],
    size: tuple[int, ...],
) -> tuple[str, int] | None:
    """Return (source tensor, its row at which a view of this size begins) such that the view has
    the target's shard in its position; None if there is no such view."""
    for other in sources:
        inside = all(a <= c and d <= b for (a, b), (c, d) in zip(other.box, shard.box, strict=True))
        if not inside or shapes[other.local][1:] != size[1:]:
            continue
        offset = other.local_offset(shard.box)
        if offset[1:] == shard.offset[1:]:
            return other.local, offset[0] - shard.offset[0]
    return None
