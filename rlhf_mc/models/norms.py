"""Norms that Megatron-Core's local layers lack."""

from __future__ import annotations

from typing import Any

import torch


class ZeroCenteredRMSNorm(torch.nn.Module):
    """x / rms(x) * (1 + weight), in float32: gemma's norm. Megatron-Core has it in Transformer Engine's layers alone;
    its norm for local layers refuses layernorm_zero_centered_gamma."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> the same shape and type."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)
