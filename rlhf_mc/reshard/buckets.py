"""The moves of tensors that lie alike on both sides, and the buckets that they are carried out in: no rank sends or
receives more than a bucket's size at a time. plan.py chooses the moves.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhf_mc.reshard.transfers import Transfer, rows_down


@dataclass(frozen=True, slots=True)
class Move:
    """A Transfer for every tensor of a pattern: `src` and `dst` number the pattern's pieces on either side."""

    src_rank: int
    dst_rank: int
    src: int
    src_offset: tuple[int, ...]
    dst: int
    dst_offset: tuple[int, ...]
    extent: tuple[int, ...]

    def part(self, number: int, parts: int) -> Move | None:
        """The number-th of `parts` row ranges of nearly equal size; None if it has no rows."""
        if parts == 1:
            return self
        rows = self.extent[0]
        start, end = rows * number // parts, rows * (number + 1) // parts
        if start == end:
            return None
        return replace(
            self,
            src_offset=rows_down(self.src_offset, start, len(self.extent)),
            dst_offset=rows_down(self.dst_offset, start, len(self.extent)),
            extent=(end - start, *self.extent[1:]),
        )


@dataclass(frozen=True)
class Pattern:
    """Tensors that lie alike on both sides, and the moves that each of them makes."""

    src_locals: list[tuple[str, ...]]
    """[tensor][source piece] local name."""
    dst_locals: list[tuple[str, ...]]
    """[tensor][target piece] local name."""
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

    def loads(self, number: int, parts: int) -> _Loads:
        """What one part of one tensor loads on each rank."""
        loads: _Loads = defaultdict(int)
        for move in self.moves:
            if cut := move.part(number, parts):
                numel = math.prod(cut.extent)
                loads[move.src_rank] += numel
                loads[~move.dst_rank] += numel
        return loads

    def num_parts(self, limit: int) -> int:
        """Into how many row ranges each move is cut so that one range of every move stays within the limit."""
        load = max(self.loads(0, 1).values())
        if load <= limit:
            return 1
        one_row: _Loads = defaultdict(int)
        for move in self.moves:
            one_row[move.src_rank] += math.prod(move.extent[1:])
            one_row[~move.dst_rank] += math.prod(move.extent[1:])
        rows = max(move.extent[0] for move in self.moves)
        # A range holds at most rows / parts, rounded up: one row more of every move than its share.
        room = limit - max(one_row.values())
        return min(rows, -(-load // room)) if room > 0 else rows


_Loads = dict[int, int]
"""Elements sent, by rank, and received, by ~rank (-1 for rank 0, -2 for rank 1, ...)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One part of one tensor's moves: the unit that buckets are filled with."""

    pattern: int
    tensor: int
    number: int
    parts: int


def fill_buckets(
    patterns: Sequence[Pattern], queue: Sequence[tuple[int, int, int]], limit: int
) -> tuple[tuple[Step, ...], ...]:
    """The tensors (position, pattern, number) as steps in buckets where no rank's load passes `limit` elements."""
    parts = {number: patterns[number].num_parts(limit) for number in {number for _, number, _ in queue}}
    loads = {(number, part): patterns[number].loads(part, n) for number, n in parts.items() for part in range(n)}
    steps = [
        (position, part, Step(number, tensor, part, parts[number]))
        for position, number, tensor in queue
        for part in range(parts[number])
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
