"""The models that vLLM has no kernels for on this machine, and its memory where ranks share a GPU.
Nothing here imports it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from rlhf_mc import platform
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.errors import NodeError, UserError
from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.reshard.layout import Layout

FP8_CAPABILITY = (8, 9)
"""Compute capability from which GPUs multiply in fp8. Below it, vLLM's kernels would not quantize
inputs."""


def check_kernels(shape: ModelShape, cfg: RolloutConfig) -> None:
    """Raise UserError where vLLM has no kernel for the model's head dimension, or in fp8."""
    if cfg.quantization is not None:
        _check_fp8(shape)
    if platform.use_cuda():
        return
    for mixer in shape.mixers:
        if problem := mixer.cpu_obstacle():
            raise UserError(f"model.path: {problem}")


def check_dtype(shape: ModelShape, dtype: str) -> None:
    """Raise UserError where vLLM has no kernel for the model in this type."""
    for mixer in () if platform.use_cuda() else shape.mixers:
        if mixer.cpu_dtypes and dtype not in mixer.cpu_dtypes:
            raise UserError(
                f"actor.megatron.dtype is {dtype!r}; vLLM's CPU kernel of the model takes "
                f"{' or '.join(mixer.cpu_dtypes)}"
            )


def _check_fp8(shape: ModelShape) -> None:
    """Raise UserError where this process cannot generate with fp8 weights. On a CPU, torch's
    kernels can."""
    key = "rollout.quantization is 'fp8'"
    if not all(layer.feed_forward.quantizes for layer in shape.kinds):
        raise UserError(
            f"model.path: a mixture-of-experts model, and {key}; experts are not quantized: set it "
            "to null"
        )
    if platform.use_cuda() and (capability := torch.cuda.get_device_capability()) < FP8_CAPABILITY:
        present = ".".join(map(str, capability))
        needed = ".".join(map(str, FP8_CAPABILITY))
        raise NodeError(
            f"{key}; this GPU has compute capability {present}, and fp8 needs {needed}: set it to "
            "null"
        )


def kv_cache_share(
    cfg: RolloutConfig, layout: Layout, dtype: torch.dtype, storage: Mapping[str, torch.Tensor]
) -> int | None:
    """Return the bytes of this rank's KV cache where ranks share GPUs: half of what the weights of
    the layout leave of its share of rollout.gpu_memory_utilization. The other half is for
    activations, graphs and communicators. Return None where they do not: vLLM then measures it.

    vLLM measures the free memory of the GPU, from which its other ranks take meanwhile, and fails
    where they give some back. They cannot take turns: the ranks of an engine run its profile
    together. storage: tensors that vLLM does not allocate, by its parameters' names. Raise
    UserError if the weights alone take the share."""
    ranks = platform.ranks_per_gpu()
    if ranks == 1:
        return None
    weights = sum(
        math.prod(shape) * layout.itemsize(name, dtype.itemsize)
        for name, shape in layout.shapes.items()
        if name not in storage
    )
    share = cfg.gpu_memory_utilization * platform.device_memory() / ranks
    if share <= weights:
        raise UserError(
            f"rollout.gpu_memory_utilization {cfg.gpu_memory_utilization} gives each of {ranks} "
            f"ranks of a GPU {share / 1e9:.2f} GB, and vLLM's weights take {weights / 1e9:.2f}"
        )
    return int(share - weights) // 2
