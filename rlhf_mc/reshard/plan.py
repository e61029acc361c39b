"""Which blocks move from which rank to which, given the layouts of both sides: plain data, no torch, no processes.

A block that a rank already holds is copied there and never sent. Any other block comes from the nearest
ranks that hold it (same node, else all), each of them sending the same share. Tensors that lie alike on
both sides, such as the layers of a pipeline stage, form a pattern, and the moves of a pattern are worked
out once; so the cost of planning hardly grows with depth. execute.py carries a plan out.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard.layout import Box, Layout, Piece

MIN_SLICE_BYTES = 1 << 16
"""Blocks are not cut into smaller slices than this to even out the senders."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """`extent` elements from src_offset of a local tensor of src_rank to dst_offset of one of dst_rank."""

    src_rank: int
    dst_rank: int
    src_local: str
    src_offset: tuple[int, ...]
    dst_local: str
    dst_offset: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.extent)


@dataclass(frozen=True)
class RankPlan:
    """One rank's part. Every rank has the same number of buckets; sender and receiver list a bucket in one order."""

    rank: int
    itemsize: int
    copies: tuple[Transfer, ...]
    """Within the rank."""
    buckets: tuple[tuple[tuple[Transfer, ...], tuple[Transfer, ...]], ...]
    """(sends, receives), to be completed before the next bucket begins."""

    @property
    def copied_bytes(self) -> int:
        return self.itemsize * sum(t.numel for t in self.copies)

    @property
    def sent_bytes(self) -> int:
        return self.itemsize * sum(t.numel for sends, _ in self.buckets for t in sends)

    @property
    def received_bytes(self) -> int:
        return self.itemsize * sum(t.numel for _, receives in self.buckets for t in receives)


@dataclass(frozen=True, slots=True)
class _Move:
    """A Transfer for every tensor of a pattern: `src` and `dst` number the pattern's pieces on either side."""

    src_rank: int
    dst_rank: int
    src: int
    src_offset: tuple[int, ...]
    dst: int
    dst_offset: tuple[int, ...]
    extent: tuple[int, ...]

    def part(self, number: int, parts: int) -> _Move | None:
        """The number-th of `parts` row ranges of nearly equal size; None if it has no rows."""
        if parts == 1:
            return self
        rows = self.extent[0]
        start, end = rows * number // parts, rows * (number + 1) // parts
        if start == end:
            return None
        return replace(
            self,
            src_offset=(self.src_offset[0] + start, *self.src_offset[1:]),
            dst_offset=(self.dst_offset[0] + start, *self.dst_offset[1:]),
            extent=(end - start, *self.extent[1:]),
        )


@dataclass(frozen=True)
class _Pattern:
    """Tensors that lie alike on both sides, and the moves that each of them makes."""

    src_locals: list[tuple[str, ...]]
    """[tensor][source piece] local name."""
    dst_locals: list[tuple[str, ...]]
    """[tensor][target piece] local name."""
    copies: list[_Move]
    """Within a rank."""
    moves: list[_Move]
    """Between ranks."""

    def transfer(self, move: _Move, tensor: int) -> Transfer:
        src, dst = self.src_locals[tensor][move.src], self.dst_locals[tensor][move.dst]
        return Transfer(move.src_rank, move.dst_rank, src, move.src_offset, dst, move.dst_offset, move.extent)

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
class _Step:
    """One part of one tensor's moves: the unit that buckets are filled with."""

    pattern: int
    tensor: int
    number: int
    parts: int


@dataclass(frozen=True)
class Plan:
    """The whole movement. Byte counts are per rank."""

    itemsize: int
    patterns: tuple[_Pattern, ...]
    buckets: tuple[tuple[_Step, ...], ...]
    copied_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]

    def for_rank(self, rank: int) -> RankPlan:
        """What one rank does."""
        copies: list[Transfer] = []
        for pattern in self.patterns:
            mine = [m for m in pattern.copies if m.dst_rank == rank]
            copies += [pattern.transfer(m, tensor) for tensor in range(len(pattern.dst_locals)) for m in mine]
        moves = [[m for m in p.moves if rank in (m.src_rank, m.dst_rank)] for p in self.patterns]
        buckets = []
        for bucket in self.buckets:
            found = [
                self.patterns[step.pattern].transfer(cut, step.tensor)
                for step in bucket
                for move in moves[step.pattern]
                if (cut := move.part(step.number, step.parts))
            ]
            sends = tuple(t for t in found if t.src_rank == rank)
            buckets.append((sends, tuple(t for t in found if t.dst_rank == rank)))
        return RankPlan(rank, self.itemsize, tuple(copies), tuple(buckets))


