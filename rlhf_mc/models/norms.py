"""Norms for Megatron-Core's local layers. Its own norm for them supports neither sequence parallelism nor zero-centred
weights."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_mc import platform
from rlhf_mc.models.cpu_operations import rms_norm


class RMSNorm(torch.nn.RMSNorm):
    """x / rms(x) * weight. With sequence parallelism each rank normalises its part of the tokens; the weight is marked,
    so that Megatron-Core sums its gradient over the tensor-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self._eps = eps
        _mark_sequence_parallel(self.weight, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised x, of the same shape [..., hidden] and type."""
        if platform.use_cuda() or not x.dtype == self.weight.dtype == torch.float32:
            return super().forward(x)
        return rms_norm(x, self.weight, self._eps)


class ZeroCenteredRMSNorm(torch.nn.Module):
    """x / rms(x) * (1 + weight), in float32: gemma's norm. Megatron-Core has it only in Transformer Engine's layers:
    its norm for local layers rejects layernorm_zero_centered_gamma."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        _mark_sequence_parallel(self.weight, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised x, of the same shape [..., hidden] and type."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


def _mark_sequence_parallel(weight: torch.Tensor, config: Any) -> None:
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
