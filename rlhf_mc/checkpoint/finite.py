"""Weights are checked to be finite once, when they have been loaded. One sum for each tensor tells; values are counted
only where it is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from rlhf_mc.config.errors import UserError
from rlhf_mc.topology.consensus import on_every_rank


def num_not_finite(tensor: torch.Tensor) -> int:
    """Return how many values are NaN or infinite."""
    # In the tensor's own type, which is the fast sum on a CPU; one that overflows is looked at more closely.
    if tensor.sum().isfinite():
        return 0
    return int((~tensor.isfinite()).sum())


def check_finite(params: Mapping[str, torch.Tensor], describe: Callable[[str, int], str]) -> None:
    """Raise a UserError on every rank where a parameter of any rank is not finite. describe: the message, from the
    local name of the first such parameter and how many of its values are not finite. Every rank must call it."""

    def check() -> None:
        for name, param in params.items():
            if count := num_not_finite(param):
                raise UserError(describe(name, count))

    on_every_rank(check)
