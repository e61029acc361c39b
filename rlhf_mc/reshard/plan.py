"""Which blocks move from which rank to which, given the layouts of both sides: plain data, no torch, no processes.

A block that a rank already holds is copied there and never sent. Any other block comes from the nearest ranks that
hold it (same node, else all), each of them sending the same share. What several ranks of a node need and none there
holds comes to the node once: each of them receives a part and relays it to the others. Tensors that lie alike on both
sides, such as the layers of a pipeline stage, form a pattern, and the moves of a pattern are worked out once; so the
cost of planning hardly grows with depth. execute.py carries a plan out.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard.aliasing import Alias, find_aliases
from rlhf_mc.reshard.buckets import Move, Pattern, Step, fill_buckets
from rlhf_mc.reshard.layout import Box, Layout, Shard
from rlhf_mc.reshard.transfers import RankPlan, Transfer, join_strided

MIN_SLICE_BYTES = 1 << 16
"""Blocks are not cut into smaller slices than this to even out the senders."""


@dataclass(frozen=True)
class Plan:
    """The whole movement. Byte counts are per rank."""

    itemsize: int
    aliases: tuple[Mapping[str, Alias], ...]
    """[rank] by local name of the target."""
    patterns: tuple[Pattern, ...]
    buckets: tuple[tuple[Step, ...], ...]
    shared_bytes: tuple[int, ...]
    copied_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    received_from_other_nodes: tuple[int, ...]
    """Bytes; a part of received_bytes."""

    @property
    def sender_imbalance(self) -> float:
        """Bytes of the rank that sends most over the mean of all ranks; 1 where nothing is sent."""
        total = sum(self.sent_bytes)
        return max(self.sent_bytes) * len(self.sent_bytes) / total if total else 1.0

    def for_rank(self, rank: int) -> RankPlan:
        """What one rank does."""
        copies: list[Transfer] = []
        for pattern in self.patterns:
            mine = [m for m in pattern.copies if m.dst_rank == rank]
            for tensor in range(len(pattern.dst_locals) if mine else 0):
                copies += join_strided(pattern.transfer(m, tensor) for m in mine)
        moves = [[m for m in p.moves if rank in (m.src_rank, m.dst_rank)] for p in self.patterns]
        buckets = []
        for bucket in self.buckets:
            found: list[Transfer] = []
            for step in bucket:
                cuts = [cut for move in moves[step.pattern] if (cut := move.part(step.number, step.parts))]
                found += join_strided(self.patterns[step.pattern].transfer(cut, step.tensor) for cut in cuts)
            sends = tuple(t for t in found if t.src_rank == rank)
            buckets.append((sends, tuple(t for t in found if t.dst_rank == rank)))
        return RankPlan(rank, self.itemsize, tuple(self.aliases[rank].values()), tuple(copies), tuple(buckets))


def make_plan(
    source: Sequence[Layout],
    target: Sequence[Layout],
    itemsize: int,
    bucket_bytes: int,
    ranks_per_node: int = 8,
    share: bool = False,
) -> Plan:
    """The plan that fills every rank's target layout from the source layouts; one layout per rank on both sides.

    Ranks that share a Layout object are planned together. A source rank may hold any blocks, but two blocks
    of one tensor, on any ranks, are either equal or disjoint. In a bucket no rank sends or receives more than
    `bucket_bytes`, unless one row of every block is more. With `share`, target tensors that the rank's source holds
    as they are take no part: the executor's caller lets one memory serve both. The result depends on the arguments
    alone, so every rank can compute it. UserError if the source lacks something that the target has.
    """
    assert len(source) == len(target), "one source and one target layout per rank"
    shared, target = _share(source, target, itemsize) if share else ([{}] * len(source), target)
    src, dst = _Side(source), _Side(target)
    alike: dict[tuple, list[str]] = defaultdict(list)
    for tensor in dst.held:
        alike[_placement(src.held.get(tensor, ())), _placement(dst.held[tensor])].append(tensor)
    patterns: list[Pattern] = []
    queue: list[tuple[int, int, int]] = []
    spread = _Spread(ranks_per_node, itemsize)
    for tensors in alike.values():
        for pattern in _make_patterns(tensors, src, dst, spread):
            if pattern.moves:
                queue += [(src.position[name], len(patterns), k) for k, name in enumerate(tensors)]
            patterns.append(pattern)
    buckets = fill_buckets(patterns, queue, max(1, bucket_bytes // itemsize))
    copied, sent, received, crossing = ([0] * len(source) for _ in range(4))
    for pattern in patterns:
        times = itemsize * len(pattern.dst_locals)
        for move in pattern.copies:
            copied[move.src_rank] += times * math.prod(move.extent)
        for move in pattern.moves:
            size = times * math.prod(move.extent)
            sent[move.src_rank] += size
            received[move.dst_rank] += size
            if move.src_rank // ranks_per_node != move.dst_rank // ranks_per_node:
                crossing[move.dst_rank] += size
    return Plan(
        itemsize,
        tuple(shared),
        tuple(patterns),
        buckets,
        tuple(itemsize * sum(s.numel for s in found.values()) for found in shared),
        tuple(copied),
        tuple(sent),
        tuple(received),
        tuple(crossing),
    )


def _share(
    source: Sequence[Layout], target: Sequence[Layout], itemsize: int
) -> tuple[list[dict[str, Alias]], list[Layout]]:
    """(what each rank shares, its target layout without that). Ranks of equal layouts share one object still."""
    known: dict[tuple[int, int], tuple[dict[str, Alias], Layout]] = {}
    rests: dict[tuple[int, frozenset[str]], Layout] = {}
    for have, want in zip(source, target, strict=True):
        if (id(have), id(want)) not in known:
            found = find_aliases(have, want, itemsize)
            names = id(want), frozenset(found)
            if names not in rests:
                rests[names] = Layout(want.stacked_shapes, tuple(p for p in want.stacked if p.local not in found))
            known[id(have), id(want)] = found, rests[names]
    both = [known[id(have), id(want)] for have, want in zip(source, target, strict=True)]
    return [found for found, _ in both], [rest for _, rest in both]


class _Side:
    """One side's layouts, indexed by tensor; equal (identical) layouts of several ranks appear once."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        ranks_of: dict[int, list[int]] = defaultdict(list)
        for rank, layout in enumerate(layouts):
            ranks_of[id(layout)].append(rank)
        self.ranks = list(ranks_of.values())
        """Ranks of each distinct layout."""
        self.held: dict[str, list[tuple[int, Shard]]] = defaultdict(list)
        """Tensor -> (number of the distinct layout, shard)."""
        self.position: dict[str, int] = {}
        """Tensor -> how early it comes in a layout."""
        for number, ranks in enumerate(self.ranks):
            for position, shard in enumerate(layouts[ranks[0]].stacked):
                self.held[shard.tensor].append((number, shard))
                if position <= self.position.get(shard.tensor, position):
                    self.position[shard.tensor] = position


