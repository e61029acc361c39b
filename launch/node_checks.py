"""The checks of one node before a job's ranks start there. Run by launch/preflight.py on every
node, within the site's container if it has one. Each check yields one line for each problem, with
its remedy. No torch is imported.

The rules are the run's own: settings and files are checked by setup/early_checks.py, open files by
topology/open_files.py, and the machine is read by runtime/facts.py.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlhf_mc.config.errors import UserError, first_line
from rlhf_mc.config.schema import Config
from rlhf_mc.machine import facts
from rlhf_mc.machine.check import has_gpus, used_gpus
from rlhf_mc.machine.facts import InstalledGpu
from rlhf_mc.setup.early_checks import check_early
from rlhf_mc.topology.open_files import raise_limit


@dataclass(frozen=True)
class Job:
    """The run that is to start, and this node's place in it."""

    cfg: Config
    num_nodes: int
    ranks_per_node: int
    node_rank: int

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.num_nodes * self.ranks_per_node

    @classmethod
    def of_environment(cls, cfg: Config) -> Job:
        """Return the job that launch/slurm_job.sh describes in the environment."""
        number = {
            name: int(os.environ.get(name) or default) for name, default in JOB_VARIABLES.items()
        }
        return cls(cfg, number["SLURM_JOB_NUM_NODES"], number["NPROC"], number["SLURM_NODEID"])


LEAST_LOCKED_MEMORY = 2**30
"""Bytes of locked memory below which NCCL cannot start: some MiB for each channel to each peer.
Linux grants 64 KiB, or 8 MiB, where nothing is set."""
JOB_VARIABLES = {"SLURM_JOB_NUM_NODES": 1, "NPROC": 1, "SLURM_NODEID": 0}
"""Variable -> its value where it is not set."""


def settings(job: Job) -> Iterator[str]:
    """Check settings, layouts against the number of ranks, the models' config.json, and the files
    that are named."""
    try:
        check_early(job.cfg, job.world)
    except UserError as error:
        hint = ""
        if "processes of this run" in str(error):
            hint = f" ({job.num_nodes} nodes x {job.ranks_per_node} ranks)"
        elif "no such " in str(error) and "RLHF_MC_CONTAINER" in os.environ:
            hint = (
                "; in the container are only the repository and [container] mounts of the site file"
            )
        yield f"{error}{hint}"


def open_files(job: Job) -> Iterator[str]:
    """Check the limit on open files, for this node's first rank."""
    try:
        raise_limit(job.world, job.node_rank * job.ranks_per_node)
    except UserError as error:
        yield str(error)


def visible_gpus() -> list[InstalledGpu]:
    """Return the GPUs that this job may use, as nvidia-smi lists them; none where the run is on
    CPUs. Raise RuntimeError if nvidia-smi does not list the job's GPUs."""
    driver = facts.driver()
    has_any = has_gpus(driver, facts.gpu_device_files())
    allocated = (
        os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0"
        and os.environ.get("RLHF_MC_DEVICE", "") != "cpu"
    )
    if not has_any and not allocated:
        return []
    if not driver.gpus:
        raise RuntimeError(driver.error or "there is no nvidia-smi")
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return driver.gpus
    numbers = [int(text) if text.isdecimal() else -1 for text in named.split(",") if text]
    if all(0 <= number < len(driver.gpus) for number in numbers):
        return [driver.gpus[number] for number in numbers]
    return driver.gpus[: len(numbers)]  # named by UUID, or numbered as in the whole node


def gpus(job: Job) -> Iterator[str]:
    """Check number, kinds and free memory of the GPUs."""
    leave_out = "leave the node out (sbatch --exclude)"
    try:
        found = visible_gpus()
    except RuntimeError as error:
        yield (
            f"nvidia-smi does not list the job's GPUs: {error}; {leave_out}, or have the container "
            "runtime add the driver; RLHF_MC_DEVICE=cpu runs on CPUs"
        )
        return
    if 0 < len(found) < job.ranks_per_node:
        yield (
            f"NPROC is {job.ranks_per_node}, and the job may use {len(found)} GPUs: ask for more "
            f"(sbatch --gpus-per-node), or {leave_out}"
        )
    if len({(gpu.name, gpu.memory_mib) for gpu in found}) > 1:
        yield f"the GPUs are not equal: {describe(found)}; {leave_out}"
    if used := used_gpus(found):
        yield f"other processes use {used}: end them, or {leave_out}"