def make_plan(
    source: Sequence[Layout],
    target: Sequence[Layout],
    itemsize: int,
    bucket_bytes: int,
    ranks_per_node: int = 8,
) -> Plan:
    """The plan that fills every rank's target layout from the source layouts; one layout per rank on both sides.

    Ranks that share a Layout object are planned together. A source rank may hold any blocks, but two blocks
    of one tensor, on any ranks, are either equal or disjoint. In a bucket no rank sends or receives more than
    `bucket_bytes`, unless one row of every block is more. The result depends on the arguments alone, so every
    rank can compute it. UserError if the source lacks something that the target has.
    """
    assert len(source) == len(target), "one source and one target layout per rank"
    src, dst = _Side(source), _Side(target)
    alike: dict[tuple, list[str]] = defaultdict(list)
    for tensor in dst.held:
        alike[_placement(src.held.get(tensor, ())), _placement(dst.held[tensor])].append(tensor)
    patterns, queue = [], []
    spread = _Spread(ranks_per_node, itemsize)
    for number, tensors in enumerate(alike.values()):
        pattern = _make_pattern(tensors, src, dst, spread)
        patterns.append(pattern)
        if pattern.moves:
            queue += [(src.position[name], number, k) for k, name in enumerate(tensors)]
    buckets = _fill_buckets(patterns, queue, max(1, bucket_bytes // itemsize))
    copied, sent, received = [0] * len(source), [0] * len(source), [0] * len(source)
    for pattern in patterns:
        times = itemsize * len(pattern.dst_locals)
        for move in pattern.copies:
            copied[move.src_rank] += times * math.prod(move.extent)
        for move in pattern.moves:
            sent[move.src_rank] += times * math.prod(move.extent)
            received[move.dst_rank] += times * math.prod(move.extent)
    return Plan(itemsize, tuple(patterns), buckets, tuple(copied), tuple(sent), tuple(received))


class _Side:
    """One side's layouts, indexed by tensor; equal (identical) layouts of several ranks appear once."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        ranks_of: dict[int, list[int]] = defaultdict(list)
        for rank, layout in enumerate(layouts):
            ranks_of[id(layout)].append(rank)
        self.ranks = list(ranks_of.values())
        """Ranks of each distinct layout."""
        self.held: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
        """Tensor -> (number of the distinct layout, piece)."""
        self.position: dict[str, int] = {}
        """Tensor -> how early it comes in a layout."""
        for number, ranks in enumerate(self.ranks):
            for position, piece in enumerate(layouts[ranks[0]].pieces):
                self.held[piece.tensor].append((number, piece))
                self.position[piece.tensor] = min(position, self.position.get(piece.tensor, position))


def _placement(held: Iterable[tuple[int, Piece]]) -> tuple:
    return tuple((number, piece.box, piece.offset) for number, piece in held)


class _Spread:
    """Chooses senders: nearest first, then in turn."""

    def __init__(self, ranks_per_node: int, itemsize: int) -> None:
        self.ranks_per_node = ranks_per_node
        self.itemsize = itemsize
        self.turn: dict[tuple[int, ...], int] = defaultdict(int)

    def nearest(self, holders: Iterable[int], receivers: Iterable[int]) -> dict[tuple[int, ...], list[int]]:
        """The receivers' numbers in their list, grouped by the ranks that may send to them."""
        everywhere = tuple(holders)
        on_node: dict[int, list[int]] = defaultdict(list)
        for rank in everywhere:
            on_node[rank // self.ranks_per_node].append(rank)
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, rank in enumerate(receivers):
            groups[tuple(on_node.get(rank // self.ranks_per_node, everywhere))].append(number)
        return groups

    def cuts(self, block: Box, num_senders: int, num_receivers: int) -> list[Box]:
        """Row ranges of the block such that every sender sends as many, where the block is large enough."""
        (start, end), *rest = block
        size = _volume(block) * self.itemsize
        parts = num_senders // math.gcd(num_senders, num_receivers)
        parts = max(1, min(parts, end - start, size // MIN_SLICE_BYTES))
        bounds = [start + (end - start) * n // parts for n in range(parts + 1)]
        return [((bounds[n], bounds[n + 1]), *rest) for n in range(parts)]

    def next_sender(self, senders: tuple[int, ...]) -> int:
        self.turn[senders] += 1
        return senders[(self.turn[senders] - 1) % len(senders)]


def _make_pattern(tensors: list[str], src: _Side, dst: _Side, spread: _Spread) -> _Pattern:
    """Works out the moves of the first tensor; the others make the same."""
    sources, targets = src.held.get(tensors[0], []), dst.held[tensors[0]]
    holders: dict[Box, dict[int, int]] = defaultdict(dict)  # block -> rank -> number of its piece
    for number, (layout, piece) in enumerate(sources):
        holders[piece.box].update(dict.fromkeys(src.ranks[layout], number))
    copies: list[_Move] = []
    moves: list[_Move] = []

    @functools.cache
    def place(from_piece: int, to_piece: int, block: Box) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        extent = tuple(end - start for start, end in block)
        return _local_offset(sources[from_piece][1], block), _local_offset(targets[to_piece][1], block), extent

    def move(src_rank: int, dst_rank: int, from_piece: int, to_piece: int, block: Box) -> _Move:
        src_offset, dst_offset, extent = place(from_piece, to_piece, block)
        return _Move(src_rank, dst_rank, from_piece, src_offset, to_piece, dst_offset, extent)

    for (box, block), wanted in _needs(tensors[0], holders, targets, dst.ranks).items():
        have = holders[box]
        missing = []
        for rank, piece_number in wanted:
            if rank in have:
                copies.append(move(rank, rank, have[rank], piece_number, block))
            else:
                missing.append((rank, piece_number))
        for senders, numbers in spread.nearest(have, [rank for rank, _ in missing]).items():
            cuts = spread.cuts(block, len(senders), len(numbers))
            for rank, piece_number in (missing[n] for n in numbers):
                for cut in cuts:
                    sender = spread.next_sender(senders)
                    moves.append(move(sender, rank, have[sender], piece_number, cut))
    return _Pattern(_locals(tensors, src), _locals(tensors, dst), copies, moves)


def _needs(
    tensor: str, holders: Mapping[Box, object], targets: Sequence[tuple[int, Piece]], dst_ranks: list[list[int]]
) -> dict[tuple[Box, Box], list[tuple[int, int]]]:
    """(block of the source, its part that is wanted) -> (rank, number of its piece) of all who want it."""
    needs: dict[tuple[Box, Box], list[tuple[int, int]]] = defaultdict(list)
    for number, (layout, piece) in enumerate(targets):
        covered = 0
        for box in holders:
            if block := _intersection(box, piece.box):
                covered += _volume(block)
                needs[box, block] += [(rank, number) for rank in dst_ranks[layout]]
        assert covered <= _volume(piece.box), f"{tensor}: blocks of the source overlap"
        if covered < _volume(piece.box):
            raise UserError(
                f"{tensor}: rank {dst_ranks[layout][0]} needs {_show(piece.box)} of it for {piece.local}, "
                f"and the source has {', '.join(map(_show, holders)) or 'nothing of it'}"
            )
    return needs


def _locals(tensors: list[str], side: _Side) -> list[tuple[str, ...]]:
    return [tuple(piece.local for _, piece in side.held.get(name, ())) for name in tensors]


def _local_offset(piece: Piece, block: Box) -> tuple[int, ...]:
    steps = zip(piece.offset, block, piece.box, strict=True)
    return tuple(offset + part[0] - whole[0] for offset, part, whole in steps)


def _intersection(a: Box, b: Box) -> Box | None:
    assert len(a) == len(b)
    both = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return both if all(start < end for start, end in both) else None


def _volume(box: Box) -> int:
    return math.prod(end - start for start, end in box)


def _show(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{end}" for start, end in box) + "]"


def _fill_buckets(
    patterns: Sequence[_Pattern], queue: Sequence[tuple[int, int, int]], limit: int
) -> tuple[tuple[_Step, ...], ...]:
    """The tensors (position, pattern, number) as steps in buckets where no rank's load passes `limit` elements."""
    parts = {number: patterns[number].num_parts(limit) for number in {number for _, number, _ in queue}}
    loads = {(number, part): patterns[number].loads(part, n) for number, n in parts.items() for part in range(n)}
    steps = [
        (position, part, _Step(number, tensor, part, parts[number]))
        for position, number, tensor in queue
        for part in range(parts[number])
    ]
    # Equal depths of all pipeline stages side by side, so that all stages send at any time.
    steps.sort(key=lambda s: (s[0], s[1], s[2].pattern, s[2].tensor))
    buckets: list[list[_Step]] = []
    filled: _Loads = {}
    for _, _, step in steps:
        load = loads[step.pattern, step.number]
        if not buckets or any(filled.get(who, 0) + amount > limit for who, amount in load.items()):
            buckets.append([])
            filled = {}
        for who, amount in load.items():
            filled[who] = filled.get(who, 0) + amount
        buckets[-1].append(step)
    return tuple(map(tuple, buckets))
