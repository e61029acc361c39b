"""The checks of a job against the planner's figures: device memory, space for checkpoints, host
memory. launch/preflight.py makes the plan on the job's first node, and compares every node with it.
No torch is imported.

trainer.planner decides what they are: "refuse" makes each line an error, "warn" a warning, and
"off" leaves them out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from launch.node_checks import Job, visible_gpus
from rlhf_mc.machine import facts
from rlhf_mc.planner.host_memory import plan_host_memory
from rlhf_mc.planner.memory import RankMemory
from rlhf_mc.planner.start import Capacity, check_fit, fit_error, plan_run, planned_shapes
from rlhf_mc.planner.storage import plan_storage

GB = 10**9


def capacity(job: Job) -> Capacity:
    """Return the number of ranks, and the memory of each: of the node's smallest GPU, or its share
    of host memory."""
    if found := visible_gpus():
        return Capacity(
            job.world, min(gpu.memory_mib for gpu in found) << 20, True, job.ranks_per_node
        )
    return Capacity(job.world, host_memory() // job.ranks_per_node, False, job.ranks_per_node)


def memory(job: Job, plan: list[RankMemory]) -> Iterator[str]:
    """Yield a line if the run does not fit into the memory of the GPUs, or of the node where it
    runs on CPUs."""
    where = capacity(job)
    shapes = planned_shapes(job.cfg)
    found = check_fit(job.cfg, shapes, plan, where)
    if found.problem is not None:
        yield fit_error(job.cfg, shapes, where, found)


def storage(job: Job, plan: list[RankMemory]) -> Iterator[str]:
    """Yield a line if the checkpoints and the export do not fit into the output directory's file
    system. Checkpoints that this run already has are part of what it needs. Quotas are not known
    here."""
    files = plan_storage(job.cfg, planned_shapes(job.cfg), plan, job.ranks_per_node)
    number = 1 if files.checkpoints is None else files.checkpoints
    needed = number * files.checkpoint + files.export
    folder = Path(job.cfg.trainer.default_local_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    present = 0
    if job.cfg.trainer.resume_mode != "disable":  # the files of an earlier run are kept
        steps = [
            path
            for path in folder.glob("global_step_*")
            if path.name.removeprefix("global_step_").isdecimal()
        ]
        present = sum(
            file.stat().st_size for step in steps for file in step.iterdir() if file.is_file()
        )
    free = shutil.disk_usage(existing).free
    if free + present < needed:
        yield (
            f"trainer.default_local_dir {job.cfg.trainer.default_local_dir} has {free / GB:,.1f} "
            f"GB free, and {number} checkpoints of {files.checkpoint / GB:,.1f} GB and an export "
            f"of {files.export / GB:,.1f} GB take {(needed - present) / GB:,.1f} GB more: free "
            "some, give another directory, or lower trainer.max_ckpt_to_keep"
        )


def host_memory() -> int:
    """Return the bytes of host memory that this job may use on this node: available, and within the
    limits of its control groups and of Slurm."""
    _, available = facts.memory()
    limits = [int(os.environ.get("SLURM_MEM_PER_NODE") or 0)]
    limits.append(
        int(os.environ.get("SLURM_MEM_PER_CPU") or 0)
        * int(os.environ.get("SLURM_CPUS_ON_NODE") or 0)
    )
    return min([available, *(limit << 20 for limit in limits if limit)])  # 0: no limit


def host_memory_needed(job: Job, plan: list[RankMemory]) -> dict[str, float]:
    """Return the bytes of host memory that the run takes on its fullest node, by what takes them.
    The planner has figures for GPUs alone; on CPUs the run itself compares."""
    if not visible_gpus():
        return {}
    return dict(plan_host_memory(job.cfg, planned_shapes(job.cfg), plan, job.ranks_per_node).parts)


def make_plan(job: Job) -> list[RankMemory]:
    """Return the memory of each class of ranks. Raise UserError if the settings do not allow the
    run, and RuntimeError if nvidia-smi does not list the job's GPUs."""
    return plan_run(job.cfg, planned_shapes(job.cfg), capacity(job))


def too_little_memory(available: int, parts: dict[str, float]) -> str:
    """Return a line if a node has less host memory than the run takes there, or an empty text."""
    needed = sum(parts.values())
    if available >= needed:
        return ""
    largest = sorted(parts, key=lambda name: -parts[name])[:3]
    shown = ", ".join(f"{name} {parts[name] / GB:,.0f}" for name in largest)
    return (
        f"host memory: the job may use {available / GB:,.0f} GB, and the run takes about "
        f"{needed / GB:,.0f} GB ({shown}): ask for more (sbatch --mem=0), end other processes, or "
        "set trainer.async_save=false"
    )
