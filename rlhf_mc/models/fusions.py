"""Settings of Megatron-Core that compute the same model with fewer kernels. All are for GPUs: on a CPU the model is
computed operation by operation, so that its numbers are the same with every compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import layers

from rlhf_mc import platform
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.models.transformer_engine import uses_transformer_engine


def fusions(shape: ModelShape) -> dict[str, Any]:
    """Return the settings of TransformerConfig for the fusions of this process's device.

    Without biases and dropout, the residual addition (bias_dropout_fusion) is one kernel as it is.
    persist_layer_norm is about LayerNorm, masked_softmax_fusion about an attention that no model here uses."""
    transformer_engine = uses_transformer_engine()
    return {
        **(_fused_activation(shape) if platform.use_cuda() else {}),
        # Megatron-Core's fused rotary embedding is a kernel of Transformer Engine.
        "apply_rope_fusion": transformer_engine,
        # The matrix product that computes a weight's gradient adds it to main_grad. Local layers need Apex's kernel.
        "gradient_accumulation_fusion": transformer_engine
        or (platform.use_cuda() and layers._grad_accum_fusion_available),
        # Otherwise Transformer Engine overwrites main_grad in the first micro-batch of a step, instead of adding to
        # it, and keeps an fp8 copy of every weight, which no offload would free.
        "disable_parameter_transpose_cache": transformer_engine,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }


def _fused_activation(shape: ModelShape) -> dict[str, Any]:
    """Return the settings that fuse the activation with its gate, the bias, and an expert's weight.

    Megatron-Core's fused function for F.gelu is the tanh approximation. For experts it has none."""
    if shape.activation == "silu":
        return {"bias_activation_fusion": True}
    if shape.has_experts:
        return {}
    return {"bias_activation_fusion": True, "activation_func": torch.nn.functional.gelu}
