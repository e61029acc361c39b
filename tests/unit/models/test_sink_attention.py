"""Attention with sinks and sliding windows (models/layers.py) against all scores, computed one
sequence at a time."""

from __future__ import annotations

import pytest
import torch

from rlhf_mc.models.layers import _attend_with_sinks


def by_scores(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Return the attention, as transformers computes it: the sink is a column of the softmax that
    is dropped."""
    length, heads, head_dim = q.shape[1:]
    k, v = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("sihd,sjhd->shij", q, k) * head_dim**-0.5
    row = torch.arange(length)[:, None]
    column = torch.arange(length)[None]
    hidden = (column > row) | (column <= row - (window or length))
    scores = scores.masked_fill(hidden, -torch.inf)
    column_of_sinks = sinks[:, None, None].expand(len(q), -1, length, 1)
    weights = torch.cat((scores, column_of_sinks), dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("shij,sjhd->sihd", weights, v)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_attention_and_gradients_are_those_of_all_scores(length: int, window: int | None) -> None:
    torch.manual_seed(length)
    q = torch.randn(2, length, 6, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, length, 2, 8, dtype=torch.float64).unbind()
    sinks = torch.randn(6, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v, sinks)]
    grad = torch.randn(2, length, 6, 8, dtype=torch.float64)
    found = _attend_with_sinks(*inputs, window)
    wanted = by_scores(*inputs, window)
    torch.testing.assert_close(found, wanted)
    for one, other in zip(
        torch.autograd.grad(found, inputs, grad),
        torch.autograd.grad(wanted, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_places_before_a_sequence_have_no_weight_in_16_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 9, 2, 64, dtype=dtype)
    k, v = torch.randn(2, 1, 9, 1, 64, dtype=dtype).unbind()
    sinks = torch.tensor([-5.0, 2.0], dtype=dtype)
    wanted = by_scores(*(x.double() for x in (q, k, v, sinks)), 4)
    torch.testing.assert_close(
        _attend_with_sinks(q, k, v, sinks, 4).double(), wanted, atol=2e-2, rtol=2e-2
    )
