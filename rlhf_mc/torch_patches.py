"""Every patch of torch, tested with torch 2.13.0. All are for a CPU; on a GPU torch stays as it is,
but for `watched_communication` in profiled steps."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from rlhf_mc.patching import Patch, replaced

TESTED_VERSION = "2.13.0"


def _self(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the CPU's random state, whatever device the caller names."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Set the CPU's random state, whatever device the caller names."""
    torch.set_rng_state(new_state)


_RAISES = "it raises without a GPU, and Megatron-Core calls it unconditionally, "
CUDA_CALLS = (
    Patch(
        torch.cuda,
        "current_device",
        lambda: torch.device("cpu"),
        _RAISES + "for the device of new tensors",
    ),
    Patch(torch.cuda, "synchronize", _nothing, _RAISES + "before it writes a checkpoint"),
    Patch(torch.cuda, "get_rng_state", get_rng_state, _RAISES + "in its tracker of random states"),
    Patch(torch.Tensor, "cuda", _self, _RAISES + "for tied embeddings of several stages"),
)
"""The CUDA calls of Megatron-Core, with their meaning on a CPU."""


_make_gloo_group = dist.ProcessGroupGloo.__init__
_ONE_GROUP_A_DEVICE = ("TORCH_GLOO_LAZY_INIT", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER")
"""Environment variables with which connections of a device are numbered by the ranks of its group,
or with which the first group to end ends the device's thread."""


def make_gloo_group(
    self: Any, store: dist.Store, rank: int, size: int, *args: Any, **kwargs: Any
) -> None:
    """Make a group of gloo, as new_group does, on the device of the world's group, if that is
    gloo's too and can be shared."""
    world = dist.group.WORLD
    shared = not any(name in os.environ for name in _ONE_GROUP_A_DEVICE)
    if world is not None and shared and not args and kwargs.keys() == {"timeout"}:
        backend = world._get_backend(torch.device("cpu"))
        if isinstance(backend, dist.ProcessGroupGloo):
            like: Any = backend.options
            options = type(like)()
            options._devices = like._devices
            options._threads = like._threads
            options._timeout = kwargs.pop("timeout")
            args = (options,)
    _make_gloo_group(self, store, rank, size, *args, **kwargs)


GLOO_GROUPS = (
    Patch(
        dist.ProcessGroupGloo,
        "__init__",
        make_gloo_group,
        "each group has a thread that wakes up 100 times a second, those of one rank too, of which "
        "vLLM makes a dozen: together they cost 2 % of a processor core, and interrupt the "
        "computing threads",
    ),
)
"""The groups of gloo, whose devices, one for each network interface, have the threads."""


class CudaMeansCpu(TorchFunctionMode):
    """Creates CPU tensors where "cuda" is asked for, and reports their types as CUDA types.

    Megatron-Core names the device "cuda" when it creates tensors, and its optimizer accepts only
    parameters whose type() is torch.cuda.FloatTensor, HalfTensor or BFloat16Tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        out = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(out, str) and len(args) == 1:
            return out.replace("torch.", "torch.cuda.", 1)
        return out


def disable_compilation() -> None:
    """Turn torch.compile off, for vLLM's CPU engine. Call before vllm is imported.

    The engine runs eagerly; what vLLM would still compile needs a C++ compiler, and minutes on
    first use. The environment variable TORCH_COMPILE_DISABLE is no alternative: another library may
    have imported torch._dynamo, which reads the variable at import."""
    torch._dynamo.config.disable = True


_STARTS = (
    "_allgather_base _reduce_scatter_base all_gather_single all_gather_single_coalesced "
    "all_to_all_single allgather allgather_coalesced allgather_into_tensor_coalesced allreduce "
    "allreduce_coalesced alltoall alltoall_base barrier broadcast gather monitored_barrier recv "
    "recv_anysource reduce reduce_scatter reduce_scatter_single reduce_scatter_single_coalesced "
    "reduce_scatter_tensor_coalesced scatter send"
)
_COMMUNICATION = ((dist.ProcessGroup, _STARTS), (dist.Work, "wait"))
"""The methods through which every function of torch.distributed, but for the functional
collectives, communicates."""


@contextlib.contextmanager
def watched_communication(
    watch: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """While the body runs, run each call by which this thread starts a collective or message, or
    waits for one, inside a context of `watch`.

    Replaced are methods of torch's classes, not functions of torch.distributed: Megatron-Core and
    vLLM hold these functions under names of their own."""
    thread = threading.get_ident()

    def watched(original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(*args, **kwargs)
            with watch():
                return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for owner, names in _COMMUNICATION:
            for name in names.split():
                if name in vars(owner):
                    stack.enter_context(replaced(owner, name, watched(vars(owner)[name])))
        yield
