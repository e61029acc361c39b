"""Arithmetic of ranks: coordinates in the mesh, layers of a pipeline stage, rollout groups. No
torch here; process groups are in groups.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf_mc.config.model_schema import MegatronConfig, fsdp_config
from rlhf_mc.config.roles import role_ranks
from rlhf_mc.config.schema import Config, layouts

Axis = Literal["tp", "cp", "dp", "ep", "expert_dp", "pp"]
"""Axes of a mesh. The replicas of the weights are split twice: for the tokens into "cp" and "dp",
for the experts into "ep", the shard of the experts, and "expert_dp", the replica of that shard."""


@dataclass(frozen=True)
class Coordinate:
    """Coordinates of a rank in the training mesh."""

    tp: int
    """Tensor-parallel rank: the shard of each layer."""
    dp: int
    """Data-parallel rank: the sequences."""
    pp: int
    """Pipeline stage."""
    ep: int = 0
    """Expert-parallel rank: the shard of the experts."""
    cp: int = 0
    """Context-parallel rank: the part of each sequence."""


@dataclass(frozen=True)
class Mesh:
    """world = tp x cp x dp x pp ranks. The tensor-parallel rank varies fastest, then the
    context-parallel rank, the data-parallel rank and the pipeline stage (Megatron-Core's order
    "tp-cp-ep-dp-pp")."""

    world: int
    tp: int
    pp: int
    ep: int = 1
    """Number of neighbouring replicas over which the experts of a mixture-of-experts model are
    sharded."""
    first_stage_layers: int | None = None
    """Layers of the first stage, which also holds the embedding; None: as in the middle stages."""
    last_stage_layers: int | None = None
    """Layers of the last stage, which also holds the output layer; None: as in the middle
    stages."""
    vpp: int = 1
    """Virtual pipeline chunks per stage."""
    cp: int = 1
    """Number of neighbouring replicas that share each sequence."""
    dynamic_cp: bool = False
    """Each micro-batch has its own context-parallel size, a power of two up to cp."""
    shards: int = 1
    """Number of neighbouring replicas over which each parameter is sharded by rows (FSDP2)."""
    first: int = 0
    """The first of its ranks, which follow one another: 0, or the first one of a rollout pool."""

    def __post_init__(self) -> None:
        sizes = f"{self.tp} x {self.cp} x {self.pp}"
        assert self.world % (self.tp * self.cp * self.pp) == 0, (
            f"{sizes} does not divide {self.world}"
        )
        assert self.replicas % self.ep == 0, (
            f"expert parallel {self.ep} does not divide {self.replicas} replicas"
        )
        assert self.replicas % self.shards == 0, f"{self.shards} shards, {self.replicas} replicas"

    @property
    def ranks(self) -> range:
        """The global ranks, in order."""
        return range(self.first, self.first + self.world)

    @property
    def replicas(self) -> int:
        """Number of replicas of the weights: context-parallel ranks of all data-parallel ranks."""
        return self.world // (self.tp * self.pp)

    @property
    def dp(self) -> int:
        """Number of ranks, or groups of context-parallel ranks, among which the sequences are
        divided."""
        return self.replicas // self.cp

    @property
    def context_sizes(self) -> tuple[int, ...]:
        """The numbers of replicas that may share a micro-batch."""
        return (
            tuple(1 << power for power in range(self.cp.bit_length()))
            if self.dynamic_cp
            else (self.cp,)
        )

    def context_blocks(self, size: int) -> list[list[int]]:
        """Return the lists of `size` ranks that may share a micro-batch: aligned parts of the
        context-parallel ranks."""
        return [
            ranks[start : start + size]
            for ranks in self.groups_along("cp")
            for start in range(0, self.cp, size)
        ]

    @property
    def axes(self) -> tuple[tuple[Axis, int], ...]:
        """Name and size of each axis of the tokens, fastest-varying first."""
        return (("tp", self.tp), ("cp", self.cp), ("dp", self.dp), ("pp", self.pp))

    @property
    def expert_axes(self) -> tuple[tuple[Axis, int], ...]:
        """Name and size of each axis of the experts, as `axes` has those of the tokens."""
        return (
            ("tp", self.tp),
            ("ep", self.ep),
            ("expert_dp", self.replicas // self.ep),
            ("pp", self.pp),
        )

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinates of a global rank."""
        indices = _indices(rank - self.first, self.axes)
        ep = _indices(rank - self.first, self.expert_axes)["ep"]
        return Coordinate(**indices, ep=ep)

    def group_along(self, rank: int, *along: Axis) -> tuple[int, ...]:
        """Return the ranks, this one included, whose coordinates differ from this rank's only along
        these axes, which are all of the tokens or all of the experts."""
        axes = self._axes_with(along)
        own_index = _indices(rank - self.first, axes)
        ranks = [self.first]
        stride = 1
        for axis, size in axes:
            indices = range(size) if axis in along else (own_index[axis],)
            ranks = [inner + index * stride for index in indices for inner in ranks]
            stride *= size
        return tuple(ranks)

    def groups_along(self, *along: Axis) -> list[list[int]]:
        """Return the lists of ranks whose coordinates differ only along these axes."""
        axes = self._axes_with(along)
        first_ranks = (
            rank
            for rank in self.ranks
            if not any(_indices(rank - self.first, axes)[axis] for axis in along)
        )
        return [list(self.group_along(rank, *along)) for rank in first_ranks]

    def _axes_with(self, along: tuple[Axis, ...]) -> tuple[tuple[Axis, int], ...]:
        """Return the axes of the tokens, or of the experts if only those include these axes."""
        return self.axes if set(along) <= {axis for axis, _ in self.axes} else self.expert_axes

    def __str__(self) -> str:
        chunks = f" ({self.vpp} chunks)" if self.vpp > 1 else ""
        least = "1 to " if self.dynamic_cp else ""
        context = f" x CP {least}{self.cp}" if self.cp > 1 else ""
        experts = f", experts over {self.ep} replicas" if self.ep > 1 else ""
        shards = f", parameters over {self.shards} of them" if self.shards > 1 else ""
        return f"TP {self.tp}{context} x PP {self.pp}{chunks} x DP {self.dp}{experts}{shards}"

    def is_first_stage(self, rank: int) -> bool:
        """Return whether the rank holds the embedding."""
        return self.coordinate(rank).pp == 0

    def is_last_stage(self, rank: int) -> bool:
        """Return whether the rank holds the output layer."""
        return self.coordinate(rank).pp == self.pp - 1

    def chunk_layers(self, num_layers: int, pp: int) -> list[range]:
        """Return the global layer indices of each chunk of pipeline stage pp. The first chunks of
        all stages hold the first layers, in the order of the stages, then come the second
        chunks."""
        sizes = self.stage_sizes(num_layers)
        assert sizes is not None, (
            f"{num_layers} layers cannot be spread over {self.pp} stages of {self.vpp} chunks"
        )
        starts = [(chunk * num_layers + sum(sizes[:pp])) // self.vpp for chunk in range(self.vpp)]
        return [range(start, start + sizes[pp] // self.vpp) for start in starts]

    def stage_sizes(self, num_layers: int) -> list[int] | None:
        """Return the number of layers of each stage: first and last stage as set, the other layers
        evenly. With several chunks all stages have the same number, a multiple of the chunks.
        Return None if the layers do not divide so."""
        first = self.first_stage_layers
        last = self.last_stage_layers
        if self.vpp > 1:
            size = num_layers // self.pp
            return None if num_layers % (self.pp * self.vpp) else [size] * self.pp
        if self.pp == 1:
            return (
                [num_layers] if first in (None, num_layers) and last in (None, num_layers) else None
            )
        between = self.pp - (first is not None) - (last is not None)
        rest = num_layers - (first or 0) - (last or 0)
        if rest < between or (rest % between if between else rest):
            return None
        even = rest // between if between else 0
        sizes = [even] * self.pp
        sizes[0] = even if first is None else first
        sizes[-1] = even if last is None else last
        return sizes


def _indices(rank: int, axes: tuple[tuple[Axis, int], ...]) -> dict[Axis, int]:
    """Return the rank's index along each axis."""
    assert 0 <= rank < math.prod(size for _, size in axes)
    indices: dict[Axis, int] = {}
    for axis, size in axes:
        rank, indices[axis] = divmod(rank, size)
    return indices


def training_mesh(megatron: MegatronConfig, world: int, first: int = 0) -> Mesh:
    """Return the training mesh of the settings. first: its first rank."""
    fsdp = fsdp_config(megatron)
    whole = world if fsdp is not None and fsdp.fsdp_size == -1 else 1
    return Mesh(
        world,
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        ep=megatron.expert_model_parallel_size,
        first_stage_layers=megatron.num_layers_in_first_pipeline_stage,
        last_stage_layers=megatron.num_layers_in_last_pipeline_stage,
        vpp=megatron.virtual_pipeline_model_parallel_size or 1,
        cp=megatron.context_parallel_size,
        dynamic_cp=megatron.dynamic_context_parallel,
        shards=max(whole, fsdp.fsdp_size) if fsdp is not None else 1,
        first=first,
    )


def role_mesh(cfg: Config, role: str, world: int) -> Mesh:
    """Return the mesh of a role's model in a run of `world` ranks."""
    ranks = role_ranks(cfg, role, world)
    return training_mesh(layouts(cfg)[role], len(ranks), ranks.start)


def rollout_groups(
    mesh: Mesh, rollout_tp: int, ranks_per_node: int = 8, pool: int | None = None
) -> list[list[int]]:
    """Return the ranks of each rollout engine, in the order of the engine's tensor-parallel rank.
    One of the training TP size t and rollout_tp must divide the other. pool: the number of ranks
    after the mesh's that the engines have of their own, as neighbours.

    If rollout_tp divides t, an engine takes ranks at stride t / rollout_tp inside one training TP
    group: each rank's training shard is part of its generation shard (HybridFlow, arXiv 2409.19256,
    section 5). If t divides rollout_tp, an engine takes whole neighbouring TP groups, ordered by
    training shard first: each rank's generation shard is part of its training shard. Such engines
    cannot all have ascending ranks: rank 1 has the second training shard, so rollout_tp / t ranks
    of its engine precede it.

    An engine does not leave a node for that: where a training TP group is on several nodes and an
    engine fits in one, it takes ranks of one node, and as many of them as possible hold a part of
    their generation shard."""
    if pool is not None:
        end = mesh.world + pool
        return [list(range(a, a + rollout_tp)) for a in range(mesh.world, end, rollout_tp)]
    assert mesh.world % rollout_tp == 0, f"rollout TP {rollout_tp} does not divide {mesh.world}"
    assert mesh.tp % rollout_tp == 0 or rollout_tp % mesh.tp == 0, (mesh.tp, rollout_tp)
    starts = range(0, mesh.world, rollout_tp)
    if mesh.tp % rollout_tp:
        return [
            [r for s in range(mesh.tp) for r in range(a + s, a + rollout_tp, mesh.tp)]
            for a in starts
        ]
    stride = mesh.tp // rollout_tp
    engine_ranks = [
        [base + first + part * stride for part in range(rollout_tp)]
        for base in range(0, mesh.world, mesh.tp)
        for first in range(stride)
    ]

    def num_nodes(engines: Iterable[Iterable[int]]) -> int:
        return sum(len({rank // ranks_per_node for rank in ranks}) for ranks in engines)

    if num_nodes(engine_ranks) <= num_nodes(range(a, a + rollout_tp) for a in starts):
        return engine_ranks
    size = ranks_per_node if ranks_per_node % rollout_tp == 0 else rollout_tp
    return [
        group
        for a in range(0, mesh.world, size)
        for group in _groups_of_block(mesh, rollout_tp, range(a, min(a + size, mesh.world)))
    ]


def _groups_of_block(mesh: Mesh, rollout_tp: int, ranks: Sequence[int]) -> list[list[int]]:
    """Return the rollout groups of consecutive ranks. rollout_tp divides the training TP."""
    num_groups = len(ranks) // rollout_tp
    by_tp_rank: list[list[int]] = [[] for _ in range(rollout_tp)]
    others: list[int] = []
    for rank in ranks:
        holders = by_tp_rank[mesh.coordinate(rank).tp * rollout_tp // mesh.tp]
        (holders if len(holders) < num_groups else others).append(rank)
    rest = iter(others)
    for holders in by_tp_rank:
        holders += itertools.islice(rest, num_groups - len(holders))
    return [list(group) for group in zip(*by_tp_rank, strict=True)]
