"""Process groups for the meshes of all roles, built once and passed as arguments. Megatron-Core's
global parallel_state stays uninitialised. Collectives on plain values are in consensus.py.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhf_mc import platform
from rlhf_mc.config.errors import UserError
from rlhf_mc.topology.mesh import Axis, Coordinate, Mesh
from rlhf_mc.topology.rendezvous import init_process_group

_DEFAULT_SECONDS = 1800
"""torch's default timeout of collectives, the longer one of NCCL's and gloo's."""
_LATER_SECONDS = 30.0
"""Seconds by which a collective may end after its own timeout."""
_AXES: dict[str, tuple[Axis, ...]] = {
    "tp": ("tp",),
    "pp": ("pp",),
    "mp": ("tp", "pp"),
    "cp": ("cp",),
    "tp_cp": ("tp", "cp"),
    "dp": ("dp",),
    "dp_cp": ("cp", "dp"),
    "tp_dp_cp": ("tp", "cp", "dp"),
    "ep": ("ep",),
    "tp_ep": ("tp", "ep"),
    "tp_ep_pp": ("tp", "ep", "pp"),
    "expt_tp": ("tp",),
    "expt_dp": ("expert_dp",),
    # There is one instance of the distributed optimizer.
    "intra_dist_opt": ("tp", "cp", "dp", "pp"),
}
"""Group of Megatron-Core's ProcessGroupCollection -> axes of the mesh that it spans. Groups of
embeddings, which hold the ends of the pipeline, are added in _group_ranks."""


