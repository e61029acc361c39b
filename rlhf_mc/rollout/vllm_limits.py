"""The version of vLLM, and the models and layouts that it does not run. Nothing here imports it."""

from __future__ import annotations

import torch

from rlhf_mc import platform
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.errors import NodeError, UserError
from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.reshard.layout import check_vllm

FP8_CAPABILITY = (8, 9)
"""Compute capability from which GPUs multiply in fp8. Below it, vLLM's kernels would not quantize inputs."""
TESTED_VERSION = "0.32.0"
"""The only version that rollout/vllm_patches.py accepts."""


def check_rollout_layout(shape: ModelShape, cfg: RolloutConfig) -> None:
    """Raise UserError where vLLM cannot shard the model so, or has no kernel for its head dimension or in fp8."""
    check_vllm(shape, cfg.tensor_model_parallel_size)
    if cfg.quantization is not None:
        _check_fp8(shape)
    if not platform.use_cuda() and shape.head_dim % 32:
        raise UserError(f"model.path: head dimension {shape.head_dim}; vLLM's CPU attention takes multiples of 32")


def _check_fp8(shape: ModelShape) -> None:
    """Raise UserError where this process cannot generate with fp8 weights. On a CPU, torch's kernels can."""
    key = "rollout.quantization is 'fp8'"
    if shape.has_experts:
        raise UserError(f"model.path: a mixture-of-experts model, and {key}; experts are not quantized: set it to null")
    if platform.use_cuda() and (capability := torch.cuda.get_device_capability()) < FP8_CAPABILITY:
        present = ".".join(map(str, capability))
        needed = ".".join(map(str, FP8_CAPABILITY))
        raise NodeError(f"{key}; this GPU has compute capability {present}, and fp8 needs {needed}: set it to null")
