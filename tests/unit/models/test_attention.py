"""Attention over packed sequences with grouped queries: the call of torch that a GPU has a kernel
for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_mc import platform
from rlhf_mc.models import layers
from rlhf_mc.models.layers import PackedAttention, pack

LENS = (7, 7, 4)
HEADS = 4
SIZE = 8


def attend(kv_heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the output for fixed q, k and v, and their gradients."""
    draw = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(sum(LENS), 1, heads, SIZE, generator=draw).to(dtype).requires_grad_()
        for heads in (HEADS, kv_heads, kv_heads)
    ]
    config = SimpleNamespace(
        attention_dropout=0.0, window_size=None, window_attn_skip_freq=None, softmax_type="vanilla"
    )
    attention = PackedAttention(config, 1, pg_collection=SimpleNamespace(tp=None))
    out = attention(*parts, None, packed_seq_params=pack(LENS))
    upstream = torch.randn(out.shape, generator=draw).to(dtype)
    return out.detach(), *torch.autograd.grad(out, parts, upstream)


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "key_heads"),
    [
        (2, torch.float32, HEADS),
        (1, torch.float32, HEADS),
        (HEADS, torch.float32, HEADS),
        (2, torch.bfloat16, 2),
    ],
)
def test_a_gpu_gets_equal_heads_in_float32_and_the_same_values(
    kv_heads: int, dtype: torch.dtype, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int, bool]] = []
    original = layers.scaled_dot_product_attention

    def recorded(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: Any
    ) -> torch.Tensor:
        calls.append((k.shape[1], v.shape[1], settings["enable_gqa"]))
        out: torch.Tensor = original(q, k, v, **settings)
        return out

    wanted = attend(kv_heads, dtype)
    monkeypatch.setattr(platform, "use_cuda", lambda: True)
    monkeypatch.setattr(layers, "scaled_dot_product_attention", recorded)
    found = attend(kv_heads, dtype)
    # a call for each run of equal lengths
    assert calls == [(key_heads, key_heads, key_heads != HEADS)] * 2
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
