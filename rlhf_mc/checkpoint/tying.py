"""Whether a checkpoint's language-model head is its embedding. What follows for the model is in hf_format.py."""

from __future__ import annotations

import math
from typing import Any

import torch

COMPARED_BYTES = 16 << 20
"""Of each of two tensors, how much is compared at a time."""


def are_equal(first: Any, second: Any) -> bool:
    """Return whether two slices of safetensors files have the same shape and values, as transformers and vLLM compare
    them, but with a few rows of both in memory at a time."""
    shape = first.get_shape()
    if shape != second.get_shape() or not shape:
        return False
    step = max(1, COMPARED_BYTES // max(1, 4 * math.prod(shape[1:])))
    parts = (slice(start, start + step) for start in range(0, shape[0], step))
    return all(torch.equal(first[part].float(), second[part].float()) for part in parts)
