"""Rollout groups where topology.mesh.rollout_groups has none of its own, or takes ranks of more
nodes than needed: for the fewest nodes, then for the fewest bytes in a weight update. Plain
arithmetic on layouts.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.reshard.layout import Box, Layout, RankLayout, intersection, mcore_layout, volume
from rlhf_mc.topology.mesh import Mesh, rollout_groups

LARGEST_BLOCK = 64
"""Maximum number of ranks in one assignment problem; the time grows with its third power."""

_Shared = tuple[int, ...]
"""[rollout TP rank] the number of elements of its rollout shard that a rank's training shard has
too."""


def choose_rollout_groups(
    shape: ModelShape, mesh: Mesh, rollout_tp: int, layout: RankLayout, ranks_per_node: int = 8
) -> list[list[int]]:
    """Return the ranks of each rollout engine, in the order of their rollout TP ranks. layout: the
    engine's.

    The bytes that a rank receives depend only on its rollout TP rank. So in each block of
    consecutive ranks, rollout TP ranks are assigned such that the ranks hold as much as possible of
    their rollout shards. The block size with the fewest received bytes wins. The engines span no
    more nodes than engines of consecutive ranks. Among equals, engines with ascending ranks win.
    Training TP over several nodes, of which an engine needs one, is such a case too."""

    def nodes(groups: Iterable[Sequence[int]]) -> int:
        return sum(len({rank // ranks_per_node for rank in group}) for group in groups)

    usual = rollout_groups(mesh, rollout_tp)
    fewest = nodes(range(start, start + rollout_tp) for start in range(0, mesh.world, rollout_tp))
    divides = mesh.tp % rollout_tp == 0 or rollout_tp % mesh.tp == 0
    if divides and nodes(usual) <= fewest:
        return usual
    shared = _shared_by_rank(shape, mesh, rollout_tp, layout)

    def preference(groups: list[list[int]]) -> tuple[int, int]:
        """Return the number of elements that are not received, and the number of ascending
        groups."""
        kept = sum(shared[rank][tp_rank] for group in groups for tp_rank, rank in enumerate(group))
        return kept, sum(group == sorted(group) for group in groups)

    candidates = [usual] if nodes(usual) <= fewest else []
    for size, consecutive in itertools.product(
        _block_sizes(mesh, rollout_tp, ranks_per_node), (True, False)
    ):
        blocks = [
            (start, tuple(shared[start : start + size])) for start in range(0, mesh.world, size)
        ]
        groups = [
            [a + r for r in group]
            for a, block in blocks
            for group in _assign(block, rollout_tp, consecutive)
        ]
        if nodes(groups) <= fewest:
            candidates.append(groups)
    return max(candidates, key=preference, default=usual)


def _block_sizes(mesh: Mesh, rollout_tp: int, ranks_per_node: int) -> list[int]:
    """Return the block sizes to try, ascending: multiples of the rollout TP size that divide the
    world size."""
    sizes = {
        rollout_tp,
        math.lcm(rollout_tp, mesh.tp),
        ranks_per_node,
        math.lcm(rollout_tp, ranks_per_node),
        mesh.world,
    }
    return [
        n
        for n in sorted(sizes)
        if n <= LARGEST_BLOCK and n % rollout_tp == 0 and mesh.world % n == 0
    ]


def _shared_by_rank(
    shape: ModelShape, mesh: Mesh, rollout_tp: int, layout: RankLayout
) -> list[_Shared]:
    """Return `_Shared` of each rank. All layers of a kind are equal, and all experts are: one layer
    of each kind, with the experts of one expert-parallel rank, represents them."""
    one = shape.one_of_each_kind()
    rollout = [layout(one, tp_rank, rollout_tp) for tp_rank in range(rollout_tp)]

    @functools.cache
    def shared(tp: int, pp: int) -> _Shared:
        kinds = Counter(
            shape.layer_kinds[i]
            for layers in mesh.chunk_layers(shape.num_layers, pp)
            for i in layers
        )
        ends = mcore_layout(
            one, tp, mesh.tp, range(0), first=pp == 0, last=pp == mesh.pp - 1, ep_size=mesh.ep
        )
        parts = [(1, ends)]
        for i, kind in enumerate(one.layer_kinds):
            layer = mcore_layout(
                one, tp, mesh.tp, range(i, i + 1), first=False, last=False, ep_size=mesh.ep
            )
            parts.append((kinds[kind], layer))
        return tuple(sum(count * _common(part, want) for count, part in parts) for want in rollout)

    coordinates = (mesh.coordinate(rank) for rank in range(mesh.world))
    return [shared(at.tp, at.pp) for at in coordinates]


def _common(have: Layout, want: Layout) -> int:
    """Return the number of elements that both layouts hold."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    for shard in have.stacked:
        boxes[shard.tensor].append(shard.box)
    common = (intersection(box, shard.box) for shard in want.stacked for box in boxes[shard.tensor])
    return sum(volume(box) for box in common if box)


@functools.cache
def _assign(shared: tuple[_Shared, ...], rollout_tp: int, consecutive: bool) -> list[list[int]]:
    """Return the groups of a block's ranks, numbered from 0, that hold the most of their rollout
    shards.

    Among equals, rollout TP ranks are close to those in groups of consecutive ranks (or, if not
    `consecutive`, of ranks at a stride), because such groups are more often ascending."""
    ranks = range(len(shared))
    repeats = len(shared) // rollout_tp
    ideal = [rank % rollout_tp if consecutive else rank // repeats for rank in ranks]
    off_by = [[(tp_rank - ideal[rank]) ** 2 for tp_rank in range(rollout_tp)] for rank in ranks]
    weight = 1 + rollout_tp**2 * len(shared)  # above the maximum of the second criterion
    cost = [
        [
            off_by[r][tp_rank] - weight * shared[r][tp_rank]
            for tp_rank in range(rollout_tp)
            for _ in range(repeats)
        ]
        for r in ranks
    ]
    by_tp_rank: list[list[int]] = [[] for _ in range(rollout_tp)]
    for rank, column in enumerate(_assignment(cost)):
        by_tp_rank[column // repeats].append(rank)
    # The first rank of each TP rank, then the second, ...: if any groups of this assignment ascend,
    # these do.
    return [list(group) for group in zip(*by_tp_rank, strict=True)]


def _assignment(cost: Sequence[Sequence[int]]) -> list[int]:
    """Return distinct columns for the rows of a square matrix with the minimum sum of costs: the
    Hungarian method, by shortest augmenting paths."""
    size = len(cost)
    row_potential = [0] * size
    column_potential = [0] * (size + 1)
    rows = [-1] * (size + 1)  # by column; the last column is the row being added
    for row in range(size):
        rows[size] = row
        at = size
        used = [False] * (size + 1)
        least: list[float] = [math.inf] * size
        came_from = [size] * size
        while rows[at] >= 0:
            used[at] = True
            here = rows[at]
            for column in itertools.filterfalse(used.__getitem__, range(size)):
                reduced = cost[here][column] - row_potential[here] - column_potential[column]
                if reduced < least[column]:
                    least[column] = reduced
                    came_from[column] = at
            following = min(
                itertools.filterfalse(used.__getitem__, range(size)), key=least.__getitem__
            )
            step = int(least[following])
            for column in range(size + 1):
                if used[column]:
                    row_potential[rows[column]] += step
                    column_potential[column] -= step
                elif column < size:
                    least[column] -= step
            at = following
        while at != size:
            rows[at] = rows[came_from[at]]
            at = came_from[at]
    columns = [0] * size
    for column in range(size):
        columns[rows[column]] = column
    return columns
