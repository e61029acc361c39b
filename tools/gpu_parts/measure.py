"""Measurements that parts share: seconds, peak memory, and the machine's own rates, with which
figures are compared."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from rlhf_mc import platform
from rlhf_mc.planner.gpus import device_bfloat16


def seconds(action: Callable[[], object], repeats: int = 3, warm_up: int = 1) -> float:
    """Return the median seconds of the action, the work that it queues on the device included."""
    times = []
    for number in range(warm_up + repeats):
        platform.synchronize()
        start = time.perf_counter()
        action()
        platform.synchronize()
        if number >= warm_up:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def extra_memory(action: Callable[[], object]) -> int:
    """Return the bytes by which the peak exceeds the memory before the action: of tensors on a GPU,
    of the process's resident memory on a CPU."""
    if platform.use_cuda():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # or the allocator reuses free memory
    Path("/proc/self/clear_refs").write_text("5")
    resident = _status("VmRSS")
    action()
    return _status("VmHWM") - resident


@contextlib.contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Let this process allocate `more` bytes beyond those that it has: on its GPU, or of address
    space on a CPU."""
    if platform.use_cuda():
        torch.cuda.empty_cache()
        allowed = torch.cuda.memory_reserved() + more
        torch.cuda.set_per_process_memory_fraction(allowed / platform.device_memory())
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def activation_peak(action: Callable[[], object]) -> int:
    """Return the peak of the bytes of tensors that the action allocates: by torch's allocator on a
    GPU, by its profiler on a CPU. The profiler counts from 0, so that tensors of an action before
    make the peak of a repetition lower."""
    if platform.use_cuda():
        return extra_memory(action)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    recorded = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    changes = [event.nbytes() for event in sorted(recorded, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes))


def _status(key: str) -> int:
    line = next(
        x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key + ":")
    )
    return int(line.split()[1]) * 1024


def device_copy_rate(num_bytes: int) -> float:
    """Return the bytes per second of one copy on the device: bytes copied, each of which is read
    and written."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=platform.device())
    target = torch.empty_like(source)
    return num_bytes / seconds(lambda: target.copy_(source))


def host_copy_rates(num_bytes: int) -> tuple[float, float]:
    """Return the bytes per second of copies from the device to page-locked memory of the host, and
    back."""
    host = platform.host_bytes(num_bytes)
    device = torch.zeros(num_bytes, dtype=torch.uint8, device=platform.device())
    to_host = seconds(lambda: host.copy_(device, non_blocking=True))
    to_device = seconds(lambda: device.copy_(host, non_blocking=True))
    return num_bytes / to_host, num_bytes / to_device


def matmul_rate(size: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the FLOP/s of a product of two square matrices of random numbers."""
    a = torch.randn(size, size, device=platform.device()).to(dtype)
    b = torch.randn(size, size, device=platform.device()).to(dtype)
    return 2 * size**3 / seconds(lambda: torch.mm(a, b), repeats=10, warm_up=3)


def data_sheet_flops() -> float | None:
    """Return the dense bfloat16 FLOP/s of this GPU's data sheet; None where it is not known."""
    if not platform.use_cuda():
        return None
    return device_bfloat16(torch.cuda.get_device_name())
