"""Sums, means, variances and whitening over the elements that a mask selects, in padded [S, L] matrices.

Elements outside the mask, NaN included, have no effect on a result. Losses run on ragged tokens and are aggregated in
losses.py.
"""

from __future__ import annotations

import torch

WHITEN_EPS = 1e-8


def masked_sum(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the sum of x where mask is True, 0 without such elements. x, mask: same shape, mask bool. Without dim the
    sum is over all dimensions."""
    kept = torch.where(mask, x, torch.zeros_like(x))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the mean of x where mask is True, 0 without such elements. Arguments as in masked_sum."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def masked_var(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the unbiased variance (divided by count - 1) of x where mask is True, a scalar; 0 for 0 or 1 elements."""
    squares = (x - masked_mean(x, mask)).square()
    return masked_sum(squares, mask) / (mask.sum() - 1).clamp(min=1)


def masked_whiten(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return (x - mean) / sqrt(var + 1e-8) over the elements where mask is True, 0 elsewhere: [S, L].

    The variance is the unbiased one, as in verl and TRL. x is the whole global batch, which every rank has: the result
    does not depend on the number of ranks and needs no communication. It is computed in float64, in which sums of equal
    float32 numbers are exact, so that equal elements whiten to exactly 0. In float32 the rounding error of their mean
    would remain, divided by sqrt(1e-8), and Adam, which is invariant to a gradient's scale, would take a full step.
    """
    wide = x.double()
    whitened = (wide - masked_mean(wide, mask)) * torch.rsqrt(masked_var(wide, mask) + WHITEN_EPS)
    return torch.where(mask, whitened, torch.zeros_like(wide)).to(x.dtype)
