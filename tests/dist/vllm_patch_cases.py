"""Functions of the ranks in test_vllm_patches.py: vLLM with one patch reverted. Each is called on every rank with the
same arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import vllm.distributed.parallel_state as vllm_state
from rollout_cases import built_engine
from vllm.distributed.device_communicators import cpu_communicator

from rlhf_mc.checkpoint.hf_format import HFReader
from rlhf_mc.patching import replaced
from rlhf_mc.reshard.layout import vllm_layout
from rlhf_mc.rollout import vllm_patches
from rlhf_mc.rollout.base import Sampling

PATCHES = {patch.target: patch for patch in (*vllm_patches.EVERYWHERE, *vllm_patches.ON_CPU)}


@contextlib.contextmanager
def reverted(target: str) -> Iterator[None]:
    """Apply all patches but that of `target`."""
    vllm_patches.patch()
    patch = PATCHES[target]
    with replaced(vllm_patches, "patch", lambda: None), replaced(patch.owner, patch.name, patch.original):
        yield


def generate_without(target: str, checkpoint: str, max_num_batched_tokens: int) -> None:
    """Build an engine and generate responses to prompts of 60 tokens with one patch reverted."""
    prompts = [[4 + i] * 60 for i in range(3)]
    shape = HFReader(checkpoint).shape()
    embedding = "model.embed_tokens.weight"
    storage = {embedding: torch.ones(vllm_layout(shape, 0, 1).shapes[embedding])}
    with (
        reverted(target),
        built_engine(checkpoint, 1, 72, storage=storage, max_num_batched_tokens=max_num_batched_tokens) as engine,
    ):
        engine.generate(prompts, [0, 1, 2], Sampling(1.0, 8, ()))


class _GlooCollectives:
    """Stands for vLLM's collectives in shared memory, whose segments would outlive the test."""

    make_group_name = staticmethod(cpu_communicator._CPUSHMDistributed.make_group_name)

    def __init__(self, communicator: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


def uses_shared_memory(checkpoint: str, target: str) -> bool:
    """Return whether a tensor-parallel group has collectives in shared memory with one patch reverted."""
    with (
        reverted(target),
        replaced(cpu_communicator, "_CPUSHMDistributed", _GlooCollectives),
        built_engine(checkpoint, dist.get_world_size(), 64),
    ):
        communicator: Any = vllm_state.get_tp_group().device_communicator
        return isinstance(communicator.dist_module, _GlooCollectives)


def own_groups(checkpoint: str) -> tuple[list[list[int]], bool, list[int], list[int]]:
    """Build an engine of ranks 1 and 0, in this order. Return the tensor-parallel groups that vLLM itself would build,
    whether they would have a message queue, the order that torch gives to [1, 0], and the order of the engine's."""
    asked: list[Any] = []
    original = vllm_state.init_model_parallel_group

    def record(group_ranks: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("group_name") == "tp":
            asked.extend((group_ranks, kwargs.get("use_message_queue_broadcaster")))
        return own(group_ranks, *args, **kwargs)

    with vllm_patches.tensor_parallel_groups([[1, 0]]):
        own = vllm_state.init_model_parallel_group
        with (
            replaced(vllm_state, "init_model_parallel_group", record),
            replaced(vllm_patches, "tensor_parallel_groups", lambda groups: contextlib.nullcontext()),
            built_engine(checkpoint, 2, 64),
        ):
            order = list(vllm_state.get_tp_group().ranks)
    assert vllm_state.init_model_parallel_group is original
    group = dist.new_group([1, 0])
    return [*asked, dist.get_process_group_ranks(group), order]  # type: ignore[return-value]


def destroys_the_world(checkpoint: str) -> int:
    """Return how often vLLM destroys torch.distributed's world when an engine is shut down."""
    calls: list[None] = []
    with (
        replaced(vllm_patches, "world_kept", contextlib.nullcontext),
        replaced(vllm_state, "destroy_distributed_environment", lambda: calls.append(None)),
        built_engine(checkpoint, 1, 64),
    ):
        pass
    return len(calls)
