"""Megatron-Core's linear layers on hidden states [T, 1, hidden], as products of two matrices.

torch.matmul multiplies a 3-D tensor by a matrix as one product of matrices only where the matrix requires a gradient or
the strides say that the leading dimensions are contiguous. Otherwise it is a batched product of T pairs, for which a
CPU, in bfloat16, copies the matrix T times. The embedding of a tensor-parallel model returns [T, 1, hidden] as a
transposed [1, T, hidden]: the stride of the dimension of size 1 is then T * hidden, and a frozen layer meets the second
case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear


def multiply_as_matrices(model: torch.nn.Module) -> None:
    """Let each of the model's linear layers see its input, and in the backward pass its output's gradient, as a
    matrix, whatever the strides of the tensors and whichever weights are frozen. Transformer Engine's layers are left
    alone: they are of classes of their own, and make a matrix of their input themselves."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module._forward_impl = _on_matrices(module._forward_impl)


def _on_matrices(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def on_matrices(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = forward(input.flatten(0, -2), weight, *args, **kwargs)
        return out.unflatten(0, (-1, *input.shape[1:-1]))  # sequence parallelism gathers: more tokens than in the input

    return on_matrices
