"""The planner: blocks and the ranks that they move between, given the layouts of both sides. Plain
data, no torch.

A block that the receiving rank already holds is copied there, never sent. Any other block comes
from the nearest ranks that hold it (of the same node, else of all nodes), and all of them send
equally many bytes. A block that several ranks of a node need and none of them holds is sent to the
node once: each of these ranks receives a part and forwards it to the others. Tensors with the same
placement on both sides, such as the layers of a pipeline stage, form a pattern. The moves of a
pattern are planned once, so planning time hardly grows with the number of layers. execute.py
carries a plan out.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard.aliasing import Alias, find_aliases
from rlhf_mc.reshard.buckets import BucketPart, Move, Pattern, fill_buckets
from rlhf_mc.reshard.layout import Box, Layout, Shard, Stack, box_text, intersection, volume
from rlhf_mc.reshard.placement import split_layouts
from rlhf_mc.reshard.transfers import RankPlan, Transfer, join_strided
from rlhf_mc.runtime.garbage_collector import without_garbage_collector

MIN_SLICE_BYTES = 1 << 16
"""Minimum size of the slices that a block is split into to balance the senders."""


@dataclass(frozen=True)
class Plan:
    """The plan of all ranks. Byte counts are per rank."""

    itemsize: int
    aliases: tuple[Mapping[str, Alias], ...]
    """[rank] local name of the target tensor -> its alias."""
    patterns: tuple[Pattern, ...]
    buckets: tuple[tuple[BucketPart, ...], ...]
    shared_bytes: tuple[int, ...]
    copied_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    received_from_other_nodes: tuple[int, ...]
    """Bytes; included in received_bytes."""
    source_ranks: tuple[int, ...]
    """Ranks that hold a block of the source. Others may forward blocks."""

    @property
    def sender_imbalance(self) -> float:
        """Maximum over mean of the bytes that the source's ranks send; 1 if they send nothing."""
        sent = [self.sent_bytes[rank] for rank in self.source_ranks]
        return max(sent) * len(sent) / sum(sent) if any(sent) else 1.0

    def bucket_maxima(self) -> list[tuple[int, int]]:
        """Return for each bucket the bytes that a rank sends or receives at most within its node,
        and to or from other nodes."""
        maxima = []
        for bucket in self.buckets:
            loads = sum(
                self.patterns[part.pattern].loads(part.number, part.parts) for part in bucket
            )
            both, outside = loads.reshape(2, -1) * self.itemsize  # type: ignore[union-attr]
            maxima.append((int((both - outside).max()), int(outside.max())))
        return maxima

    @without_garbage_collector()  # a plan has no cycles
    def for_rank(self, rank: int) -> RankPlan:
        """Return one rank's part."""
        copies: list[Transfer] = []
        for pattern in self.patterns:
            local = [m for m in pattern.copies if m.dst_rank == rank]
            for tensor in range(len(pattern.dst) if local else 0):
                copies += join_strided(t for m in local if (t := pattern.transfer(m, tensor)))
        moves = [[m for m in p.moves if rank in (m.src_rank, m.dst_rank)] for p in self.patterns]
        buckets = []
        for bucket in self.buckets:
            transfers: list[Transfer] = []
            for part in bucket:
                pattern = self.patterns[part.pattern]
                blocks = (
                    pattern.transfer(m, part.tensor, part.number, part.parts)
                    for m in moves[part.pattern]
                )
                transfers += join_strided(t for t in blocks if t)
            sends = tuple(t for t in transfers if t.src_rank == rank)
            buckets.append((sends, tuple(t for t in transfers if t.dst_rank == rank)))
        return RankPlan(
            rank, self.itemsize, tuple(self.aliases[rank].values()), tuple(copies), tuple(buckets)
        )


