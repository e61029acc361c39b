"""Moves of tensors with the same placement, and buckets of moves: no rank sends or receives more
than the bucket size in one bucket. plan.py chooses the moves.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from rlhf_mc.reshard.layout import Box, Shard, Stack, volume
from rlhf_mc.reshard.ranges import even_range
from rlhf_mc.reshard.transfers import Transfer

if TYPE_CHECKING:
    import numpy as np

Parts = tuple[int, int]
"""Number of ranges that a block is split into along its first dimension, and each of them along its
second. Only blocks of stacked experts are split along the second, if one expert exceeds the
bucket."""


class Move(NamedTuple):
    """One Transfer for every tensor of a pattern: of a block, between two of the pattern's source
    and target shards, whose indices are `src` and `dst`."""

    src_rank: int
    src: int
    dst_rank: int
    dst: int
    block: Box


def _part(block: Box, number: int, parts: Parts) -> Box | None:
    """Return the number-th of the nearly equal ranges that `parts` splits the block into; None if
    it is empty."""
    sides = list(block)
    for axis, (index, count) in enumerate(zip(divmod(number, parts[1]), parts, strict=True)):
        if count > 1:
            start, end = block[axis]
            low, high = even_range(index, count, end - start)
            if low == high:
                return None
            sides[axis] = start + low, start + high
    return tuple(sides)


@dataclass(frozen=True)
class Pattern:
    """Tensors with the same placement on both sides, and the moves of each of them."""

    world: int
    """Number of ranks."""
    ranks_per_node: int
    src: list[tuple[Shard, ...]]
    """Source shards of each tensor."""
    dst: list[tuple[Shard, ...]]
    """Target shards of each tensor."""
    copies: list[Move]
    """Moves within a rank."""
    moves: list[Move]
    """Moves between ranks."""
    forwarded: bool = False
    """The moves forward blocks that earlier buckets have delivered: from target to target, within a
    node."""

    def transfer(
        self, move: Move, tensor: int, number: int = 0, parts: Parts = (1, 1)
    ) -> Transfer | None:
        """Return the transfer that a part of a move is for one tensor; None if the part is
        empty."""
        block = _part(move.block, number, parts)
        if block is None:
            return None
        src = self.src[tensor][move.src]
        dst = self.dst[tensor][move.dst]
        return Transfer(
            move.src_rank,
            move.dst_rank,
            src.local,
            src.local_offset(block),
            dst.local,
            dst.local_offset(block),
            tuple(end - start for start, end in block),
            forwarded=self.forwarded,
        )

    @functools.cached_property
    def _counts(self) -> dict[Box, np.ndarray]:
        """A block's size, as a block at 0 -> number of such moves, as in _Loads."""
        import numpy as np  # not for the planner's command line alone

        sizes = {
            block: tuple((0, end - start) for start, end in block)
            for block in {m.block for m in self.moves}
        }
        ranks: dict[Box, list[int]] = defaultdict(list)
        for move in self.moves:
            counted = ranks[sizes[move.block]]
            counted += move.src_rank, self.world + move.dst_rank
            if move.src_rank // self.ranks_per_node != move.dst_rank // self.ranks_per_node:
                counted += 2 * self.world + move.src_rank, 3 * self.world + move.dst_rank
        return {
            size: np.bincount(numbers, minlength=4 * self.world) for size, numbers in ranks.items()
        }

    def _loads(self, numel: Callable[[Box], int]) -> _Loads:
        return functools.reduce(
            operator.add, (numel(size) * counts for size, counts in self._counts.items())
        )

    def loads(self, number: int, parts: Parts) -> _Loads:
        """Return the elements that each rank sends and receives for one part of one tensor."""
        return self._loads(lambda size: volume(part) if (part := _part(size, number, parts)) else 0)

    def num_parts(self, limit: int) -> Parts:
        """Return the split of each move such that one range of every move stays within the
        limit."""
        outer = self._num_ranges(0, limit)
        stacks = isinstance(self.dst[0][0].tensor, Stack)
        is_by_expert = stacks and all(size[0][1] <= outer for size in self._counts)
        return outer, self._num_ranges(1, limit) if is_by_expert else 1

    def _num_ranges(self, axis: int, limit: int) -> int:
        """Return the number of ranges along an axis, given ranges of size 1 along the axes before
        it."""
        load = self._max_load(axis)
        if load <= limit:
            return 1
        sizes = max(size[axis][1] for size in self._counts)
        # A range has at most size / ranges, rounded up: at most one row more than the mean, of
        # every move.
        available = limit - self._max_load(axis + 1)
        return min(sizes, -(-load // available)) if available > 0 else sizes

    def _max_load(self, axis: int) -> int:
        """Return the maximum over ranks of the elements sent or received, counting every extent
        from `axis` only."""
        return int(self._loads(lambda size: volume(size[axis:])).max())


_Loads: TypeAlias = "np.ndarray"
"""[4 x ranks] elements that each rank sends, receives, sends to other nodes, and receives from
other nodes."""


@dataclass(frozen=True, slots=True)
class BucketPart:
    """One part of one tensor's moves: the unit of buckets."""

    pattern: int
    tensor: int
    number: int
    parts: Parts


def fill_buckets(
    patterns: Sequence[Pattern], queue: Sequence[tuple[int, int, int]], limit: int
) -> tuple[tuple[BucketPart, ...], ...]:
    """Return the parts of the queued tensors (position, pattern, index in the pattern), in buckets
    in which no rank sends or receives more than `limit` elements: each in the first that has room
    on its ranks, so that ranks whose layers come later send meanwhile. A part that forwards a block
    is in a later bucket than the block."""
    import numpy as np  # not for the planner's command line alone

    splits = {
        number: patterns[number].num_parts(limit) for number in {number for _, number, _ in queue}
    }
    loads = {}
    for number, split in splits.items():
        for index in range(math.prod(split)):
            load = patterns[number].loads(index, split)
            loads[number, index] = load, load.nonzero()[0]
    parts = [
        (position, BucketPart(number, tensor, index, splits[number]))
        for position, number, tensor in queue
        for index in range(math.prod(splits[number]))
    ]
    # Layers of equal depth in all pipeline stages are neighbours, so that all stages send in every
    # bucket.
    parts.sort(
        key=lambda p: (
            patterns[p[1].pattern].forwarded,
            p[0],
            p[1].number,
            p[1].pattern,
            p[1].tensor,
        )
    )
    buckets: list[list[BucketPart]] = []
    filled: list[_Loads] = []
    first: dict[tuple[int, int], int] = {}  # the first bucket with room for a load
    delivered: dict[tuple[int, int], int] = {}  # the bucket after that of a tensor's last part
    for _, part in parts:
        load, of_load = loads[part.pattern, part.number]
        bucket = first.get((part.pattern, part.number), 0)
        if patterns[part.pattern].forwarded:  # from the targets of the pattern before
            bucket = max(bucket, delivered[part.pattern - 1, part.tensor])
        while bucket < len(buckets) and (filled[bucket][of_load] + load[of_load] > limit).any():
            bucket += 1
        if bucket == len(buckets):
            buckets.append([])
            filled.append(np.zeros_like(load))
        filled[bucket][of_load] += load[of_load]
        buckets[bucket].append(part)
        first[part.pattern, part.number] = bucket
        delivered[part.pattern, part.tensor] = max(
            bucket + 1, delivered.get((part.pattern, part.tensor), 0)
        )
    return tuple(map(tuple, buckets))
