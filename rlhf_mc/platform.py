"""The only file that knows CUDA from CPU: device, communication backend, synchronisation, memory,
and what makes Megatron-Core run on a CPU. Nothing about models or the loop lives here.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def use_cuda() -> bool:
    """Whether this process trains and generates on a GPU. RLHF_MC_DEVICE=cpu forces the CPU on a machine with GPUs."""
    return torch.cuda.is_available() and os.environ.get("RLHF_MC_DEVICE", "") != "cpu"


def device() -> torch.device:
    """The device of this process: one GPU per local rank, or the CPU."""
    if use_cuda():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def backend() -> str:
    """torch.distributed's backend: NCCL for tensors on GPUs and gloo for the small CPU messages beside them."""
    return "cpu:gloo,cuda:nccl" if use_cuda() else "gloo"


def set_device() -> None:
    """Binds this process to its GPU; nothing to do on a CPU."""
    if use_cuda():
        torch.cuda.set_device(device())


def synchronize() -> None:
    """Waits for the device's queued work, so that a clock read next is true."""
    if use_cuda():
        torch.cuda.synchronize()


def peak_memory_gb() -> float:
    """GiB: largest memory so far of this process's tensors on its GPU, or of the whole process on a CPU."""
    if use_cuda():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def host_bytes(num_bytes: int) -> torch.Tensor:
    """So many bytes of host memory, uninitialised; on a GPU page-locked, so that copies run by themselves."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=use_cuda())


class SideStream:
    """Copies between host and device that run beside the computation on a GPU, in the order in which they are given;
    on a CPU they are done at once."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if use_cuda() else None

    @contextlib.contextmanager
    def leaving(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """The body copies these to the host. Their memory may be given back at once: it serves nobody else before it
        is copied. What is computed next does not wait for it."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        for tensor in tensors:
            tensor.record_stream(self._stream)

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """The body copies from the host. What is computed next waits for it."""
        if self._stream is None:
            yield
            return
        # The memory was given by the stream of the computation, and may have been in use there until now.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)


class _CudaMeansCpu(TorchFunctionMode):
    """Megatron-Core names "cuda" outright when it creates tensors and checks their type by its string.
    Under this mode those tensors are CPU tensors, and the strings are what Megatron-Core looks for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        out = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(out, str) and len(args) == 1:
            return out.replace("torch.", "torch.cuda.", 1)
        return out


@contextlib.contextmanager
def megatron() -> Iterator[None]:
    """Surrounds calls into Megatron-Core. Does nothing on a GPU; never surrounds vLLM, which must see the truth."""
    if use_cuda():
        yield
        return
    _stub_cuda_calls()
    with _CudaMeansCpu():
        yield


def _stub_cuda_calls() -> None:
    """Replaces, once, the torch.cuda calls that Megatron-Core makes unconditionally by their CPU meaning."""
    if getattr(torch.cuda, "_rlhf_mc_stubs", False):
        return
    cpu = torch.device("cpu")

    def same(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(new_state)

    stubs: dict[str, Any] = {
        "current_device": lambda: cpu,
        "synchronize": nothing,
        "empty_cache": nothing,
        "get_rng_state": get_state,
        "set_rng_state": set_state,
        "_rlhf_mc_stubs": True,
    }
    for name, stub in stubs.items():
        setattr(torch.cuda, name, stub)
    torch.cuda.random.get_rng_state = get_state
    torch.cuda.random.set_rng_state = set_state
    torch.Tensor.cuda = same  # type: ignore[method-assign]
    torch.nn.Module.cuda = same  # type: ignore[method-assign]

    import megatron.core.tensor_parallel.random as mcore_random
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    mcore_random._get_cuda_rng_state = get_state
    mcore_random._set_cuda_rng_state = set_state
    # Experts' token counts are on the host already: no stream brings them there.
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = cpu
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _splits_as_numpy
    _let_gloo_split_unevenly()


def _let_gloo_split_unevenly() -> None:
    """gloo gathers and scatters parts of one size alone; tokens that experts get from tensor-parallel ranks differ."""
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_any(part: Any, group: Any, sizes: list[int] | None = None, use_global_buffer: bool = False) -> Any:
        if sizes is None or len(set(sizes)) == 1:
            return gather(part, group, sizes, use_global_buffer)
        out = part.new_empty(sum(sizes), *part.shape[1:])
        to_each = torch.cat([part] * group.size())
        torch.distributed.all_to_all_single(out, to_each, sizes, [len(part)] * group.size(), group=group)
        return out

    def reduce_scatter_any(
        whole: Any, group: Any, sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> Any:
        if sizes is None or len(set(sizes)) == 1:
            return reduce_scatter(whole, group, sizes, use_global_buffer)
        total = whole.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(sizes)[group.rank()].contiguous()

    mappings._gather_along_first_dim = gather_any
    mappings._reduce_scatter_along_first_dim = reduce_scatter_any


def _splits_as_numpy(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """What Megatron-Core's dispatcher of tokens to experts makes of its split sizes when it brings them to the host."""
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        if isinstance(splits := getattr(dispatcher, name), torch.Tensor):
            setattr(dispatcher, name, splits.numpy())
    return tokens_per_expert
