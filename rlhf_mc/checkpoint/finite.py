"""Check of loaded weights for values that are not finite: one sum per tensor, and a count if the sum is not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from rlhf_mc.config.errors import UserError
from rlhf_mc.topology.consensus import on_every_rank


def num_not_finite(tensor: torch.Tensor) -> int:
    """Return the number of NaN and infinite values."""
    # The sum in the tensor's own dtype is fast on a CPU. If it overflows, the values are counted.
    if tensor.sum().isfinite():
        return 0
    return int((~tensor.isfinite()).sum())


def check_finite(params: Mapping[str, torch.Tensor], describe: Callable[[str, int], str]) -> None:
    """Raise UserError on every rank if a parameter of any rank is not finite. describe: returns the message for the
    local name of the first such parameter and the number of its values that are not finite. Every rank must call it."""

    def check() -> None:
        for name, param in params.items():
            if count := num_not_finite(param):
                raise UserError(describe(name, count))

    on_every_rank(check)
