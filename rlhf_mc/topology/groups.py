"""The process groups of a run: built once, passed as arguments. Also the few collectives on plain
Python values by which ranks agree on something small.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhf_mc import platform
from rlhf_mc.config.errors import UserError
from rlhf_mc.topology.mesh import Coordinate, Mesh

T = TypeVar("T")


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


def init_process_group(timeout_seconds: int) -> None:
    """Joins the world that torchrun or srun describes in the environment.
    Without that environment the world is this one process."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost")
        os.environ.setdefault("MASTER_PORT", "0")
    platform.set_device()
    dist.init_process_group(platform.backend(), timeout=datetime.timedelta(seconds=timeout_seconds))


def build_groups(mesh: Mesh) -> Groups:
    """Builds Megatron-Core's groups for the mesh. Every rank must call it, once per world."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        virtual_pipeline_model_parallel_size=mesh.vpp if mesh.vpp > 1 else None,
        expert_model_parallel_size=mesh.ep,
        create_gloo_process_groups=False,
    )
    return Groups(mesh, dist.get_rank(), ProcessGroupCollection.use_mpu_process_groups())


@contextlib.contextmanager
def world_of_a_tool(tp: int = 1, pp: int | None = None, ep: int = 1) -> Iterator[Groups]:
    """For tools that convert a checkpoint: the ranks that torchrun started, or else this one process.

    pp None: as many stages as there are ranks left. UserError where the ranks do not divide so."""
    if "RANK" in os.environ:
        init_process_group(timeout_seconds=1800)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.get_world_size()
    try:
        stages = max(1, world // tp) if pp is None else pp
        if world % (tp * stages) or world // (tp * stages) % ep:
            raise UserError(
                f"tensor-model-parallel-size {tp} x pipeline-model-parallel-size {stages} x "
                f"expert-model-parallel-size {ep} does not divide the {world} processes of this run"
            )
        yield build_groups(Mesh(world, tp, stages, ep=ep))
    finally:
        destroy_groups()
    shut_down()


def destroy_groups() -> None:
    """Takes down what build_groups built, so that another mesh can follow in the same processes."""
    parallel_state.destroy_model_parallel()


def shut_down() -> None:
    """Leaves the world together: no rank is gone while another still waits for it."""
    dist.barrier()
    dist.destroy_process_group()


def set_timeout_everywhere(timeout_seconds: int) -> None:
    """Gives every process group that exists the same time-out, those that vLLM and Megatron-Core made by
    themselves included: new_group takes the library's default, not the world's."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_seconds), group)


def gather_objects(value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank. Every rank must call it."""
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def ranks_per_node() -> int:
    """How many neighbouring ranks share a machine; 1 where they are not spread evenly. Every rank must call it."""
    hosts = gather_objects(socket.gethostname())
    count = hosts.count(hosts[0])
    even = len(hosts) % count == 0 and all(host == hosts[rank // count * count] for rank, host in enumerate(hosts))
    return count if even else 1


def raise_together(error: UserError | None) -> None:
    """Raises on every rank the first error that any rank has, so that no rank waits for one that is gone.
    Every rank must call it."""
    first = next((e for e in gather_objects(None if error is None else str(error)) if e is not None), None)
    if first is not None:
        raise UserError(first)


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The element-wise sum over all ranks, on every rank, on the CPU. Where each element is non-zero on one
    rank only, the sum is exact. Every rank must call it."""
    out = tensor.detach().to(platform.device())
    dist.all_reduce(out)
    return out.cpu()
