"""Norms for Megatron-Core's local layers, whose own know neither sequence parallelism nor a weight around zero."""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.RMSNorm):
    """x / rms(x) * weight. With sequence parallelism each rank normalises its part of the tokens, and Megatron-Core
    adds up the gradients of the weights so marked."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        _mark_sequence_parallel(self.weight, config)


class ZeroCenteredRMSNorm(torch.nn.Module):
    """x / rms(x) * (1 + weight), in float32: gemma's norm. Megatron-Core has it in Transformer Engine's layers alone;
    its norm for local layers refuses layernorm_zero_centered_gamma."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        _mark_sequence_parallel(self.weight, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> the same shape and type."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


def _mark_sequence_parallel(weight: torch.Tensor, config: Any) -> None:
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
