"""Deterministic algorithms (trainer.deterministic): the same bits from the same inputs, also on
GPUs. docs/reliability.md says what this covers.
"""

from __future__ import annotations

import torch

from rlhf_mc import platform
from rlhf_mc.topology.environment_variables import demand_variables

VARIABLES = {
    # cuBLAS may otherwise share a workspace between streams. torch requires one of these values.
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    # The backward pass of Transformer Engine's attention. Megatron-Core requires it.
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    # Sums in the NVSwitch (NVLS) have no fixed order, and the choice by size and topology is
    # NCCL's.
    "NCCL_ALGO": ("Ring", "Tree"),
    # vLLM's all-reduce in the NVSwitch.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": ("0",),
    # Its all-reduces by FlashInfer, which have no fixed order either. rollout/vllm_engine.py turns
    # the fused one off.
    "VLLM_ALLREDUCE_USE_FLASHINFER": ("0",),
    "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": ("0",),
}
"""Environment variables that libraries read on a GPU: the values under which sums have one order,
the default first."""


def use_deterministic_algorithms() -> None:
    """Let torch and all libraries in this process use deterministic algorithms alone, until it
    ends: an operation that has none raises RuntimeError with its name. Call it before the first use
    of CUDA and NCCL.

    Megatron-Core, Transformer Engine and build.py ask torch whether it is on. Raise UserError where
    the environment demands the opposite."""
    if platform.use_cuda():
        demand_variables("trainer.deterministic", VARIABLES)
    torch.use_deterministic_algorithms(True)
    # A setting of torch. Nothing reads memory before it is written; filling it with NaN would take
    # time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