@without_garbage_collector()  # a plan has no cycles
def make_plan(
    source: Sequence[Layout],
    target: Sequence[Layout],
    itemsize: int,
    bucket_bytes: int,
    ranks_per_node: int = 8,
    share: bool = False,
) -> Plan:
    """Return the plan that fills all target layouts from the source layouts. Each side has one
    layout per rank.

    Ranks that share a Layout object are planned together. A source rank may hold any blocks, but
    any two blocks of a tensor are either equal or disjoint. In a bucket no rank sends or receives
    more than `bucket_bytes`, unless one row of every block is more. With `share`, target tensors
    that can be views of the rank's source tensors are aliases and do not move. The result depends
    on the arguments only, so every rank computes the same plan. Raise UserError if the source lacks
    a block that the target needs.
    """
    import numpy as np  # not for the planner's command line alone

    assert len(source) == len(target), "one source and one target layout per rank"
    aliases, target = _alias(source, target, itemsize) if share else ([{}] * len(source), target)
    src = _Side(source)
    dst = _Side(target)
    same_placement: dict[tuple, list[str]] = defaultdict(list)
    for tensor, shards in dst.shards.items():
        same_placement[_placement(src.shards.get(tensor, ())), _placement(shards)].append(tensor)
    patterns: list[Pattern] = []
    queue: list[tuple[int, int, int]] = []
    balancer = _SenderBalancer(ranks_per_node, itemsize)
    for tensors in same_placement.values():
        for pattern in _make_patterns(tensors, src, dst, balancer):
            if pattern.moves:
                queue += [(src.position[name], len(patterns), k) for k, name in enumerate(tensors)]
            patterns.append(pattern)
    buckets = fill_buckets(patterns, queue, max(1, bucket_bytes // itemsize))
    copied = [0] * len(source)
    totals = np.zeros(4 * len(source), np.int64)
    for pattern in patterns:
        times = itemsize * len(pattern.dst)
        for move in pattern.copies:
            copied[move.src_rank] += times * volume(move.block)
        if pattern.moves:
            totals += times * pattern.loads(0, (1, 1))
    sent, received, _, from_other_nodes = (tuple(part.tolist()) for part in np.split(totals, 4))
    return Plan(
        itemsize,
        tuple(aliases),
        tuple(patterns),
        buckets,
        tuple(
            itemsize * sum(alias.numel for alias in rank_aliases.values())
            for rank_aliases in aliases
        ),
        tuple(copied),
        sent,
        received,
        from_other_nodes,
        tuple(rank for rank, layout in enumerate(source) if layout.stacked),
    )


def make_plans(
    source: Sequence[Layout],
    target: Sequence[Layout],
    biases: Collection[str],
    itemsize: int,
    bucket_bytes: int,
    ranks_per_node: int = 8,
    share: bool = False,
) -> list[Plan]:
    """Return the plans of the weight update: of the model, whose elements have `itemsize` bytes,
    and, if there are any, of its correction biases (logical tensors), which are float32. Other
    arguments as of make_plan."""
    if not biases:
        return [make_plan(source, target, itemsize, bucket_bytes, ranks_per_node, share)]
    source, source_biases = split_layouts(source, biases)
    target, target_biases = split_layouts(target, biases)
    return [
        make_plan(source, target, itemsize, bucket_bytes, ranks_per_node, share),
        make_plan(source_biases, target_biases, 4, bucket_bytes, ranks_per_node),
    ]


def _alias(
    source: Sequence[Layout], target: Sequence[Layout], itemsize: int
) -> tuple[list[dict[str, Alias]], list[Layout]]:
    """Return (aliases of each rank, its target layout without them). Ranks that share a Layout
    share the result."""
    known: dict[tuple[int, int], tuple[dict[str, Alias], Layout]] = {}
    rests: dict[tuple[int, frozenset[str]], Layout] = {}
    for have, want in zip(source, target, strict=True):
        if (id(have), id(want)) not in known:
            aliases = find_aliases(have, want, itemsize)
            names = id(want), frozenset(aliases)
            if names not in rests:
                rests[names] = Layout(
                    want.stacked_shapes, tuple(p for p in want.stacked if p.local not in aliases)
                )
            known[id(have), id(want)] = aliases, rests[names]
    both = [known[id(have), id(want)] for have, want in zip(source, target, strict=True)]
    return [aliases for aliases, _ in both], [rest for _, rest in both]


class _Side:
    """The shards of one side, by tensor. A Layout object or a Shard object that several ranks share
    appears once."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        ranks: dict[int, list[int]] = defaultdict(list)
        for rank, layout in enumerate(layouts):
            ranks[id(layout)].append(rank)
        self.world = len(layouts)
        self.position: dict[str, int] = {}
        """Tensor -> its smallest index in a layout."""
        # with the first rank of each layout that has the shard
        shards: dict[int, tuple[Shard, list[int]]] = {}
        for first, *_ in ranks.values():
            for position, shard in enumerate(layouts[first].stacked):
                if known := shards.get(id(shard)):
                    known[1].append(first)
                    continue
                shards[id(shard)] = shard, [first]
                self.position[shard.tensor] = min(
                    position, self.position.get(shard.tensor, position)
                )
        groups: dict[tuple[int, ...], int] = {}
        self.ranks: list[list[int]] = []
        """Ranks of each group, which have a shard in common."""
        self.shards: dict[str, list[tuple[int, Shard]]] = defaultdict(list)
        """Tensor -> (number of the group, shard)."""
        for shard, firsts in shards.values():
            number = groups.setdefault(tuple(firsts), len(groups))
            if number == len(self.ranks):
                self.ranks.append([rank for first in firsts for rank in ranks[id(layouts[first])]])
            self.shards[shard.tensor].append((number, shard))


def _placement(shards: Iterable[tuple[int, Shard]]) -> tuple:
    return tuple((number, shard.box) for number, shard in shards)


class _SenderBalancer:
    """Chooses senders: the nearest ranks, round-robin."""

    def __init__(self, ranks_per_node: int, itemsize: int) -> None:
        self.ranks_per_node = ranks_per_node
        self.itemsize = itemsize
        self.turns: dict[tuple[int, ...], Iterator[int]] = {}

    def nearest(
        self, holders: Iterable[int], receivers: Iterable[tuple[int, int]]
    ) -> dict[tuple[int, ...], list[list[tuple[int, int]]]]:
        """Return possible senders -> groups of receivers (rank, shard); each group receives the
        block once. The receivers of a node without a holder form one group; every other receiver is
        a group of its own."""
        everywhere = tuple(holders)
        on_node: dict[int, list[int]] = defaultdict(list)
        for rank in everywhere:
            on_node[rank // self.ranks_per_node].append(rank)
        groups: dict[tuple[int, ...], list[list[tuple[int, int]]]] = defaultdict(list)
        new_groups: dict[int, list[tuple[int, int]]] = {}
        for receiver in receivers:
            node = receiver[0] // self.ranks_per_node
            if node in on_node:
                groups[tuple(on_node[node])].append([receiver])
            elif node in new_groups:
                new_groups[node].append(receiver)
            else:
                new_groups[node] = [receiver]
                groups[everywhere].append(new_groups[node])
        return groups

    def split(
        self, shard: Shard, block: Box, num_senders: int, num_receivers: int, group_size: int
    ) -> list[Box]:
        """Return slices of a block of the shard. If it is large enough, all senders send equally
        many slices, and all receivers of a group receive equally many."""
        size = volume(block) * self.itemsize
        parts = group_size * (num_senders // math.gcd(num_senders, num_receivers))
        parts = max(1, min(parts, size // MIN_SLICE_BYTES))
        # Stacked experts are split between experts if that is even, else along the rows of all
        # experts.
        axis = 1 if isinstance(shard.tensor, Stack) and (block[0][1] - block[0][0]) % parts else 0
        start, end = block[axis]
        parts = min(parts, end - start)
        bounds = [start + (end - start) * n // parts for n in range(parts + 1)]
        return [(*block[:axis], bound, *block[axis + 1 :]) for bound in itertools.pairwise(bounds)]

    def turn(self, senders: tuple[int, ...]) -> Iterator[int]:
        """Return the senders, round-robin, from the next one."""
        return self.turns.setdefault(senders, itertools.cycle(senders))


def _make_patterns(
    tensors: list[str], src: _Side, dst: _Side, balancer: _SenderBalancer
) -> tuple[Pattern, Pattern]:
    """Plan the first tensor, whose moves all the tensors share. Return the moves from sources, and
    the forwarding moves."""
    sources = src.shards.get(tensors[0], [])
    targets = dst.shards[tensors[0]]
    holders: dict[Box, dict[int, int]] = defaultdict(dict)  # block -> rank -> index of its shard
    for number, (layout, shard) in enumerate(sources):
        holders[shard.box].update(dict.fromkeys(src.ranks[layout], number))
    copies: list[Move] = []
    moves: list[Move] = []
    forwards: list[Move] = []
    for (box, block), wanted in _needs(tensors[0], holders, targets, dst.ranks).items():
        have = holders[box]
        copies += [
            Move(rank, have[rank], rank, shard, block) for rank, shard in wanted if rank in have
        ]
        missing = [(rank, shard) for rank, shard in wanted if rank not in have]
        for senders, groups in balancer.nearest(have, missing).items():
            turn = balancer.turn(senders)
            num_receivers = sum(map(len, groups))
            slices: dict[int, list[Box]] = {}
            for group in groups:
                if len(group) not in slices:
                    slices[len(group)] = balancer.split(
                        targets[0][1], block, len(senders), num_receivers, len(group)
                    )
                for number, part in enumerate(slices[len(group)]):
                    first = group[number % len(group)]
                    sender = next(turn)
                    moves.append(Move(sender, have[sender], *first, part))
                    if len(group) > 1:
                        forwards += [
                            Move(*first, *other, part) for other in group if other != first
                        ]
    at_dst = _shards(tensors, dst)
    ranks = dst.world, balancer.ranks_per_node
    from_sources = Pattern(*ranks, _shards(tensors, src), at_dst, copies, moves)
    return from_sources, Pattern(*ranks, at_dst, at_dst, [], forwards, forwarded=True)


def _needs(
    tensor: str,
    holders: Mapping[Box, object],
    targets: Sequence[tuple[int, Shard]],
    dst_ranks: list[list[int]],
) -> dict[tuple[Box, Box], list[tuple[int, int]]]:
    """Return (block of the source, its part that a target needs) -> (rank, index of its shard) of
    every rank that needs the part. Raise UserError if the source lacks a part."""
    needs: dict[tuple[Box, Box], list[tuple[int, int]]] = defaultdict(list)
    blocks: dict[Box, list[tuple[Box, Box]]] = {}
    for number, (layout, shard) in enumerate(targets):
        if shard.box not in blocks:
            blocks[shard.box] = [
                (box, block) for box in holders if (block := intersection(box, shard.box))
            ]
        for source_and_part in blocks[shard.box]:
            needs[source_and_part] += [(rank, number) for rank in dst_ranks[layout]]
        covered = sum(volume(block) for _, block in blocks[shard.box])
        assert covered <= volume(shard.box), f"{tensor}: blocks of the source overlap"
        if covered < volume(shard.box):
            raise UserError(
                f"{tensor}: rank {dst_ranks[layout][0]} needs {box_text(shard.box)} of it for "
                f"{shard.local}, and the source has "
                f"{', '.join(map(box_text, holders)) or 'nothing of it'}"
            )
    return needs


def _shards(tensors: list[str], side: _Side) -> list[tuple[Shard, ...]]:
    return [tuple(shard for _, shard in side.shards.get(name, ())) for name in tensors]
