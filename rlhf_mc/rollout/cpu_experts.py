"""A mixture-of-experts kernel on plain weights, for vLLM on a CPU (vllm_patches.py). vLLM's own
kernel takes repacked weights, which a weight update could not write.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import gelu, linear, silu


def _gated(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return function(gate) * up


def _clamped(x: torch.Tensor) -> torch.Tensor:
    gate = x[..., 0::2].clamp(max=7.0)
    up = x[..., 1::2].clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: _gated(x, silu),
    "gelu": lambda x: _gated(x, gelu),
    "gelu_tanh": lambda x: _gated(x, lambda gate: gelu(gate, approximate="tanh")),
    "swigluoai": _clamped,
}
"""vLLM's names of activations -> function from gate and up, [T, 2 x ffn], to their product [T,
ffn]."""


def fused_moe(
    out: torch.Tensor,
    hidden: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    isa: str,
    skip_weighted: bool = False,
) -> None:
    """Write into out [T, hidden] each token's sum over its experts of weight x expert(hidden [T,
    hidden]).

    w13 [experts, 2 x ffn, hidden]: gate, then up, or for swigluoai the rows of both in turn; w2
    [experts, hidden, ffn]; biases [experts, rows]; topk_weights and topk_ids [T, k].
    The arguments are as for vllm._custom_ops.cpu_fused_moe; `isa`, which selects its kernel, is
    ignored."""
    out.zero_()
    for expert in topk_ids.unique().tolist():
        token, slot = torch.where(topk_ids == expert)
        gate_up = linear(hidden[token], w13[expert], None if w13_bias is None else w13_bias[expert])
        result = linear(
            ACTIVATIONS[activation](gate_up),
            w2[expert],
            None if w2_bias is None else w2_bias[expert],
        )
        if not skip_weighted:
            result = result * topk_weights[token, slot, None]
        out.index_add_(0, token, result.to(out.dtype))
