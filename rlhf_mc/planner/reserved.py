"""Bytes of a GPU that the settings of a run do not show: driver, CUDA context, NCCL's
communicators, workspaces. Each constant names its source, a measurement of another program: no run
on a GPU has been measured yet.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

from rlhf_mc.topology.mesh import Axis, Mesh

DRIVER = 900 << 20
"""The driver's: of 80 GiB vLLM reports 79.1 to 79.3 (its line "total_gpu_memory")."""
CONTEXT = 1 << 30
"""CUDA's context, with the kernels that are loaded at their first launch: 1.06 GB in a process of
torch on an H100 before messages between GPUs (NVIDIA/nccl issue 1685)."""
COMMUNICATOR = 384 << 20
"""A communicator in which ranks have reduced or gathered: 16 channels, each with two connections,
of a ring and of a tree, that take 10 MiB for the buffers of three protocols and 2 MiB
(NCCL_DEBUG_SUBSYS=ALLOC in the same issue)."""
PEER = 470_000_000
"""A GPU of the same node with which a rank exchanges all-to-all messages: 32 channels. 3.28 GB for
seven GPUs in the same issue."""
TRAINING = 350_000_000
"""Tensors that stay after a training pass: Transformer Engine's dummy weight gradients (0.21 GB),
Megatron-Core's buffer of gathered tokens (0.13) and cuBLAS's workspace (0.03), of the 70B model on
fake devices."""
ENGINE = 394 << 20
"""FlashInfer's workspace in vLLM, which stays while vLLM sleeps
(VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE)."""
_COLLECTIVES: tuple[tuple[Axis, ...], ...] = (
    ("tp",),
    ("pp",),
    ("ep",),
    ("expert_dp",),
    ("cp", "dp"),
    ("tp", "cp", "dp", "pp"),
)
"""Axes of a mesh that the groups of a model's collectives span: activations, stages, experts,
gradients, the world. Keys and values have the groups of Mesh.context_blocks."""


def reserved_bytes(
    meshes: Collection[Mesh], gpus_per_node: int, rollout_tp: int, engine_sleeps: bool
) -> float:
    """Return the bytes of a rank besides the parts of a phase. meshes: of all models; none on a
    rank that holds an engine alone. An engine that is awake has its communicator and workspace in
    its own share of the device."""
    asleep = (ENGINE + COMMUNICATOR * (rollout_tp > 1)) if engine_sleeps else 0
    return (
        DRIVER
        + TRAINING * bool(meshes)
        + besides_tensors(frozenset(meshes), gpus_per_node)
        + asleep
    )


@functools.lru_cache(maxsize=1024)
def besides_tensors(meshes: frozenset[Mesh], gpus_per_node: int) -> int:
    """Return the bytes of a training process that torch does not allocate. Messages of the weight
    update between GPUs of a node are not counted: up to PEER for each of them."""
    groups = {mesh.group_along(mesh.first, *axes) for mesh in meshes for axes in _COLLECTIVES}
    groups |= {
        tuple(mesh.context_blocks(size)[0]) for mesh in meshes for size in mesh.context_sizes
    }
    for mesh in meshes:  # shards of a parameter, and their replicas
        groups |= {tuple(mesh.ranks[: mesh.shards]), tuple(mesh.ranks[:: mesh.shards])}
    communicators = sum(len(group) > 1 for group in groups)
    peers = max((min(mesh.ep, max(1, gpus_per_node // mesh.tp)) - 1 for mesh in meshes), default=0)
    return CONTEXT + communicators * COMMUNICATOR + peers * PEER
