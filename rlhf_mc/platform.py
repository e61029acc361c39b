"""CUDA or CPU: device, communication backend, streams, synchronisation, memory and profiling of
this process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, record_function

RANKS_PER_GPU = "RLHF_MC_RANKS_PER_GPU"
"""Environment variable by which several ranks share a GPU (docs/gpu.md)."""
_DEFAULT_POOL = (0, 0)
"""Identifier of the pool of torch's allocator on a GPU that all tensors are in, unless a caller
asks for another."""
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
"""Parameters of glibc's mallopt, from malloc.h."""


def use_cuda() -> bool:
    """Return True where this process trains and generates on a GPU. RLHF_MC_DEVICE=cpu forces the
    CPU on a machine with GPUs."""
    return torch.cuda.is_available() and os.environ.get("RLHF_MC_DEVICE", "") != "cpu"


def ranks_per_gpu() -> int:
    """Return how many neighbouring local ranks share a GPU: RLHF_MC_RANKS_PER_GPU, which
    topology/shared_gpu.py checks, or 1. On a CPU it is 1."""
    return int(os.environ.get(RANKS_PER_GPU, "1")) if use_cuda() else 1


def device() -> torch.device:
    """Return the device of this process: the GPU of its local rank, or the CPU."""
    if use_cuda():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) // ranks_per_gpu())
    return torch.device("cpu")


def nccl_version() -> tuple[int, int, int]:
    """Return the version of the NCCL library that this process has loaded, which LD_PRELOAD may
    have put in the place of torch's. Where no such library is loaded, torch contains NCCL: its
    version is the one that torch was built with."""
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        major, minor, patch, *_ = torch.cuda.nccl.version()
        return major, minor, patch
    version = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(version))
    return version.value // 10_000, version.value // 100 % 100, version.value % 100


def backend() -> str:
    """Return torch.distributed's backend: NCCL for tensors on GPUs and gloo for small CPU
    messages."""
    return "cpu:gloo,cuda:nccl" if use_cuda() else "gloo"


def num_devices() -> int:
    """Return how many GPUs this process sees."""
    return torch.cuda.device_count()


def set_device() -> None:
    """Bind this process to its GPU; do nothing on a CPU."""
    if use_cuda():
        torch.cuda.set_device(device())


def enter_stream() -> None:
    """Let this thread queue its work on a CUDA stream of its own from now on; do nothing on a CPU.

    vLLM leaves the default stream, on which no CUDA graph can be captured, when its engine is
    built. By then Megatron-Core's DistributedDataParallel has made autograd's nodes of the
    parameters, which keep the stream of their making: with two streams each gradient would wait for
    the other one."""
    if use_cuda():
        torch.cuda.set_stream(torch.cuda.Stream())


def synchronize() -> None:
    """Wait for the queued work of the device, so that the time read next includes it."""
    if use_cuda():
        torch.cuda.synchronize()


def device_memory() -> int:
    """Return the bytes of memory of this process's GPU, used or not."""
    return torch.cuda.get_device_properties(device()).total_memory


def gpu_name() -> str | None:
    """Return the name of this process's GPU; None on a CPU."""
    return torch.cuda.get_device_name() if use_cuda() else None


def pci_address() -> str | None:
    """Return the PCI address of this process's GPU as /sys names it: 0000:1b:00.0; None on a
    CPU."""
    if not use_cuda():
        return None
    gpu: Any = torch.cuda.get_device_properties(device())  # torch's stub lacks these three
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for the errors of torch's allocators on a GPU and on a CPU."""
    cpu_allocator = isinstance(
        error, RuntimeError
    ) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    return isinstance(error, torch.OutOfMemoryError) or cpu_allocator


def free_cached_memory() -> None:
    """Free what is no longer referenced: objects in reference cycles, and blocks that torch keeps
    for reuse."""
    gc.collect()
    if use_cuda():
        torch.cuda.empty_cache()


def keep_freed_memory() -> None:
    """Let glibc's malloc keep the memory of freed tensors for the next ones, on a CPU. Do nothing
    where the user sets malloc's thresholds in the environment, or with another C library.

    By default it returns blocks of some MB to the kernel, and each tensor of that size begins with
    a page fault for every 4 KiB: 57,000 in a step of 256 sequences of 72 tokens on each of two
    ranks, 7 to 10 % of its time.

    It still returns blocks of 64 MB and more, such as the logits of a large vocabulary: smaller
    blocks take the place of a large one that is freed, and the next large one needs new memory."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    chosen = any(
        name in os.environ
        for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    )
    if mallopt is None or chosen or use_cuda():
        return
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_MMAP_THRESHOLD, 64 << 20)


def free_device_memory() -> tuple[int, int] | None:
    """Return the bytes of memory of this process's GPU, and how many of them are free now but for
    the peak of torch's tensors so far, which is within a step. Return None on a CPU.

    Pools of vLLM's allocator are left out: torch counts their segments as reserved after vLLM has
    released them, in its sleep and where it trims a pool (cumem.py)."""
    if not use_cuda():
        return None
    free, total = torch.cuda.mem_get_info()
    segments = torch.cuda.memory_snapshot(include_traces=False)
    of_pools = [segment for segment in segments if segment["segment_pool_id"] != _DEFAULT_POOL]
    reserved = sum(
        segment["total_size"] for segment in segments if segment["segment_pool_id"] == _DEFAULT_POOL
    )
    peak = torch.cuda.max_memory_allocated() - sum(
        segment["allocated_size"] for segment in of_pools
    )
    return total, free + reserved - peak


def process_memory() -> int:
    """Return the bytes of host memory that this process has now, with the pages that it shares."""
    return psutil.Process().memory_info().rss


def peak_memory_gb() -> float:
    """Return the peak memory in GiB: of this process's tensors on its GPU, or of the whole process
    on a CPU."""
    if use_cuda():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def device_peaks_gb() -> dict[str, float]:
    """Return the peaks in GiB of what torch has allocated and reserved on this process's GPU;
    nothing on a CPU."""
    if not use_cuda():
        return {}
    return {
        "max_memory_allocated_gb": torch.cuda.max_memory_allocated() / 2**30,
        "max_memory_reserved_gb": torch.cuda.max_memory_reserved() / 2**30,
    }


def float32_products() -> bool:
    """Return True where torch.addmm multiplies bfloat16 matrices into a float32 one (out_dtype), as
    CUDA does."""
    return use_cuda()


def host_bytes(num_bytes: int) -> torch.Tensor:
    """Return `num_bytes` bytes of uninitialised host memory [num_bytes] uint8; with a GPU
    page-locked, so that copies are asynchronous."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=use_cuda())


