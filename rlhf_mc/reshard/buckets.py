"""Moves of tensors with the same placement, and buckets of moves: no rank sends or receives more than the bucket size
in one bucket. plan.py chooses the moves.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhf_mc.reshard.ranges import even_range
from rlhf_mc.reshard.transfers import Transfer

Parts = tuple[int, int]
"""Number of ranges that a block is split into along its first dimension, and each of them along its second. Only blocks
of stacked experts are split along the second, if one expert exceeds the bucket."""


@dataclass(frozen=True, slots=True)
class Move:
    """One Transfer for every tensor of a pattern. `src` and `dst` are indices of the pattern's source and target
    shards."""

    src_rank: int
    src: int
    src_offset: tuple[int, ...]
    dst_rank: int
    dst: int
    dst_offset: tuple[int, ...]
    extent: tuple[int, ...]

    def part(self, number: int, parts: Parts) -> Move | None:
        """Return the number-th of the nearly equal ranges that `parts` splits the move into; None if it is empty."""
        if parts == (1, 1):
            return self
        outer, inner = divmod(number, parts[1])
        rest = self._range(0, outer, parts[0])
        return rest._range(1, inner, parts[1]) if rest and parts[1] > 1 else rest

    def _range(self, axis: int, number: int, parts: int) -> Move | None:
        start, end = even_range(number, parts, self.extent[axis])
        if start == end:
            return None
        left = len(self.extent) - axis
        return replace(
            self,
            src_offset=_rows_down(self.src_offset, start, left),
            dst_offset=_rows_down(self.dst_offset, start, left),
            extent=(*self.extent[:axis], end - start, *self.extent[axis + 1 :]),
        )


def _rows_down(offset: tuple[int, ...], rows: int, dims: int) -> tuple[int, ...]:
    """Return the offset moved by `rows` along the first of its last `dims` dimensions."""
    axis = len(offset) - dims
    return (*offset[:axis], offset[axis] + rows, *offset[axis + 1 :])


@dataclass(frozen=True)
class Pattern:
    """Tensors with the same placement on both sides, and the moves of each of them."""

    src_locals: list[tuple[str, ...]]
    """Local names: [tensor][source shard]."""
    dst_locals: list[tuple[str, ...]]
    """Local names: [tensor][target shard]."""
    copies: list[Move]
    """Moves within a rank."""
    moves: list[Move]
    """Moves between ranks."""
    forwarded: bool = False
    """The moves forward blocks that earlier buckets have delivered: from target to target, within a node."""

    def transfer(self, move: Move, tensor: int) -> Transfer:
        """Return the transfer that a move is for one tensor."""
        return Transfer(
            move.src_rank,
            move.dst_rank,
            self.src_locals[tensor][move.src],
            move.src_offset,
            self.dst_locals[tensor][move.dst],
            move.dst_offset,
            move.extent,
            forwarded=self.forwarded,
        )

    def loads(self, number: int, parts: Parts) -> _Loads:
        """Return the elements that each rank sends and receives for one part of one tensor."""
        loads: _Loads = defaultdict(int)
        numels: dict[tuple[int, ...], int] = {}
        for move in self.moves:
            if move.extent not in numels:
                part = move.part(number, parts)
                numels[move.extent] = math.prod(part.extent) if part else 0
            if numel := numels[move.extent]:
                loads[move.src_rank] += numel
                loads[~move.dst_rank] += numel
        return loads

    def num_parts(self, limit: int) -> Parts:
        """Return the split of each move such that one range of every move stays within the limit."""
        outer = self._num_ranges(0, limit)
        stacks = len(self.moves[0].extent) == 3
        is_by_expert = stacks and all(move.extent[0] <= outer for move in self.moves)
        return outer, self._num_ranges(1, limit) if is_by_expert else 1

    def _num_ranges(self, axis: int, limit: int) -> int:
        """Return the number of ranges along an axis, given ranges of size 1 along the axes before it."""
        load = self._max_load(axis)
        if load <= limit:
            return 1
        sizes = max(move.extent[axis] for move in self.moves)
        # A range has at most size / ranges, rounded up: at most one row more than the mean, of every move.
        available = limit - self._max_load(axis + 1)
        return min(sizes, -(-load // available)) if available > 0 else sizes

    def _max_load(self, axis: int) -> int:
        """Return the maximum over ranks of the elements sent or received, counting every extent from `axis` only."""
        loads: _Loads = defaultdict(int)
        for move in self.moves:
            numel = math.prod(move.extent[axis:])
            loads[move.src_rank] += numel
            loads[~move.dst_rank] += numel
        return max(loads.values())


_Loads = dict[int, int]
"""Elements sent, by rank, and received, by ~rank (-1 for rank 0, -2 for rank 1, ...)."""


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
    """Return the parts of the queued tensors (position, pattern, index in the pattern), in buckets in which no rank
    sends or receives more than `limit` elements."""
    splits = {number: patterns[number].num_parts(limit) for number in {number for _, number, _ in queue}}
    loads = {
        (number, index): patterns[number].loads(index, split)
        for number, split in splits.items()
        for index in range(math.prod(split))
    }
    parts = [
        (position, BucketPart(number, tensor, index, splits[number]))
        for position, number, tensor in queue
        for index in range(math.prod(splits[number]))
    ]
    # Layers of equal depth in all pipeline stages are neighbours, so that all stages send in every bucket.
    parts.sort(key=lambda p: (patterns[p[1].pattern].forwarded, p[0], p[1].number, p[1].pattern, p[1].tensor))
    buckets: list[list[BucketPart]] = []
    filled: _Loads = {}
    forwarded = False
    for _, part in parts:
        load = loads[part.pattern, part.number]
        begins = patterns[part.pattern].forwarded != forwarded
        forwarded = patterns[part.pattern].forwarded
        if not buckets or begins or any(filled.get(who, 0) + amount > limit for who, amount in load.items()):
            buckets.append([])
            filled = {}
        for who, amount in load.items():
            filled[who] = filled.get(who, 0) + amount
        buckets[-1].append(part)
    return tuple(map(tuple, buckets))
