"""The process groups of a run: built once, passed as arguments, for several meshes side by side. Megatron-Core's global
parallel_state stays uninitialised. How ranks agree on something small is in consensus.py.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhf_mc.config.errors import UserError
from rlhf_mc.topology.mesh import Axis, Coordinate, Mesh
from rlhf_mc.topology.rendezvous import init_process_group

_AXES: dict[str, tuple[Axis, ...]] = {
    "tp": ("tp",),
    "pp": ("pp",),
    "mp": ("tp", "pp"),
    "dp": ("ep", "expert_dp"),
    "tp_dp_cp": ("tp", "ep", "expert_dp"),
    "ep": ("ep",),
    "tp_ep": ("tp", "ep"),
    "tp_ep_pp": ("tp", "ep", "pp"),
    "expt_tp": ("tp",),
    "expt_dp": ("expert_dp",),
    # No context parallelism.
    "cp": (),
    "tp_cp": ("tp",),
    "dp_cp": ("ep", "expert_dp"),
    # One instance of the distributed optimizer.
    "intra_dp_cp": ("ep", "expert_dp"),
    "intra_expt_dp": ("expert_dp",),
    "intra_dist_opt": ("tp", "ep", "expert_dp", "pp"),
}
"""Along which axes of the mesh each group of Megatron-Core's ProcessGroupCollection lies. Those of embeddings hold ends
of the pipeline (see _group_ranks)."""


@dataclass(frozen=True)
class Groups:
    """This rank's place in the mesh and its process groups."""

    mesh: Mesh
    rank: int
    collection: ProcessGroupCollection
    """Megatron-Core's groups (tp, pp, dp, embd, ...), handed to models and optimizers."""

    @property
    def coordinate(self) -> Coordinate:
        return self.mesh.coordinate(self.rank)

    @property
    def is_last_stage(self) -> bool:
        return self.mesh.is_last_stage(self.rank)


def build_groups(mesh: Mesh) -> Groups:
    """Megatron-Core's groups for one mesh. Every rank must call it."""
    return build_role_groups({"": mesh})[""]


def build_role_groups(meshes: Mapping[str, Mesh], timeout_seconds: int | None = None) -> dict[str, Groups]:
    """Megatron-Core's groups for the mesh of each role. Groups of the same ranks are one group, whatever they are for:
    roles take turns, and each communicator costs memory on a GPU. Every rank must call it, with the same meshes in the
    same order.

    timeout_seconds None: the library's default."""
    timeout = None if timeout_seconds is None else datetime.timedelta(seconds=timeout_seconds)
    everyone = tuple(range(dist.get_world_size()))
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {everyone: dist.group.WORLD}

    def mine(rank_lists: list[list[int]]) -> dist.ProcessGroup | None:
        """This rank's group, or None where it is in none of them."""
        for ranks in map(tuple, rank_lists):
            if ranks not in made:
                # A group of one is nobody else's business; all ranks meet to make any other.
                alone = len(ranks) == 1
                made[ranks] = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=alone)
        return next((made[ranks] for ranks in map(tuple, rank_lists) if dist.get_rank() in ranks), None)

    def groups(mesh: Mesh) -> Groups:
        collection = ProcessGroupCollection(hcp=None, inter_dist_opt=None)
        for name, rank_lists in _group_ranks(mesh).items():
            setattr(collection, name, mine(rank_lists))
        return Groups(mesh, dist.get_rank(), collection)

    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        # What sequence parallelism gathers tokens into: scratch memory, the same for every role.
        parallel_state._set_global_memory_buffer()
    of_mesh: dict[Mesh, Groups] = {}
    for mesh in meshes.values():
        if mesh not in of_mesh:
            of_mesh[mesh] = groups(mesh)
    return {role: of_mesh[mesh] for role, mesh in meshes.items()}


def _group_ranks(mesh: Mesh) -> dict[str, list[list[int]]]:
    """The ranks of each group of each kind, by the names of ProcessGroupCollection."""
    ranks = {name: mesh.groups_along(*axes) for name, axes in _AXES.items()}
    ranks["embd"] = [sorted({stages[0], stages[-1]}) for stages in ranks["pp"]]
    ranks["pos_embd"] = [stages[:1] for stages in ranks["pp"]]
    return ranks


@contextlib.contextmanager
def world_of_a_tool(tp: int = 1, pp: int | None = None, ep: int = 1) -> Iterator[Groups]:
    """For tools that convert a checkpoint: the ranks that torchrun started, or else this one process.

    pp None: as many stages as there are ranks left. UserError where the ranks do not divide so."""
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


def barrier() -> None:
    """Wait until every rank has called it."""
    dist.barrier()


def shut_down() -> None:
    """Destroy the process groups once every rank has called it: no rank ends while another still waits for it."""
    barrier()
    dist.destroy_process_group()


def set_timeout_everywhere(timeout_seconds: int) -> None:
    """Gives every process group that exists the same time-out, those that vLLM and Megatron-Core made by
    themselves included: new_group takes the library's default, not the world's."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_seconds), group)
