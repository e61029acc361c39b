"""Pure arithmetic of ranks: rank <-> (tensor, pipeline, data) coordinates, layers of a stage, rollout groups.

No process group and no torch here (see groups.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coordinate:
    """Where a rank stands in the training mesh."""

    tp: int
    """Its shard of each layer."""
    dp: int
    """Its model replica."""
    pp: int
    """Its pipeline stage."""


@dataclass(frozen=True)
class Mesh:
    """world = tp x dp x pp ranks, tensor-parallel neighbours first, then data-parallel, then pipeline
    (Megatron-Core's order "tp-cp-ep-dp-pp")."""

    world: int
    tp: int
    pp: int

    def __post_init__(self) -> None:
        assert self.world % (self.tp * self.pp) == 0, f"{self.tp} x {self.pp} does not divide {self.world}"

    @property
    def dp(self) -> int:
        """Number of model replicas."""
        return self.world // (self.tp * self.pp)

    def coordinate(self, rank: int) -> Coordinate:
        """Coordinates of a global rank."""
        assert 0 <= rank < self.world
        return Coordinate(tp=rank % self.tp, dp=rank // self.tp % self.dp, pp=rank // (self.tp * self.dp))

    def is_first_stage(self, rank: int) -> bool:
        """Whether the rank holds the embedding."""
        return self.coordinate(rank).pp == 0

    def is_last_stage(self, rank: int) -> bool:
        """Whether the rank holds the output layer."""
        return self.coordinate(rank).pp == self.pp - 1

    def stage_layers(self, num_layers: int, pp: int) -> range:
        """Global indices of the layers of pipeline stage pp; every stage has the same number."""
        assert num_layers % self.pp == 0
        per_stage = num_layers // self.pp
        return range(pp * per_stage, (pp + 1) * per_stage)


def rollout_groups(mesh: Mesh, rollout_tp: int) -> list[list[int]]:
    """The ranks of each rollout engine, each list in the order of the engine's tensor-parallel rank.

    Where rollout_tp divides the training TP t, an engine takes ranks at stride t / rollout_tp inside one
    training TP group, so that each rank's training shard is part of its generation shard
    (HybridFlow, arXiv 2409.19256, section 5). Otherwise an engine takes consecutive ranks (neighbours on a node).
    """
    assert mesh.world % rollout_tp == 0, f"rollout TP {rollout_tp} does not divide {mesh.world}"
    if mesh.tp % rollout_tp:
        return [list(range(start, start + rollout_tp)) for start in range(0, mesh.world, rollout_tp)]
    stride = mesh.tp // rollout_tp
    return [
        [base + first + part * stride for part in range(rollout_tp)]
        for base in range(0, mesh.world, mesh.tp)
        for first in range(stride)
    ]
