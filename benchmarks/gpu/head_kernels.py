"""The B variant of head.py: the row functions of rlhf_mc/models/heads.py as Triton kernels, one
read of the logits for the statistics, one read and one bfloat16 write for the gradient. Products
stay with cuBLAS. Needs Triton; with TRITON_INTERPRET=1 the kernels run on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

STATISTICS_PASSES = 1.0
"""Reads of float32 logits."""
GRADIENT_PASSES = 1.5
"""Reads of float32 logits, and one write of half their size."""


@triton.jit
def _statistics(
    x_ptr,
    target_ptr,
    out_ptr,
    stride,
    columns,
    out_stride,
    entropy: tl.constexpr,
    block: tl.constexpr,
):
    """Compute a row's statistics relative to the largest logit so far; a larger one scales them."""
    row = tl.program_id(0)
    row_ptr = x_ptr + row.to(tl.int64) * stride
    peak = -1.0e30
    total = 0.0
    weighted = 0.0
    for start in range(0, columns, block):
        at = start + tl.arange(0, block)
        is_column = at < columns
        x = tl.load(row_ptr + at, mask=is_column, other=float("-inf"))
        higher = tl.maximum(peak, tl.max(x, 0))
        scale = tl.exp(peak - higher)
        exp = tl.exp(x - higher)
        if entropy:
            terms = tl.where(is_column, exp * (x - higher), 0.0)
            weighted = scale * (weighted + (peak - higher) * total) + tl.sum(terms, 0)
        total = scale * total + tl.sum(exp, 0)
        peak = higher
    target_x = tl.load(row_ptr + tl.load(target_ptr + row)) - peak
    tl.store(out_ptr + row, peak)
    tl.store(out_ptr + out_stride + row, target_x)
    tl.store(out_ptr + 2 * out_stride + row, total)
    if entropy:
        tl.store(out_ptr + 3 * out_stride + row, weighted)


@triton.jit
def _gradient(
    x_ptr,
    narrow_ptr,
    target_ptr,
    counted_ptr,
    log_z_ptr,
    entropy_ptr,
    grad_log_probs_ptr,
    grad_entropy_ptr,
    stride,
    columns,
    entropy: tl.constexpr,
    block: tl.constexpr,
):
    """Write a block of a row of the gradient."""
    row = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    is_column = at < columns
    x = tl.load(x_ptr + row.to(tl.int64) * stride + at, mask=is_column, other=0.0)
    log_p = x - tl.load(log_z_ptr + row)
    hit = tl.where(at == tl.load(target_ptr + row), tl.load(counted_ptr + row), 0.0)
    grad = tl.exp(log_p)
    if entropy:
        upstream = tl.load(grad_log_probs_ptr + row)
        surprise = (log_p + tl.load(entropy_ptr + row)) * tl.load(grad_entropy_ptr + row)
        grad = hit * upstream - grad * (surprise + upstream)
    else:
        grad = grad - hit
    tl.store(
        narrow_ptr + row.to(tl.int64) * columns + at,
        grad.to(narrow_ptr.dtype.element_ty),
        mask=is_column,
    )


def row_statistics(
    x: torch.Tensor, targets: torch.Tensor, out: torch.Tensor, with_entropy: bool
) -> None:
    """Do as heads.row_statistics, without a write to x."""
    rows, columns = x.shape
    sizes = (x.stride(0), columns, out.stride(0))
    _statistics[rows,](x, targets, out, *sizes, entropy=with_entropy, block=8192, num_warps=8)


def row_gradient(
    x: torch.Tensor,
    targets: torch.Tensor,
    counted: torch.Tensor,
    log_z: torch.Tensor,
    entropy: torch.Tensor,
    grad_log_probs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Do as heads.row_gradient, without a write to x."""
    rows, columns = x.shape
    narrow = torch.empty(rows, columns, dtype=dtype, device=x.device)
    # Autograd may give expanded gradients, whose rows are one number.
    of_rows = [one.contiguous() for one in (targets, counted, log_z, entropy, grad_log_probs)]
    last = log_z if grad_entropy is None else grad_entropy.contiguous()
    block = 4096
    grid = (rows, triton.cdiv(columns, block))
    has_entropy = grad_entropy is not None
    _gradient[grid](
        x,
        narrow,
        *of_rows,
        last,
        x.stride(0),
        columns,
        entropy=has_entropy,
        block=block,
        num_warps=8,
    )
    return narrow
