"""Which ranks form an engine where neither tensor parallel size divides the other: chosen by the bytes that a weight
update then moves. Plain arithmetic on layouts; the rule for sizes that divide is topology.mesh.rollout_groups.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.reshard.layout import Box, Layout, mcore_layout, vllm_layout
from rlhf_mc.topology.mesh import Mesh, rollout_groups

LARGEST_BLOCK = 64
"""Ranks whose places are assigned at a time: the time grows with the third power of their number."""

_Held = tuple[int, ...]
"""Of one rank, by place in an engine: the elements of that place's shard that training has on the rank."""


def choose_rollout_groups(shape: ModelShape, mesh: Mesh, rollout_tp: int, ranks_per_node: int = 8) -> list[list[int]]:
    """Return the ranks of each rollout engine, each list in the order of the engine's tensor-parallel rank.

    The bytes that a rank receives depend on its place in its engine alone. So places are assigned to ranks, in blocks
    of consecutive ranks, such that the ranks of a block hold as much as possible of the shards that they need. Of
    several block sizes the one with the fewest received bytes is taken. Engines lie on no more nodes than those of
    consecutive ranks. With equal bytes, engines whose ranks ascend are preferred."""
    usual = rollout_groups(mesh, rollout_tp)
    if mesh.tp % rollout_tp == 0 or rollout_tp % mesh.tp == 0:
        return usual
    held = _held_by_rank(shape, mesh, rollout_tp)

    def worth(groups: list[list[int]]) -> tuple[int, int]:
        kept = sum(held[rank][place] for group in groups for place, rank in enumerate(group))
        return kept, sum(group == sorted(group) for group in groups)

    def nodes(groups: list[list[int]]) -> int:
        return sum(len({rank // ranks_per_node for rank in group}) for group in groups)

    candidates = [usual]
    for size, consecutive in itertools.product(_block_sizes(mesh, rollout_tp, ranks_per_node), (True, False)):
        blocks = [(start, tuple(held[start : start + size])) for start in range(0, mesh.world, size)]
        groups = [[a + r for r in group] for a, block in blocks for group in _deal(block, rollout_tp, consecutive)]
        if nodes(groups) <= nodes(usual):
            candidates.append(groups)
    return max(candidates, key=worth)


def _block_sizes(mesh: Mesh, rollout_tp: int, ranks_per_node: int) -> list[int]:
    """Return the sizes to try, ascending: each a multiple of the rollout's size and a divisor of the world."""
    sizes = {
        rollout_tp,
        math.lcm(rollout_tp, mesh.tp),
        ranks_per_node,
        math.lcm(rollout_tp, ranks_per_node),
        mesh.world,
    }
    return [n for n in sorted(sizes) if n <= LARGEST_BLOCK and n % rollout_tp == 0 and mesh.world % n == 0]


def _held_by_rank(shape: ModelShape, mesh: Mesh, rollout_tp: int) -> list[_Held]:
    """Return what each rank holds. All layers are alike, and so are all experts: one layer, on one shard of the
    experts, stands for them."""
    one = replace(shape, num_layers=1)
    rollout = [vllm_layout(one, place, rollout_tp) for place in range(rollout_tp)]

    @functools.cache
    def of(tp: int, pp: int) -> _Held:
        num_layers = sum(map(len, mesh.chunk_layers(shape.num_layers, pp)))
        layer = mcore_layout(one, tp, mesh.tp, range(1), first=False, last=False, ep_size=mesh.ep)
        ends = mcore_layout(one, tp, mesh.tp, range(0), first=pp == 0, last=pp == mesh.pp - 1, ep_size=mesh.ep)
        return tuple(num_layers * _common(layer, want) + _common(ends, want) for want in rollout)

    places = (mesh.coordinate(rank) for rank in range(mesh.world))
    return [of(at.tp, at.pp) for at in places]


def _common(have: Layout, want: Layout) -> int:
    """Return the number of elements that both layouts hold."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    for shard in have.stacked:
        boxes[shard.tensor].append(shard.box)
    return sum(_overlap(box, shard.box) for shard in want.stacked for box in boxes[shard.tensor])


def _overlap(a: Box, b: Box) -> int:
    sides = zip(a, b, strict=True)
    return math.prod(max(0, min(p[1], q[1]) - max(p[0], q[0])) for p, q in sides)


@functools.cache
def _deal(held: tuple[_Held, ...], rollout_tp: int, consecutive: bool) -> list[list[int]]:
    """Return the groups of a block's ranks, numbered from 0, with which they hold the most.

    Where that leaves a choice, ranks take the place that they would have in groups of consecutive ranks, or else of
    ranks at a stride, or one near to it: groups then rather ascend."""
    ranks, repeats = range(len(held)), len(held) // rollout_tp
    ideal = [rank % rollout_tp if consecutive else rank // repeats for rank in ranks]
    off_by = [[(place - ideal[rank]) ** 2 for place in range(rollout_tp)] for rank in ranks]
    weight = 1 + rollout_tp**2 * len(held)  # more than all that the second criterion can add up to
    cost = [
        [off_by[r][place] - weight * held[r][place] for place in range(rollout_tp) for _ in range(repeats)]
        for r in ranks
    ]
    of_place: list[list[int]] = [[] for _ in range(rollout_tp)]
    for rank, seat in enumerate(_assignment(cost)):
        of_place[seat // repeats].append(rank)
    # The first of each place, the second of each ...: if any groups ascend with these places, these do.
    return [list(group) for group in zip(*of_place, strict=True)]


def _assignment(cost: Sequence[Sequence[int]]) -> list[int]:
    """Return the column of each row of a square matrix, all different, with the least sum of costs: the Hungarian
    method, by shortest augmenting paths."""
    size = len(cost)
    row_potential, column_potential = [0] * size, [0] * (size + 1)
    row_of = [-1] * (size + 1)  # by column; the last column stands for the row that is being added
    for row in range(size):
        row_of[size] = row
        at, used = size, [False] * (size + 1)
        least: list[float] = [math.inf] * size
        came_from = [size] * size
        while row_of[at] >= 0:
            used[at] = True
            here = row_of[at]
            for column in itertools.filterfalse(used.__getitem__, range(size)):
                reduced = cost[here][column] - row_potential[here] - column_potential[column]
                if reduced < least[column]:
                    least[column], came_from[column] = reduced, at
            following = min(itertools.filterfalse(used.__getitem__, range(size)), key=least.__getitem__)
            step = int(least[following])
            for column in range(size + 1):
                if used[column]:
                    row_potential[row_of[column]] += step
                    column_potential[column] -= step
                elif column < size:
                    least[column] -= step
            at = following
        while at != size:
            row_of[at] = row_of[came_from[at]]
            at = came_from[at]
    columns = [0] * size
    for column in range(size):
        columns[row_of[column]] = column
    return columns
