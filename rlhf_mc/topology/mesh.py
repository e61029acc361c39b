"""Pure arithmetic of ranks: rank <-> (tensor, pipeline, data) coordinates, layers of a stage, rollout groups.

No process group and no torch here (see groups.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["tp", "ep", "expert_dp", "pp"]
"""Directions in a mesh. A replica of the dense layers is one place on "ep" (which shard of the experts it holds) and
"expert_dp" (which replica of that shard)."""


@dataclass(frozen=True)
class Coordinate:
    """Where a rank stands in the training mesh."""

    tp: int
    """Its shard of each layer."""
    dp: int
    """Its model replica."""
    pp: int
    """Its pipeline stage."""
    ep: int = 0
    """Its shard of the experts."""


@dataclass(frozen=True)
class Mesh:
    """world = tp x dp x pp ranks, tensor-parallel neighbours first, then data-parallel, then pipeline
    (Megatron-Core's order "tp-cp-ep-dp-pp")."""

    world: int
    tp: int
    pp: int
    ep: int = 1
    """Over how many neighbouring model replicas the experts of a mixture-of-experts model are spread."""
    first_stage_layers: int | None = None
    """Layers of the first stage, which holds the embedding too; None: as many as the stages between."""
    last_stage_layers: int | None = None
    """Layers of the last stage, which holds the output layer too; None: as many as the stages between."""
    vpp: int = 1
    """Runs of layers (model chunks) that each pipeline stage holds."""

    def __post_init__(self) -> None:
        assert self.world % (self.tp * self.pp) == 0, f"{self.tp} x {self.pp} does not divide {self.world}"
        assert self.dp % self.ep == 0, f"expert parallel {self.ep} does not divide {self.dp} replicas"

    @property
    def dp(self) -> int:
        """Number of model replicas."""
        return self.world // (self.tp * self.pp)

    def coordinate(self, rank: int) -> Coordinate:
        """Coordinates of a global rank."""
        assert 0 <= rank < self.world
        dp = rank // self.tp % self.dp
        return Coordinate(tp=rank % self.tp, dp=dp, pp=rank // (self.tp * self.dp), ep=dp % self.ep)

    def groups_along(self, *axes: Axis) -> list[list[int]]:
        """The ranks that differ along these axes alone: as many lists as there are places on the other axes."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            at = self.coordinate(rank)
            place: dict[Axis, int] = {"tp": at.tp, "ep": at.ep, "expert_dp": at.dp // self.ep, "pp": at.pp}
            elsewhere = tuple(value for axis, value in place.items() if axis not in axes)
            groups.setdefault(elsewhere, []).append(rank)
        return list(groups.values())

    def __str__(self) -> str:
        chunks = f" ({self.vpp} chunks)" if self.vpp > 1 else ""
        experts = f", experts over {self.ep} replicas" if self.ep > 1 else ""
        return f"TP {self.tp} x PP {self.pp}{chunks} x DP {self.dp}{experts}"

    def is_first_stage(self, rank: int) -> bool:
        """Whether the rank holds the embedding."""
        return self.coordinate(rank).pp == 0

    def is_last_stage(self, rank: int) -> bool:
        """Whether the rank holds the output layer."""
        return self.coordinate(rank).pp == self.pp - 1

    def chunk_layers(self, num_layers: int, pp: int) -> list[range]:
        """Global indices of the layers of each model chunk of pipeline stage pp: the first chunks of all stages follow
        one another, then the second chunks."""
        if self.vpp == 1:
            return [self.stage_layers(num_layers, pp)]
        assert self.stage_sizes(num_layers) is not None, f"{num_layers} layers, {self.pp} x {self.vpp} chunks"
        size = num_layers // (self.pp * self.vpp)
        starts = ((chunk * self.pp + pp) * size for chunk in range(self.vpp))
        return [range(start, start + size) for start in starts]

    def stage_layers(self, num_layers: int, pp: int) -> range:
        """Global indices of the layers of pipeline stage pp, where it is one chunk."""
        sizes = self.stage_sizes(num_layers)
        assert sizes is not None, f"{num_layers} layers cannot be spread over {self.pp} stages"
        start = sum(sizes[:pp])
        return range(start, start + sizes[pp])

    def stage_sizes(self, num_layers: int) -> list[int] | None:
        """Layers of each stage: those of the first and the last as set, the others even, and with several chunks a
        multiple of these; None if that cannot be."""
        first, last = self.first_stage_layers, self.last_stage_layers
        if self.vpp > 1:
            size = num_layers // self.pp
            return None if num_layers % (self.pp * self.vpp) else [size] * self.pp
        if self.pp == 1:
            return [num_layers] if first in (None, num_layers) and last in (None, num_layers) else None
        between = self.pp - (first is not None) - (last is not None)
        rest = num_layers - (first or 0) - (last or 0)
        if rest < between or (rest % between if between else rest):
            return None
        even = rest // between if between else 0
        sizes = [even] * self.pp
        sizes[0] = even if first is None else first
        sizes[-1] = even if last is None else last
        return sizes


def rollout_groups(mesh: Mesh, rollout_tp: int) -> list[list[int]]:
    """The ranks of each rollout engine, each list in the order of the engine's tensor-parallel rank.

    Where rollout_tp divides the training TP t, an engine takes ranks at stride t / rollout_tp inside one
    training TP group, so that each rank's training shard is part of its generation shard
    (HybridFlow, arXiv 2409.19256, section 5). Where t divides rollout_tp, an engine takes whole neighbouring TP
    groups, ordered by training shard first, so that each rank's generation shard is part of its training shard.
    Otherwise an engine takes consecutive ranks (neighbours on a node); reshard/grouping.py knows better ones.
    """
    assert mesh.world % rollout_tp == 0, f"rollout TP {rollout_tp} does not divide {mesh.world}"
    if mesh.tp % rollout_tp:
        starts = range(0, mesh.world, rollout_tp)
        shards = mesh.tp if rollout_tp % mesh.tp == 0 else 1
        return [[r for s in range(shards) for r in range(a + s, a + rollout_tp, shards)] for a in starts]
    stride = mesh.tp // rollout_tp
    return [
        [base + first + part * stride for part in range(rollout_tp)]
        for base in range(0, mesh.world, mesh.tp)
        for first in range(stride)
    ]
