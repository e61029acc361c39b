"""A mixture-of-experts kernel on plain weights, for vLLM on a CPU (vllm_patches.py). vLLM's own kernel takes repacked
weights, which a weight update could not write.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn.functional import gelu, linear, silu

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": functools.partial(gelu, approximate="tanh"),
}
"""Activation functions, by vLLM's names."""


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
    """Write into out [T, hidden] each token's sum over its experts of weight x expert(hidden [T, hidden]).

    w13 [experts, 2 x ffn, hidden]: gate, then up; w2 [experts, hidden, ffn]; topk_weights and topk_ids [T, k].
    The arguments are as for vllm._custom_ops.cpu_fused_moe; `isa`, which selects its kernel, is ignored."""
    assert w13_bias is None and w2_bias is None
    out.zero_()
    for expert in topk_ids.unique().tolist():
        token, slot = torch.where(topk_ids == expert)
        gate, up = linear(hidden[token], w13[expert]).chunk(2, dim=-1)
        result = linear(ACTIVATIONS[activation](gate) * up, w2[expert])
        if not skip_weighted:
            result = result * topk_weights[token, slot, None]
        out.index_add_(0, token, result.to(out.dtype))
