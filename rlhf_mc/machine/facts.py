"""Facts about this machine for `python -m rlhf_mc --check`; what they mean is in machine/check.py.

A function here may raise, and machine/check.py then reports that one fact as unread. Libraries with
code compiled for one build of torch are imported in processes of their own: one that crashes, hangs
or prints spoils no other fact.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rlhf_mc import json_files
from rlhf_mc.config.errors import first_line

IMPORT_SECONDS = 120.0
"""Longest time that the import of a library may take."""
COMMAND_SECONDS = 30.0
"""Longest time that a command may take; nvidia-smi hangs on a GPU in a bad state."""
INFINIBAND = Path("/sys/class/infiniband")
CGROUPS = Path("/sys/fs/cgroup")
PROCESS_CGROUPS = Path("/proc/self/cgroup")
PROCESS_STATUS = Path("/proc/self/status")
_CAP_IPC_LOCK = 14
"""Number of the capability with which Linux does not apply the limit on locked memory
(capabilities(7))."""


@dataclass(frozen=True)
class InstalledGpu:
    """A GPU as nvidia-smi lists it."""

    name: str
    memory_mib: int
    used_mib: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver and its GPUs."""

    version: str = ""
    cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver runs."""
    gpus: list[InstalledGpu] = field(default_factory=list)
    error: str = ""
    """The reason where nvidia-smi does not answer."""


@dataclass(frozen=True)
class Library:
    """A library: its version, or None where it is not installed, and why it cannot be imported, if
    it cannot."""

    version: str | None
    error: str = ""


@dataclass(frozen=True)
class Torch(Library):
    """torch, and the libraries that it was built with."""

    cuda: str | None = None
    cudnn: str | None = None
    nccl: str | None = None
    num_gpus: int = 0
    archs: list[str] = field(default_factory=list)
    """The architectures that its kernels were compiled for: sm_80, ..."""


@dataclass(frozen=True)
class Interface:
    """A network interface that is up."""

    name: str
    address: str
    mbit: int
    """Speed in Mbit/s; 0 if unknown."""


@dataclass(frozen=True)
class InfinibandPort:
    """A port in /sys/class/infiniband; RoCE ports, whose link layer is Ethernet, are among them."""

    device: str
    state: str
    rate: str
    link_layer: str


def command_output(*command: str, seconds: float = COMMAND_SECONDS) -> str:
    """Return what a command prints. Raise RuntimeError with the last line of its errors if it
    fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]} has not ended after {seconds:.0f} s") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"{command[0]} ends with code {done.returncode}")
    return done.stdout.strip()


@functools.cache
def driver() -> Driver:
    """Return the driver and its GPUs as nvidia-smi lists them; an empty one where there is no
    nvidia-smi. It is asked once per process: on a GPU in a bad state each start takes
    COMMAND_SECONDS."""
    if shutil.which("nvidia-smi") is None:
        return Driver()
    fields = "name,memory.total,memory.used,compute_cap,driver_version"
    try:
        lines = command_output(
            "nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"
        ).splitlines()
        summary = command_output("nvidia-smi")
    except (OSError, RuntimeError) as error:
        return Driver(error=first_line(error))
    gpus = []
    version = ""
    for line in lines:
        try:
            name, total, used, capability, version = (text.strip() for text in line.rsplit(",", 4))
            major, minor = capability.split(".")
            gpus.append(InstalledGpu(name, int(total), int(used), (int(major), int(minor))))
        except ValueError:  # of a GPU that is lost
            return Driver(error=f"nvidia-smi prints {line!r}")
    newest = re.search(r"CUDA[\w ]* Version\s*:\s*(\d+)\.(\d+)", summary)
    return Driver(version, (int(newest[1]), int(newest[2])) if newest else None, gpus)


