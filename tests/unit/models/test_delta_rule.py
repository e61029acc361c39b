"""The chunked gated delta rule (models/gated_delta_net.py) against its recurrence, token by token
in float64."""

from __future__ import annotations

import pytest
import torch

from rlhf_mc.models.gated_delta_net import delta_rule


def by_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    state = torch.zeros(len(q), v.shape[2], k.shape[-1], v.shape[-1], dtype=q.dtype)
    outputs = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, None].exp()
        new = beta[:, t, :, None] * (v[:, t] - torch.einsum("shk,shkv->shv", k[:, t], state))
        state = state + torch.einsum("shk,shv->shkv", k[:, t], new)
        outputs.append(torch.einsum("shk,shkv->shv", q[:, t], state) / q.shape[-1] ** 0.5)
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("length", [1, 3, 64, 65, 150])
def test_outputs_and_gradients_are_those_of_the_recurrence(length: int) -> None:
    torch.manual_seed(length)
    q, k = torch.randn(2, 2, length, 2, 5, dtype=torch.float64).unbind()
    v = torch.randn(2, length, 4, 6, dtype=torch.float64)
    decay = -torch.rand(2, length, 4, dtype=torch.float64)
    decay[:, ::7] = -30.0  # of a token that all but ends what was before
    beta = torch.rand(2, length, 4, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v, decay, beta)]
    grad = torch.randn_like(v)
    found = delta_rule(*inputs)
    wanted = by_token(*inputs)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-4)
    gradients = (torch.autograd.grad(out, inputs, grad.to(out.dtype)) for out in (found, wanted))
    for one, other in zip(*gradients, strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()
