"""Every patch of torch, tested with torch 2.13.0. All are for a CPU; on a GPU torch stays as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rlhf_mc.patching import Patch

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
    Patch(torch.cuda, "current_device", lambda: torch.device("cpu"), _RAISES + "for the device of new tensors"),
    Patch(torch.cuda, "synchronize", _nothing, _RAISES + "before it writes a checkpoint"),
    Patch(torch.cuda, "get_rng_state", get_rng_state, _RAISES + "in its tracker of random states"),
    Patch(torch.Tensor, "cuda", _self, _RAISES + "for tied embeddings of several stages"),
)
"""The CUDA calls of Megatron-Core, with their meaning on a CPU."""


class CudaMeansCpu(TorchFunctionMode):
    """Creates CPU tensors where "cuda" is asked for, and reports their types as CUDA types.

    Megatron-Core names the device "cuda" when it creates tensors, and its optimizer accepts only parameters whose
    type() is torch.cuda.FloatTensor, HalfTensor or BFloat16Tensor."""

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

    The engine runs eagerly; what vLLM would still compile needs a C++ compiler, and minutes on first use. The
    environment variable TORCH_COMPILE_DISABLE is no alternative: another library may have imported torch._dynamo, which
    reads the variable at import."""
    torch._dynamo.config.disable = True
