"""Several ranks on one GPU (RLHF_MC_RANKS_PER_GPU), so that all paths between ranks run over NCCL
on fewer GPUs than ranks. Times and memory of such a run say nothing about one GPU for each rank."""

from __future__ import annotations

import os
from collections.abc import Callable

from rlhf_mc import platform
from rlhf_mc.config.errors import NodeError, UserError
from rlhf_mc.topology.consensus import gather_objects
from rlhf_mc.topology.environment_variables import demand_variables

LEAST_NCCL = (2, 30)
"""The first version of NCCL with NCCL_MULTI_RANK_GPU_ENABLE. Earlier ones end with "Duplicate GPU
detected"."""
VARIABLES = {
    "NCCL_MULTI_RANK_GPU_ENABLE": ("1",),
    # By default NCCL looks for shared GPUs itself, but NCCL 2.30 remembers the last pair of ranks
    # alone (init.cc).
    "NCCL_NVLS_ENABLE": ("0",),
    # vLLM's all-reduces that map the memory of other GPUs.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": ("0",),
    "VLLM_ALLREDUCE_USE_FLASHINFER": ("0",),
    "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": ("0",),
}
"""Environment variables of a run whose ranks share GPUs: their permitted values, the default
first."""
MAX_CTAS = "2"
"""Default of NCCL_MAX_CTAS: the channels of a communicator. A GPU must have room for the kernels
and buffers of all its ranks at once, or NCCL hangs (NCCL's guide, NCCL_MULTI_RANK_GPU_ENABLE)."""


def prepare_shared_gpus() -> None:
    """Set the variables that libraries read where ranks share GPUs. Call before NCCL's first
    communicator. Raise UserError where RLHF_MC_RANKS_PER_GPU is no number or the environment
    demands the opposite, and NodeError where the loaded NCCL is too old."""
    text = os.environ.get(platform.RANKS_PER_GPU, "1")
    if not text.isdecimal() or int(text) < 1:
        raise UserError(
            f"the environment variable {platform.RANKS_PER_GPU} is {text!r}; it must be a number "
            "from 1 on"
        )
    if platform.ranks_per_gpu() == 1:
        return
    setting = f"{platform.RANKS_PER_GPU}={text}"
    if (version := platform.nccl_version()) < LEAST_NCCL:
        raise NodeError(
            f"{setting} needs NCCL {_text(LEAST_NCCL)} or later, and {_text(version)} is loaded: "
            "set LD_PRELOAD to the libnccl.so.2 of a later one (pip download nvidia-nccl-cu13)"
        )
    demand_variables(setting, VARIABLES)
    os.environ.setdefault("NCCL_MAX_CTAS", MAX_CTAS)


def shared_gpu_line() -> str | None:
    """Return one line for the console where ranks share GPUs."""
    if platform.ranks_per_gpu() == 1:
        return None
    return (
        f"{platform.RANKS_PER_GPU}={platform.ranks_per_gpu()}: ranks share GPUs, over NCCL "
        f"{_text(platform.nccl_version())}: a test of communication, and no measure of speed or "
        "memory"
    )


def in_turn(action: Callable[[], object]) -> None:
    """Run the action on the ranks of each GPU one after another. Every rank must call it.

    While one rank measures the free memory of its GPU, the others neither take nor free any."""
    ranks = platform.ranks_per_gpu()
    if ranks > 1:
        gather_objects(None)
    for turn in range(ranks):
        if ranks == 1 or turn == int(os.environ["LOCAL_RANK"]) % ranks:
            action()
        if ranks > 1:
            gather_objects(None)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
