"""The moves of tensors that lie alike on both sides, and the buckets that they are carried out in: no rank sends or
receives more than a bucket's size at a time. plan.py chooses the moves.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhf_mc.reshard.transfers import Transfer, rows_down

Parts = tuple[int, int]
"""Into how many ranges a block is cut along its first dimension, and each of these along its second. Only blocks of
stacked experts are cut along the second, where a single expert is too much."""


@dataclass(frozen=True, slots=True)
class Move:
    """A Transfer for every tensor of a pattern: `src` and `dst` number the pattern's shards on either side."""

    src_rank: int
    dst_rank: int
    src: int
    src_offset: tuple[int, ...]
    dst: int
    dst_offset: tuple[int, ...]
    extent: tuple[int, ...]

    def part(self, number: int, parts: Parts) -> Move | None:
        """Return the number-th of the ranges, nearly equal in size, that `parts` cuts it into; None if it is empty."""
        if parts == (1, 1):
            return self
        outer, inner = divmod(number, parts[1])
        found = self._range(0, outer, parts[0])
        return found._range(1, inner, parts[1]) if found and parts[1] > 1 else found

    def _range(self, axis: int, number: int, parts: int) -> Move | None:
        size = self.extent[axis]
        start, end = size * number // parts, size * (number + 1) // parts
        if start == end:
            return None
        left = len(self.extent) - axis
        return replace(
            self,
            src_offset=rows_down(self.src_offset, start, left),
            dst_offset=rows_down(self.dst_offset, start, left),
            extent=(*self.extent[:axis], end - start, *self.extent[axis + 1 :]),
        )


@dataclass(frozen=True)
class Pattern:
    """Tensors that lie alike on both sides, and the moves that each of them makes."""

    src_locals: list[tuple[str, ...]]
    """[tensor][source shard] local name."""
    dst_locals: list[tuple[str, ...]]
    """[tensor][target shard] local name."""
    copies: list[Move]
    """Within a rank."""
    moves: list[Move]
    """Between ranks."""
    relayed: bool = False
    """The moves pass on what other patterns' moves have brought: from target to target, in later buckets."""

    def transfer(self, move: Move, tensor: int) -> Transfer:
        src, dst = self.src_locals[tensor][move.src], self.dst_locals[tensor][move.dst]
        ranks = move.src_rank, move.dst_rank
        return Transfer(*ranks, src, move.src_offset, dst, move.dst_offset, move.extent, relayed=self.relayed)

    def loads(self, number: int, parts: Parts) -> _Loads:
        """What one part of one tensor loads on each rank."""
        loads: _Loads = defaultdict(int)
        numels: dict[tuple[int, ...], int] = {}
        for move in self.moves:
            if move.extent not in numels:
                numels[move.extent] = _share_of(move.extent, number, parts)
            if numel := numels[move.extent]:
                loads[move.src_rank] += numel
                loads[~move.dst_rank] += numel
        return loads

    def num_parts(self, limit: int) -> Parts:
        """Return how each move is cut so that one range of every move stays within the limit."""
        outer = self._num_ranges(0, limit)
        stacks = len(self.moves[0].extent) == 3
        single = stacks and all(move.extent[0] <= outer for move in self.moves)
        return outer, self._num_ranges(1, limit) if single else 1

    def _num_ranges(self, axis: int, limit: int) -> int:
        """Return into how many ranges each move is cut along an axis, when it is cut to size 1 along those before."""
        load = self._most(axis)
        if load <= limit:
            return 1
        sizes = max(move.extent[axis] for move in self.moves)
        # A range holds at most size / ranges, rounded up: one row more of every move than its share.
        room = limit - self._most(axis + 1)
        return min(sizes, -(-load // room)) if room > 0 else sizes

    def _most(self, axis: int) -> int:
        """Return the most elements that a rank sends or receives, of every move's extent from an axis on."""
        loads: _Loads = defaultdict(int)
        for move in self.moves:
            numel = math.prod(move.extent[axis:])
            loads[move.src_rank] += numel
            loads[~move.dst_rank] += numel
        return max(loads.values())


def _share_of(extent: tuple[int, ...], number: int, parts: Parts) -> int:
    """Return the number of elements in the number-th range of a block."""
    if parts == (1, 1):
        return math.prod(extent)
    outer, inner = divmod(number, parts[1])
    numel = _range_size(extent[0], outer, parts[0]) * math.prod(extent[1:])
    return numel if parts[1] == 1 else numel // extent[1] * _range_size(extent[1], inner, parts[1])


def _range_size(size: int, number: int, parts: int) -> int:
    return size * (number + 1) // parts - size * number // parts


_Loads = dict[int, int]
"""Elements sent, by rank, and received, by ~rank (-1 for rank 0, -2 for rank 1, ...)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One part of one tensor's moves: the unit that buckets are filled with."""

    pattern: int
    tensor: int
    number: int
    parts: Parts


def fill_buckets(
    patterns: Sequence[Pattern], queue: Sequence[tuple[int, int, int]], limit: int
) -> tuple[tuple[Step, ...], ...]:
    """The tensors (position, pattern, number) as steps in buckets where no rank's load passes `limit` elements."""
    parts = {number: patterns[number].num_parts(limit) for number in {number for _, number, _ in queue}}
    loads = {
        (number, part): patterns[number].loads(part, cut)
        for number, cut in parts.items()
        for part in range(math.prod(cut))
    }
    steps = [
        (position, part, Step(number, tensor, part, parts[number]))
        for position, number, tensor in queue
        for part in range(math.prod(parts[number]))
    ]
    # Equal depths of all pipeline stages side by side, so that all stages send at any time.
    steps.sort(key=lambda s: (patterns[s[2].pattern].relayed, s[0], s[1], s[2].pattern, s[2].tensor))
    buckets: list[list[Step]] = []
    filled: _Loads = {}
    relayed = False
    for _, _, step in steps:
        load = loads[step.pattern, step.number]
        begins = patterns[step.pattern].relayed != relayed
        relayed = patterns[step.pattern].relayed
        if not buckets or begins or any(filled.get(who, 0) + amount > limit for who, amount in load.items()):
            buckets.append([])
            filled = {}
        for who, amount in load.items():
            filled[who] = filled.get(who, 0) + amount
        buckets[-1].append(step)
    return tuple(map(tuple, buckets))