def lock_pages(memory: torch.Tensor) -> None:
    """Page-lock host memory where there is a GPU, so that copies from and to it are asynchronous.
    `unlock_pages` must precede its release. Raise MemoryError if the driver cannot."""
    if use_cuda() and len(memory):
        cudart = torch.cuda.cudart()
        portable = 1  # for every CUDA context of the process
        if int(code := cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, portable)):
            raise MemoryError(f"cudaHostRegister: {cudart.cudaGetErrorString(code)}")


def unlock_pages(memory: torch.Tensor) -> None:
    """Wait for the copies, and unlock what `lock_pages` has locked."""
    if use_cuda() and len(memory):
        torch.cuda.synchronize()
        cudart = torch.cuda.cudart()
        code = cudart.cudaHostUnregister(memory.data_ptr())
        assert int(code) == 0, f"cudaHostUnregister: {cudart.cudaGetErrorString(code)}"


_ALIGNMENT = 64
"""Bytes between the starts of tensors in one copy: kernels read vectors of up to 16 bytes, and
expect aligned ones."""


def to_device(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of the host on the device. On a GPU they are views of one buffer, filled by
    one copy from page-locked memory for which the host does not wait; on a CPU they are the
    arguments."""
    if not use_cuda():
        return list(tensors)
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
    # torch reuses the page-locked memory only after the copy, also where it is freed before.
    host = host_bytes(starts[-1])
    for view, tensor in zip(_views(host, starts, tensors), tensors, strict=True):
        view.copy_(tensor)
    return _views(host.to(device(), non_blocking=True), starts, tensors)


def _views(
    buffer: torch.Tensor, starts: Sequence[int], like: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return views of a vector of bytes, of the types and shapes of `like`."""
    return [
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, like, strict=False)
    ]


class SideStream:
    """A stream of copies between host and device that overlaps with the computation; on a CPU
    copies are synchronous."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if use_cuda() else None

    @contextlib.contextmanager
    def to_host(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Let the body copy `tensors` to the host. The computation does not wait for the copies.
        The caller may free the memory of the tensors at once: the allocator reuses it only after
        the copies."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        for tensor in tensors:
            tensor.record_stream(self._stream)

    @contextlib.contextmanager
    def to_device(self) -> Iterator[None]:
        """Let the body copy from the host. The computation that follows waits for the copies."""
        if self._stream is None:
            yield
            return
        # The memory was allocated on the stream of the computation, which may still use it.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)


# ---------------------------------------------------------------- profiling

_NO_RANGE = contextlib.nullcontext()
_recording_ranges = False


@contextlib.contextmanager
def recorded_ranges() -> Iterator[None]:
    """Let `named_range` mark its bodies while this body runs."""
    global _recording_ranges
    _recording_ranges = True
    try:
        yield
    finally:
        _recording_ranges = False


def ranges_are_recorded() -> bool:
    """Return whether `named_range` marks its bodies now."""
    return _recording_ranges


def named_range(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a context whose body bears the name in traces: those of torch.profiler and, by an NVTX
    range, of Nsight Systems on a GPU. It does nothing outside of `recorded_ranges`."""
    return _range(name) if _recording_ranges else _NO_RANGE


@contextlib.contextmanager
def _range(name: str) -> Iterator[None]:
    with record_function(name):
        if not use_cuda():
            yield
            return
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


def time_mark() -> Any:
    """Return a point of time for `seconds_between`: on a GPU the end of the work that is queued
    now, on a CPU now."""
    if use_cuda():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two marks. On a GPU the work before them must be done
    (`synchronize`)."""
    return float(start.elapsed_time(end)) / 1000 if use_cuda() else float(end - start)


def traced_activities() -> list[ProfilerActivity]:
    """Return what torch.profiler records: the operators of the CPU, and on a GPU its kernels and
    copies too."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if use_cuda() else [])]


_MOST_ALLOCATIONS = 1_000_000
"""Entries of the allocator's history; the oldest are dropped."""


def record_allocations() -> None:
    """Begin the history of the GPU allocator, with stacks of Python code; do nothing on a CPU."""
    if use_cuda():
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_ALLOCATIONS)


def stop_allocations() -> None:
    """End the history, and drop it."""
    if use_cuda():
        torch.cuda.memory._record_memory_history(enabled=None)


def write_allocations(path: Path) -> None:
    """Write the history so far, for https://pytorch.org/memory_viz; do nothing on a CPU."""
    if use_cuda():
        torch.cuda.memory._dump_snapshot(str(path))
