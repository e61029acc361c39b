"""Checks of loaded weights: for values that are not finite (one sum per tensor, and a count if the
sum is not finite), and for matrices of zeros, which no trained model has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from rlhf_mc.config.errors import UserError
from rlhf_mc.topology.consensus import gather_objects, on_every_rank

_NEVER_ZERO = (
    "word_embeddings.weight",
    "output_layer.weight",
    "linear_qkv.weight",
    "mlp.linear_fc1.weight",
)
"""Endings of the names of parameters that are zero in no trained model. Biases, norms, routers,
pruned experts and the second matrix of an added identity block may be."""


def num_not_finite(tensor: torch.Tensor) -> int:
    """Return the number of NaN and infinite values."""
    # The sum in the tensor's own dtype is fast on a CPU. If it overflows, the values are counted.
    if tensor.sum().isfinite():
        return 0
    return int((~tensor.isfinite()).sum())


def check_finite(params: Mapping[str, torch.Tensor], describe: Callable[[str, int], str]) -> None:
    """Raise UserError on every rank if a parameter of any rank is not finite. describe: returns the
    message for the local name of the first such parameter and the number of its values that are not
    finite. Every rank must call it."""

    def check() -> None:
        for name, param in params.items():
            if count := num_not_finite(param):
                raise UserError(describe(name, count))

    on_every_rank(check)


def check_not_zero(params: Mapping[str, torch.Tensor], where: Callable[[str], str]) -> None:
    """Raise UserError on every rank if a matrix is zero on all ranks that hold a part of it. where:
    returns a local name's tensors and their place, alike on these ranks. Every rank must call
    it."""
    # A value head, of which len(param) is 1, may be zero.
    matrices = {
        where(name): param
        for name, param in params.items()
        if name.endswith(_NEVER_ZERO) and len(param) > 1
    }
    zero = {index for index, param in matrices.items() if not param.any()}
    suspects = set().union(*gather_objects(zero))
    if suspects:
        suspects -= set().union(*gather_objects(matrices.keys() - zero))
    if suspects:
        more = f" (and {len(suspects) - 1} more)" if len(suspects) > 1 else ""
        raise UserError(
            f"{min(suspects)}{more}: all values are zero; the checkpoint has not been written "
            "completely"
        )
