"""Operations that a CPU computes with fewer passes over memory than Megatron-Core's local layers
and torch do: the gate of the feed-forward part and rotary positions, which megatron_patches.py puts
in place, and the norm of layers.py.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP

silu_backward = torch.ops.aten.silu_backward.grad_input


class _GatedSilu(torch.autograd.Function):
    """silu(a) * b of x = [a, b]. The backward pass writes both halves of the gradient into one
    tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        gate, linear = x.chunk(2, dim=-1)
        activated = torch.nn.functional.silu(gate)
        ctx.save_for_backward(x, activated)
        return activated * linear

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, activated = ctx.saved_tensors
        gate, linear = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        grad_gate, grad_linear = out.chunk(2, dim=-1)
        torch.mul(activated, grad, out=grad_linear)
        silu_backward(grad * linear, gate, grad_input=grad_gate)
        return out


class GatedSiluMLP(MLP):
    """Megatron-Core's MLP but for its activation, which adds an offset of 0 and joins the halves of
    the gradient."""

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output [T, 1, hidden], and its bias, which is not added."""
        assert per_token_scale is None, "it is of experts"
        x, bias = self.linear_fc1(hidden_states)
        out: tuple[torch.Tensor, torch.Tensor | None] = self.linear_fc2(
            _GatedSilu.apply(x if bias is None else x + bias)
        )
        return out


class _RMSNorm(torch.autograd.Function):
    """y = w h, h = x / r, r = sqrt(mean(x^2) + eps). dL/dw = sum of g h over the tokens;
    dL/dx = (w g - h mean(w g h)) / r. torch has no CPU kernel for it: its backward pass takes four
    times as long."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        h = x * scale
        product = (grad * h).reshape(-1, x.shape[-1])
        mean = torch.mv(product, weight).div_(x.shape[-1]).view(scale.shape)
        grad_weight = product.sum(0) if ctx.needs_input_grad[1] else None
        return (
            (grad * weight).mul_(scale).addcmul_(h, mean.mul_(scale), value=-1.0),
            grad_weight,
            None,
        )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, over the last dimension of x [..., n] float32;
    weight [n] float32."""
    out: torch.Tensor = _RMSNorm.apply(x, weight, eps)
    return out


def rotary_table(angles: torch.Tensor) -> torch.Tensor:
    """Return a table [T, 1, 1, 3 * n] of the angles [T, n] for `rotate`: the cosines twice, and the
    sines."""
    cos = angles.cos()
    return torch.cat((cos, cos, angles.sin()), dim=-1)[:, None, None, :]


def _rotated(x: torch.Tensor, table: torch.Tensor, sign: float) -> torch.Tensor:
    """Return x [T, 1, heads, 2 * n], whose halves are the two coordinates, rotated by sign *
    angle."""
    cos, sin = table.split((x.shape[-1], x.shape[-1] // 2), dim=-1)
    out = x * cos  # both halves at once: an operation on rows of n elements costs by the row
    a, b = x.chunk(2, dim=-1)
    first, second = out.chunk(2, dim=-1)
    first.addcmul_(b, sin, value=-sign)
    second.addcmul_(a, sin, value=sign)
    return out


class _Rotation(torch.autograd.Function):
    """The gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(table)
        return _rotated(x, table, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _rotated(grad, ctx.saved_tensors[0], -1.0), None


def rotate(
    x: torch.Tensor,
    table: torch.Tensor,
    config: Any,
    cu_seqlens: Any = None,
    mscale: float = 1.0,
    **_: Any,
) -> torch.Tensor:
    """Return x [T, 1, heads, head_dim] with rotary positions, from a table of `rotary_table`. It
    takes the place of Megatron-Core's apply_rotary_pos_emb. mscale: factor of cosines and sines. In
    latent attention the coordinates are neighbours in x, and halves of the result."""
    if config.multi_latent_attention:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    table = (table if mscale == 1.0 else table * mscale).to(x.dtype)
    rotated = 2 * table.shape[-1] // 3
    if rotated < x.shape[-1]:  # the first dimensions of each head
        return torch.cat((_Rotation.apply(x[..., :rotated], table), x[..., rotated:]), dim=-1)
    out: torch.Tensor = _Rotation.apply(x, table)
    return out
