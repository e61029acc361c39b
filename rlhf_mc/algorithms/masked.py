"""Sums, means, variances and whitening over the elements that a mask selects, in padded [S, L] matrices.

Elements outside the mask are never read into a result, whatever they hold (NaN included). Loss
aggregation is not here: losses run on ragged tokens, see losses.py.
"""

from __future__ import annotations

import torch

WHITEN_EPS = 1e-8


def masked_sum(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum of x where mask is True. x, mask: same shape, mask bool; dim None: over everything. Empty: 0."""
    kept = torch.where(mask, x, torch.zeros_like(x))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Mean of x where mask is True; arguments as in masked_sum. Empty: 0."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def masked_var(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Unbiased variance (divided by count - 1) of x where mask is True, a scalar. 0 or 1 elements: 0."""
    squares = (x - masked_mean(x, mask)).square()
    return masked_sum(squares, mask) / (mask.sum() - 1).clamp(min=1)


def masked_whiten(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the elements where mask is True; 0 elsewhere. [S, L] -> [S, L].

    The variance is the unbiased one, as in verl and TRL. Give it the whole global batch, which every
    rank holds: the result then does not depend on the number of ranks and needs no communication.
    Computed in float64, where sums of equal float32 numbers are exact: equal elements whiten to exactly 0.
    In float32 they would leave the rounding error of their mean, divided by sqrt(1e-8), and Adam, which
    is indifferent to the scale of a gradient, would make a full step of it.
    """
    wide = x.double()
    whitened = (wide - masked_mean(wide, mask)) * torch.rsqrt(masked_var(wide, mask) + WHITEN_EPS)
    return torch.where(mask, whitened, torch.zeros_like(wide)).to(x.dtype)
