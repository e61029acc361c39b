"""The weights of vLLM's latent attention that are no tensors of a checkpoint: the two halves of kv_b_proj, transposed.
By these it decodes on latent vectors.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from vllm.model_executor.layers.attention import MLAAttention

_DERIVED = (".W_UK_T", ".W_UV")


def loaded_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the name and the tensor of each parameter that a weight update writes."""
    return (pair for pair in model.named_parameters() if not pair[0].endswith(_DERIVED))


def derive_decode_weights(model: torch.nn.Module) -> None:
    """Compute the weights of each latent attention that are derived from its kv_b_proj, in place. Of unquantized
    weights vLLM 0.32 has views, and nothing changes."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, MLAAttention):
                module.process_weights_after_loading(module.kv_b_proj.weight.dtype)