def describe(found: list[InstalledGpu]) -> str:
    """Return number and kinds of GPUs; two nodes of equal GPUs have equal texts."""
    kinds = [f"{gpu.name}, {gpu.memory_mib / 1024:.0f} GiB" for gpu in found]
    return "; ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "none"


def interfaces(job: Job) -> Iterator[str]:
    """Check that the interfaces and adapters that gloo and NCCL are told to use exist, and are
    up."""
    if job.world == 1:
        return
    up = sorted(name for name, stats in psutil.net_if_stats().items() if stats.isup)
    has = f"no such interface is up; up are {', '.join(up)} (docs/cluster.md)"
    own = os.environ.get("RLHF_MC_SOCKET_IFNAME", "")
    if own and own not in up:
        yield f"RLHF_MC_SOCKET_IFNAME is {own}, and {has}"
    for name in _names("GLOO_SOCKET_IFNAME"):
        if name not in up and name != own:
            yield f"GLOO_SOCKET_IFNAME is {name}, and {has}"
    value = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if value != f"={own}" and _names("NCCL_SOCKET_IFNAME") and not _match(value, up):
        yield f"NCCL_SOCKET_IFNAME is {value}, and {has}"
    value = os.environ.get("NCCL_IB_HCA", "")
    if not _names("NCCL_IB_HCA") or os.environ.get("NCCL_IB_DISABLE", "0") == "1":
        return
    adapters = sorted(path.name for path in facts.INFINIBAND.glob("*"))
    found = ", ".join(adapters) or "none"
    if value.startswith("="):
        if missing := [name for name in _names("NCCL_IB_HCA") if name not in adapters]:
            yield f"NCCL_IB_HCA names {', '.join(missing)}, and /sys/class/infiniband has {found}"
    elif not _match(value, adapters):
        yield f"NCCL_IB_HCA is {value}, and /sys/class/infiniband has {found}"


def _names(variable: str) -> list[str]:
    """Return the names in one of NCCL's lists, without ports; none if it lists what not to use,
    after a ^."""
    value = os.environ.get(variable, "")
    if value.startswith("^"):
        return []
    return [part.partition(":")[0] for part in value.lstrip("=").split(",") if part]


def _match(value: str, present: list[str]) -> bool:
    """Return True if one of NCCL's lists matches a present name: exactly after =, otherwise as a
    prefix."""
    names = [part.partition(":")[0] for part in value.lstrip("=").split(",") if part]
    if value.startswith("="):
        return any(name in present for name in names)
    return any(one.startswith(name) for one in present for name in names)


def locked_memory(job: Job) -> Iterator[str]:
    """Check the limit on locked memory, in which NCCL registers its buffers with InfiniBand and
    RoCE adapters."""
    limit = facts.locked_memory_limit()
    if limit is None or limit >= LEAST_LOCKED_MEMORY or job.num_nodes == 1:
        return
    if os.environ.get("NCCL_IB_DISABLE", "0") == "1" or not has_gpus(
        facts.driver(), facts.gpu_device_files()
    ):
        return
    if adapters := ", ".join(port.device for port in facts.infiniband()):
        yield (
            f"only {limit / 2**20:.4g} MiB may be locked in memory (ulimit -l), and NCCL registers "
            f"more with {adapters}: set LimitMEMLOCK=infinity in slurmd's systemd unit; "
            "NCCL_IB_DISABLE=1 runs without them"
        )


def compile_cache(job: Job) -> Iterator[str]:
    """Check that the folder of compiled kernels (launch/env.sh) can be created, and that it is this
    user's: a process runs the code in it."""
    folder = Path(os.environ.get("RLHF_MC_CACHE", ""))
    if not folder.is_absolute():  # not set
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        yield (
            f"RLHF_MC_CACHE, the folder of compiled kernels: {error}; name another one on the node"
        )
        return
    if owner != os.getuid() or not os.access(folder, os.W_OK):
        yield (
            f"RLHF_MC_CACHE {folder} belongs to another user, or cannot be written; name another "
            "folder on the node"
        )


CHECKS: tuple[Callable[[Job], Iterator[str]], ...] = (
    settings,
    open_files,
    gpus,
    interfaces,
    locked_memory,
    compile_cache,
)
"""Every check, in the order in which its lines are printed."""


def problems(job: Job) -> Iterator[str]:
    """Yield the problems of this node. A line does not name the node, so that equal problems have
    equal lines."""
    for check in CHECKS:
        try:
            for line in check(job):
                yield line.replace(f" on {socket.gethostname()}", "")
        except OSError as error:
            yield f"the check of {check.__name__} failed: {first_line(error)}"
