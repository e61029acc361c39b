"""The number of CUDA's hardware work queues, which the driver reads from the environment when it starts."""

from __future__ import annotations

import logging
import os

_log = logging.getLogger(__name__)
_NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


def set_cuda_connections(most_tensor_parallel: int) -> None:
    """Let kernels start in the order in which they are issued, if a model is tensor parallel. Call it before torch is
    imported. most_tensor_parallel: the largest tensor-parallel size of a model.

    Megatron-Core and Transformer Engine issue a tensor-parallel collective before the matrix product that hides it.
    With several work queues the product may start first (megatron/core/tensor_parallel/layers.py): slower, not wrong.
    GPUs from Blackwell on do not need it. Without tensor parallelism nothing relies on the order, and several queues
    overlap more. A value in the environment stays, with a warning."""
    if most_tensor_parallel == 1:
        return
    value = os.environ.setdefault(_NAME, "1")
    if value != "1":
        _log.warning(
            f"the environment variable {_NAME} is {value}, which is used; with tensor parallelism 1 is right on GPUs"
            " before Blackwell: communication overlaps with computation only if kernels start in order"
        )
