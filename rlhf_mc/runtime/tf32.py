"""TF32, the type of 10 mantissa bits in which CUDA's libraries may multiply float32 matrices. They read from the
environment, when they start, whether they must not."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection

_log = logging.getLogger(__name__)
_NAME = "NVIDIA_TF32_OVERRIDE"


def forbid_tf32(dtypes: Collection[str]) -> None:
    """Let float32 matrices be multiplied in float32, if a model has this type. Call it before torch is imported.
    dtypes: MegatronConfig.dtype of each model.

    torch and vLLM do so by default. Transformer Engine asks cuBLAS for TF32 (common/gemm/cublaslt_gemm.cu), with errors
    of about 1e-3: as large as trainer.max_rollout_logprob_diff allows in float32. A value in the environment stays,
    with a warning."""
    if "float32" not in dtypes:
        return
    value = os.environ.setdefault(_NAME, "0")
    if value != "0":
        _log.warning(
            f"the environment variable {_NAME} is {value}, which is used; a model has dtype float32, and Transformer"
            " Engine then multiplies its matrices in TF32: log-probs differ from vLLM's by about 1e-3"
        )