def gpu_device_files() -> list[str]:
    """Return the GPUs' device files, which are there where a driver is loaded."""
    return sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each of the packages that is installed."""
    return {name: version for name in packages if (version := installed_version(name)) is not None}


def imported(package: str, code: str) -> tuple[Library, str]:
    """Run `code`, which imports the package, in a process of its own. Return the library and the
    last line printed."""
    version = installed_version(package)
    if version is None:
        return Library(None), ""
    command = (sys.executable, "-W", "ignore", "-c", code)
    try:
        output = command_output(*command, seconds=IMPORT_SECONDS)
    except RuntimeError as error:
        return Library(version, str(error)), ""
    return Library(version), output.rpartition("\n")[2]


TORCH_CODE = """
import json, torch
from rlhf_mc import platform
cuda = torch.version.cuda
cudnn = torch.backends.cudnn.version() or 0
print(json.dumps({
    "version": torch.__version__,
    "cuda": cuda,
    "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}" if cuda else None,
    "nccl": ".".join(map(str, platform.nccl_version())) if cuda else None,
    "num_gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    "archs": torch.cuda.get_arch_list() if cuda else [],
}))
"""


@functools.cache
def torch() -> Torch:
    """Return the facts of torch."""
    library, line = imported("torch", TORCH_CODE)
    return Torch(**json_files.parse(line)) if line else Torch(library.version, library.error)


@functools.cache
def transformer_engine() -> Library:
    """Return Transformer Engine as it can be imported, with its interface to torch."""
    return imported("transformer-engine", "import transformer_engine.pytorch")[0]


@functools.cache
def apex() -> Library:
    """Return Apex as it can be imported, with its kernels that Megatron-Core uses. Where
    requirements/apex.sh has not installed it, the error is the reason."""
    library, _ = imported("apex", "import torch, apex, amp_C, fused_weight_gradient_mlp_cuda")
    reason = Path(sys.prefix, "apex_missing")
    if library.version is None and reason.exists():
        return Library(None, reason.read_text().strip())
    return library


def file_system(path: str) -> tuple[int, int]:
    """Return the size of the file system of a path, and what is free of it, in bytes."""
    usage = shutil.disk_usage(path)
    return usage.total, usage.free


def interfaces() -> list[Interface]:
    """Return the network interfaces that are up, without loopback."""
    stats = psutil.net_if_stats()
    interfaces = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        ips = [ip.address for ip in addresses if ip.family in (socket.AF_INET, socket.AF_INET6)]
        if name in stats and stats[name].isup and ips and not ips[0].startswith("127."):
            interfaces.append(Interface(name, ips[0], stats[name].speed))
    return interfaces


def host_address() -> str:
    """Return the address that this host's name stands for; empty if it stands for none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except socket.gaierror:
        return ""


def infiniband() -> list[InfinibandPort]:
    """Return the ports of InfiniBand and RoCE adapters."""
    ports = []
    for port in sorted(INFINIBAND.glob("*/ports/*")):
        state, rate, layer = (
            (port / name).read_text().strip() for name in ("state", "rate", "link_layer")
        )
        ports.append(
            InfinibandPort(
                port.parents[1].name, state.partition(":")[2].strip().lower(), rate, layer
            )
        )
    return ports


def locked_memory_limit() -> int | None:
    """Return the bytes that this process may lock in memory (ulimit -l), or None where that is not
    limited."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    (capabilities,) = re.findall(r"^CapEff:\s*(\w+)$", PROCESS_STATUS.read_text(), re.MULTILINE)
    is_unlimited = limit == resource.RLIM_INFINITY or int(capabilities, 16) >> _CAP_IPC_LOCK & 1
    return None if is_unlimited else limit


def memory() -> tuple[int, int]:
    """Return the memory that this process may use, by the machine and its control groups, and what
    is available, in bytes: of the machine's free and reclaimable memory, and within the limits."""
    machine = psutil.virtual_memory()
    limits, margins = zip((machine.total, machine.available), *memory_limits(), strict=True)
    return min(limits), min(margins)


def available_memory() -> int:
    """Return the bytes that this node can still give to this process."""
    return memory()[1]


def memory_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit in bytes of each control group of this process that limits memory, and of
    those around them, as Slurm and container runtimes limit a job, and what is left of it, in which
    files in the page cache are. Of a group of version 1 the whole limit counts as left."""
    for file in _limit_files(PROCESS_CGROUPS.read_text(), CGROUPS):
        with suppress(OSError):  # the root has none
            limit = file.read_text().strip()
            if not limit.isdecimal():
                continue
            used = 0
            if file.name == "memory.max":
                lines = file.with_name("memory.stat").read_text().splitlines()
                numbers = dict(line.split() for line in lines)
                used = int(numbers["anon"]) + int(numbers["shmem"])
            yield int(limit), max(0, int(limit) - used)


@functools.lru_cache
def _limit_files(cgroup: str, root: Path) -> tuple[Path, ...]:
    """Return where these limits may be. A process stays in its control groups, and every step reads
    the limits."""
    files: list[Path] = []
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        folder = (root / controllers / path.lstrip("/")).resolve()
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        files += [up / name for up in (folder, *folder.parents) if up.is_relative_to(root)]
    return tuple(files)


def compilers() -> dict[str, str | None]:
    """Return the paths of the compilers that kernels are compiled with while a run runs."""
    return {name: shutil.which(name) for name in ("cc", "nvcc")}