@dataclass(frozen=True)
class ProcessGroups:
    """The mesh of a role, of the ranks of one pool, and this rank's coordinate and process groups
    in it."""

    mesh: Mesh
    rank: int
    collection: ProcessGroupCollection
    """Megatron-Core's groups (tp, pp, dp, embd, ...), handed to models and optimizers."""

    @property
    def is_member(self) -> bool:
        """False on the ranks of another pool, which are not in the mesh: their groups are None."""
        return self.rank in self.mesh.ranks

    @property
    def members(self) -> dist.ProcessGroup:
        """The group of all ranks of the mesh, of which this rank must be one."""
        assert self.is_member, f"rank {self.rank} is not in {self.mesh}"
        return self.collection.intra_dist_opt

    @property
    def sharding(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The groups of the replicas of this rank's shard, and of the shards of its replica."""
        made = self.collection
        return (made.fsdp_replicas, made.fsdp) if self.mesh.shards > 1 else (made.dp_cp, made.tp)

    @property
    def coordinate(self) -> Coordinate:
        assert self.is_member, f"rank {self.rank} is not in {self.mesh}"
        return self.mesh.coordinate(self.rank)

    @property
    def is_last_stage(self) -> bool:
        return self.is_member and self.mesh.is_last_stage(self.rank)


def build_groups(mesh: Mesh) -> ProcessGroups:
    """Return the groups of one mesh. Every rank must call it."""
    return build_role_groups({"": mesh})[""]


def build_role_groups(
    meshes: Mapping[str, Mesh], timeout_seconds: int | None = None
) -> dict[str, ProcessGroups]:
    """Return the groups of each role's mesh. Groups of the same ranks are one group: roles take
    turns, and each communicator costs memory on a GPU. Groups that carry point-to-point messages
    are connected. Every rank must call it, with the same meshes in the same order.

    timeout_seconds: timeout of collectives; None: torch's default."""
    timeout = None if timeout_seconds is None else datetime.timedelta(seconds=timeout_seconds)
    everyone = tuple(range(dist.get_world_size()))
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {everyone: dist.group.WORLD}

    def own_group(rank_lists: list[list[int]]) -> dist.ProcessGroup | None:
        """Return the group of this rank, or None if the rank is in none of them."""
        for ranks in map(tuple, rank_lists):
            if ranks not in made:
                # Every rank takes part in making a group, except groups of one rank.
                is_local = len(ranks) == 1
                made[ranks] = dist.new_group(
                    list(ranks), timeout=timeout, use_local_synchronization=is_local
                )
        return next(
            (made[ranks] for ranks in map(tuple, rank_lists) if dist.get_rank() in ranks), None
        )

    def groups(mesh: Mesh) -> ProcessGroups:
        collection = ProcessGroupCollection(hcp=None)
        for name, rank_lists in _group_ranks(mesh).items():
            setattr(collection, name, own_group(rank_lists))
        return ProcessGroups(mesh, dist.get_rank(), collection)

    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        # Scratch memory into which sequence parallelism gathers tokens. Roles share it.
        parallel_state._set_global_memory_buffer()
    of_mesh: dict[Mesh, ProcessGroups] = {}
    for mesh in meshes.values():
        if mesh not in of_mesh:
            of_mesh[mesh] = groups(mesh)
    # Of the world for weight updates and exports, of the stages for Megatron-Core's schedules, of
    # the context-parallel ranks for the keys and values that Transformer Engine passes on.
    connected = [dist.group.WORLD]
    for mesh, built in of_mesh.items():
        names = ("pp", *(context_group(mesh, size) for size in mesh.context_sizes))
        connected += [getattr(built.collection, name) for name in names]
    chunked = [
        made.collection.pp for mesh, made in of_mesh.items() if mesh.vpp > 1 and made.is_member
    ]
    _connect(connected, chunked, _DEFAULT_SECONDS if timeout_seconds is None else timeout_seconds)
    return {role: of_mesh[mesh] for role, mesh in meshes.items()}


def pool_group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Return a group of gloo of these ranks; None: all ranks. Each of these ranks must call it, and
    the others need not."""
    if not dist.is_initialized() or len(ranks) == dist.get_world_size():
        return None
    return dist.new_group(sorted(ranks), backend="gloo", use_local_synchronization=True)


def exchange_group() -> dist.ProcessGroup:
    """Return a group of gloo of all ranks, in which pools wait for each other without a time limit,
    as in await_all_ranks. A collective that an error leaves unfinished there blocks no other group.
    Every rank must call it."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(days=30))


def _connect(
    groups: Sequence[dist.ProcessGroup | None], chunked: Sequence[dist.ProcessGroup], seconds: float
) -> None:
    """Run a collective in each group, in order. NCCL connects the ranks of a group in the first
    operation, so without it the first batch_isend_irecv, in which not every rank takes part, would
    be undefined (torch's documentation). Then connect the neighbours in the groups of stages
    `chunked`, those with virtual pipeline chunks. Raise UserError if it does not end within its
    timeout, `seconds`.

    The alternative, init_process_group(device_id=...), splits every later group off the world,
    which all ranks must take part in: it hangs with groups of gloo alone, which vLLM makes, and
    with use_local_synchronization."""
    failures: list[BaseException] = []

    def connect() -> None:
        try:
            platform.set_device()  # a thread has its own
            for group in dict.fromkeys(groups):
                if group is not None and group.size() > 1:
                    dist.all_reduce(torch.zeros(1, device=platform.device()), group=group)
            for stages in dict.fromkeys(chunked):
                _connect_neighbours(stages)
            platform.synchronize()
        except BaseException as error:  # raised in the main thread
            failures.append(error)

    # In a thread: while NCCL connects ranks no timeout of torch's applies, and the call does not
    # return.
    thread = threading.Thread(target=connect, name="first collectives", daemon=True)
    thread.start()
    thread.join(seconds + _LATER_SECONDS)
    if thread.is_alive():
        raise UserError(
            f"the {dist.get_world_size()} ranks have reached one another through torch's store, "
            f"but not in a collective on {platform.device().type} within {seconds:g} s: with "
            "NCCL_DEBUG=INFO each rank prints the interfaces and adapters that it uses "
            "(docs/cluster.md)"
        )
    if failures:
        raise failures[0]


def _connect_neighbours(stages: dist.ProcessGroup) -> None:
    """Exchange a message with the next and the previous stage as Megatron-Core's schedule of
    virtual pipeline chunks does: each by itself, and not in a batch. For such messages NCCL makes a
    communicator of each pair of ranks, which otherwise the first micro-batch would wait for. Every
    rank of the group must call it."""
    next_rank, prev_rank = (
        dist.get_global_rank(stages, (stages.rank() + step) % stages.size()) for step in (1, -1)
    )
    numbers = torch.zeros(4, device=platform.device())
    requests = p2p_communication._p2p_ops(
        tensor_send_prev=numbers[0],
        tensor_recv_prev=numbers[1],
        tensor_send_next=numbers[2],
        tensor_recv_next=numbers[3],
        group=stages,
        prev_pipeline_rank=prev_rank,
        next_pipeline_rank=next_rank,
    )
    for request in requests.values():
        request.wait()


def _group_ranks(mesh: Mesh) -> dict[str, list[list[int]]]:
    """Return the rank lists of all groups of each kind, by name in ProcessGroupCollection."""
    ranks = {name: mesh.groups_along(*axes) for name, axes in _AXES.items()}
    ranks["embd"] = [sorted({stages[0], stages[-1]}) for stages in ranks["pp"]]
    ranks |= {
        context_group(mesh, size): mesh.context_blocks(size) for size in (1, *mesh.context_sizes)
    }
    ranks["pos_embd"] = [stages[:1] for stages in ranks["pp"]]
    if mesh.shards > 1:
        every = list(mesh.ranks)
        ranks["fsdp"] = [every[a : a + mesh.shards] for a in every[:: mesh.shards]]
        ranks["fsdp_replicas"] = [every[a :: mesh.shards] for a in every[: mesh.shards]]
    return ranks


def context_group(mesh: Mesh, size: int) -> str:
    """Return the name of the groups of `size` ranks that share a micro-batch: all context-parallel
    ranks, or fewer with dynamic context parallelism and in a dummy."""
    return "cp" if size == mesh.cp else f"cp_{size}"


@contextlib.contextmanager
def tool_groups(tp: int = 1, pp: int | None = None, ep: int = 1) -> Iterator[ProcessGroups]:
    """Join the processes that torchrun started, or make a world of this process alone; yield the
    groups of the mesh. For tools that convert checkpoints.

    pp None: world size / tp stages. Raise UserError if the sizes do not divide the world size."""
    if "RANK" in os.environ:
        init_process_group(timeout_seconds=1800)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.get_world_size()
    stages = max(1, world // tp) if pp is None else pp
    if world % (tp * stages) or world // (tp * stages) % ep:
        raise UserError(
            f"tensor-model-parallel-size {tp} x pipeline-model-parallel-size {stages} x "
            f"expert-model-parallel-size {ep} does not divide the {world} processes of this run"
        )
    yield build_groups(Mesh(world, tp, stages, ep=ep))
    shut_down()


@contextlib.contextmanager
def simulated_rank(rank: int, world: int) -> Iterator[None]:
    """Let this process be one rank of a world, while the body runs, by torch's fake process group:
    collectives return at once and move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def barrier() -> None:
    """Wait until every rank has called it."""
    dist.barrier()


def shut_down() -> None:
    """Destroy the process groups after a barrier, so that no rank exits while another waits for
    it."""
    barrier()
    dist.destroy_process_group()


def set_timeout_of_all_groups(timeout_seconds: int) -> None:
    """Set the timeout of every existing process group, including those that vLLM and Megatron-Core
    made: new_group uses torch's default and not the world's timeout."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_seconds), group)
