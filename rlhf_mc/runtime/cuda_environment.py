"""Environment variables that CUDA's driver and libraries, and Triton, read: set before torch is
imported."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection

_log = logging.getLogger(__name__)


def set_cuda_connections(most_tensor_parallel: int) -> None:
    """Let kernels start in the order in which they are issued, if a model is tensor parallel.
    most_tensor_parallel: the largest tensor-parallel size of a model.

    CUDA_DEVICE_MAX_CONNECTIONS is the number of hardware work queues. Megatron-Core and Transformer
    Engine issue a tensor-parallel collective before the matrix product that hides it. With several
    work queues the product may start first (megatron/core/tensor_parallel/layers.py): slower, not
    wrong. GPUs from Blackwell on do not need it. Without tensor parallelism nothing relies on the
    order, and several queues overlap more."""
    if most_tensor_parallel > 1:
        _default(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "1",
            "with tensor parallelism 1 is right on GPUs before Blackwell: communication overlaps "
            "with computation only if kernels start in order",
        )


def forbid_tf32(dtypes: Collection[str]) -> None:
    """Let float32 matrices be multiplied in float32, if a model has this type. dtypes:
    MegatronConfig.dtype of each model.

    TF32 has 10 mantissa bits. torch does not use it by default. Two libraries do, with errors of
    about 1e-3, as large as trainer.max_rollout_logprob_diff allows in float32. Transformer Engine
    asks cuBLAS for it (common/gemm/cublaslt_gemm.cu). Triton's tl.dot takes it where a kernel names
    no precision, as vLLM's attention and experts do; NVIDIA_TF32_OVERRIDE does not reach Triton's
    kernels."""
    if "float32" not in dtypes:
        return
    _default(
        "NVIDIA_TF32_OVERRIDE",
        "0",
        "a model has dtype float32, and Transformer Engine then multiplies its matrices in TF32: "
        "log-probs differ from vLLM's by about 1e-3",
    )
    _default(
        "TRITON_F32_DEFAULT",
        "ieee",
        "a model has dtype float32, and vLLM's Triton kernels then multiply its matrices in less "
        "precision: log-probs differ from the trainer's",
    )


def _default(name: str, value: str, consequence: str) -> None:
    """Set the variable. Another value in the environment stays, with a warning that names the
    consequence."""
    present = os.environ.setdefault(name, value)
    if present != value:
        _log.warning(f"the environment variable {name} is {present}, which is used; {consequence}")
