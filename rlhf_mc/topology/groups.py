"""The process groups of a run: built once, passed as arguments. How ranks agree on something small is in
agreement.py.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhf_mc import platform
from rlhf_mc.config.errors import UserError
from rlhf_mc.topology.mesh import Coordinate, Mesh


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
