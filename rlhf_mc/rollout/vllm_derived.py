"""Tensors that vLLM's attentions derive from loaded weights, which a weight update does not write:
the two halves of kv_b_proj, transposed, by which latent attention decodes on latent vectors, and
copies of attention sinks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.attention import MLAAttention

from rlhf_mc import platform

_DERIVED = (".W_UK_T", ".W_UV")


def loaded_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the name and the tensor of each parameter that a weight update writes."""
    return (pair for pair in model.named_parameters() if not pair[0].endswith(_DERIVED))


@torch.no_grad()
def derive_weights(model: torch.nn.Module) -> None:
    """Derive the tensors again, in place. For unquantized latent attention vLLM 0.32 has views of
    the weights, and nothing changes."""
    for module in model.modules():
        if isinstance(module, MLAAttention):
            module.process_weights_after_loading(module.kv_b_proj.weight.dtype)
        elif hasattr(module, "sinks") and hasattr(module, "attn"):
            _renew_sinks(module)


def _renew_sinks(module: Any) -> None:
    """Let the attention read new sinks. FlashInfer's holds a float32 copy from the end of loading,
    and captured graphs read it; on a CPU the first pass copies float16 ones."""
    if platform.use_cuda():
        module.attn.impl.process_weights_after_loading(module.sinks.dtype)
    else:
        module.attn.impl.sinks = module.sinks