def _placement(held: Iterable[tuple[int, Shard]]) -> tuple:
    return tuple((number, shard.box, shard.offset) for number, shard in held)


class _Spread:
    """Chooses senders: nearest first, then in turn."""

    def __init__(self, ranks_per_node: int, itemsize: int) -> None:
        self.ranks_per_node = ranks_per_node
        self.itemsize = itemsize
        self.turn: dict[tuple[int, ...], int] = defaultdict(int)

    def nearest(
        self, holders: Iterable[int], receivers: Iterable[tuple[int, int]]
    ) -> dict[tuple[int, ...], list[list[tuple[int, int]]]]:
        """The receivers (rank, ...) by the ranks that may send to them, in teams that take a block together: those of a
        node on which nobody holds it; where somebody does, each receiver for itself."""
        everywhere = tuple(holders)
        on_node: dict[int, list[int]] = defaultdict(list)
        for rank in everywhere:
            on_node[rank // self.ranks_per_node].append(rank)
        served: dict[tuple[int, ...], list[list[tuple[int, int]]]] = defaultdict(list)
        far: dict[int, list[tuple[int, int]]] = {}
        for receiver in receivers:
            node = receiver[0] // self.ranks_per_node
            if node in on_node:
                served[tuple(on_node[node])].append([receiver])
            elif node in far:
                far[node].append(receiver)
            else:
                far[node] = [receiver]
                served[everywhere].append(far[node])
        return served

    def cuts(self, block: Box, num_senders: int, num_receivers: int, team: int) -> list[Box]:
        """Return ranges of the block. Where it is large enough, every sender sends as many, and every receiver of a
        team receives as many."""
        size = _volume(block) * self.itemsize
        parts = team * (num_senders // math.gcd(num_senders, num_receivers))
        parts = max(1, min(parts, size // MIN_SLICE_BYTES))
        # Of stacked experts whole experts are assigned where that is even, else ranges of rows of all of them.
        axis = 1 if len(block) == 3 and (block[0][1] - block[0][0]) % parts else 0
        before, (start, end), rest = block[:axis], block[axis], block[axis + 1 :]
        parts = min(parts, end - start)
        bounds = [start + (end - start) * n // parts for n in range(parts + 1)]
        return [(*before, (bounds[n], bounds[n + 1]), *rest) for n in range(parts)]

    def next_sender(self, senders: tuple[int, ...]) -> int:
        self.turn[senders] += 1
        return senders[(self.turn[senders] - 1) % len(senders)]


class _Cut:
    """A block and where it begins in the shards that hold it, which are numbered."""

    def __init__(self, block: Box, sources: Sequence[tuple[int, Shard]], targets: Sequence[tuple[int, Shard]]) -> None:
        self.extent = tuple(end - start for start, end in block)
        self.begin = functools.cache(lambda number: sources[number][1].offset_of(block))
        self.end = functools.cache(lambda number: targets[number][1].offset_of(block))

    def move(self, sender: tuple[int, int], receiver: tuple[int, int]) -> Move:
        """Return the move from a source's shard (rank, number) to a target's."""
        (src_rank, src), (dst_rank, dst) = sender, receiver
        return Move(src_rank, dst_rank, src, self.begin(src), dst, self.end(dst), self.extent)

    def relay(self, sender: tuple[int, int], receiver: tuple[int, int]) -> Move:
        """Return the move from a target's shard to another's."""
        (src_rank, src), (dst_rank, dst) = sender, receiver
        return Move(src_rank, dst_rank, src, self.end(src), dst, self.end(dst), self.extent)


def _make_patterns(tensors: list[str], src: _Side, dst: _Side, spread: _Spread) -> tuple[Pattern, Pattern]:
    """Works out the moves of the first tensor, from its sources and those that relay; the others make the same."""
    sources, targets = src.held.get(tensors[0], []), dst.held[tensors[0]]
    holders: dict[Box, dict[int, int]] = defaultdict(dict)  # block -> rank -> number of its shard
    for number, (layout, shard) in enumerate(sources):
        holders[shard.box].update(dict.fromkeys(src.ranks[layout], number))
    copies: list[Move] = []
    moves: list[Move] = []
    relays: list[Move] = []
    for (box, block), wanted in _needs(tensors[0], holders, targets, dst.ranks).items():
        have = holders[box]
        whole = _Cut(block, sources, targets)
        copies += [whole.move((rank, have[rank]), (rank, shard)) for rank, shard in wanted if rank in have]
        missing = [(rank, shard) for rank, shard in wanted if rank not in have]
        for senders, teams in spread.nearest(have, missing).items():
            served = sum(map(len, teams))
            cuts: dict[int, list[_Cut]] = {}
            for team in teams:
                if len(team) not in cuts:
                    boxes = spread.cuts(block, len(senders), served, len(team))
                    cuts[len(team)] = [_Cut(cut, sources, targets) for cut in boxes]
                for number, cut in enumerate(cuts[len(team)]):
                    first, sender = team[number % len(team)], spread.next_sender(senders)
                    moves.append(cut.move((sender, have[sender]), first))
                    relays += [cut.relay(first, other) for other in team if other != first]
    targeted = _locals(tensors, dst)
    return Pattern(_locals(tensors, src), targeted, copies, moves), Pattern(targeted, targeted, [], relays, True)


def _needs(
    tensor: str, holders: Mapping[Box, object], targets: Sequence[tuple[int, Shard]], dst_ranks: list[list[int]]
) -> dict[tuple[Box, Box], list[tuple[int, int]]]:
    """(block of the source, its part that is wanted) -> (rank, number of its shard) of all who want it."""
    needs: dict[tuple[Box, Box], list[tuple[int, int]]] = defaultdict(list)
    blocks_of: dict[Box, list[tuple[Box, Box]]] = {}
    for number, (layout, shard) in enumerate(targets):
        if shard.box not in blocks_of:
            blocks_of[shard.box] = [(box, block) for box in holders if (block := _intersection(box, shard.box))]
        for found in blocks_of[shard.box]:
            needs[found] += [(rank, number) for rank in dst_ranks[layout]]
        covered = sum(_volume(block) for _, block in blocks_of[shard.box])
        assert covered <= _volume(shard.box), f"{tensor}: blocks of the source overlap"
        if covered < _volume(shard.box):
            raise UserError(
                f"{tensor}: rank {dst_ranks[layout][0]} needs {_show(shard.box)} of it for {shard.local}, "
                f"and the source has {', '.join(map(_show, holders)) or 'nothing of it'}"
            )
    return needs


def _locals(tensors: list[str], side: _Side) -> list[tuple[str, ...]]:
    return [tuple(shard.local for _, shard in side.held.get(name, ())) for name in tensors]


def _intersection(a: Box, b: Box) -> Box | None:
    assert len(a) == len(b)
    both = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return both if all(start < end for start, end in both) else None


def _volume(box: Box) -> int:
    return math.prod(end - start for start, end in box)


def _show(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{end}" for start, end in box) + "]"
