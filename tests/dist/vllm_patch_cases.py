"""Functions of the ranks in test_vllm_patches.py: vLLM with one patch reverted. Each is called on
every rank with the same arguments."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import vllm
import vllm.distributed.parallel_state as vllm_state
from rollout_cases import built_engine, respond
from vllm.distributed.device_communicators import (
    cpu_communicator,
    custom_all_reduce,
    flashinfer_all_reduce,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import gpt_oss
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.executor import uniproc_executor

from rlhf_mc import platform
from rlhf_mc.checkpoint.hf_format import HFReader
from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.patching import replaced
from rlhf_mc.rollout import vllm_options, vllm_patches
from rlhf_mc.rollout.base import Sampling
from rlhf_mc.rollout.vllm_layout import vllm_layout
from rlhf_mc.topology.shared_gpu import in_turn

PATCHES = {patch.target: patch for patch in (*vllm_patches.EVERYWHERE, *vllm_patches.on_cpu())}


@contextlib.contextmanager
def reverted(target: str) -> Iterator[None]:
    """Apply all patches but that of `target`."""
    vllm_patches.patch()
    patch = PATCHES[target]
    with (
        replaced(vllm_patches, "patch", lambda: None),
        replaced(patch.owner, patch.name, patch.original),
    ):
        yield


PROMPTS = [np.full(60, 4 + i, np.int32) for i in range(3)]


def generate_without(target: str, checkpoint: str) -> None:
    """Build an engine and generate responses with one patch reverted."""
    shape = HFReader(checkpoint).shape()
    sizes = vllm_layout(shape, 0, 1).shapes
    storage = {
        name: torch.ones(size)
        for name, size in sizes.items()
        if name == "model.embed_tokens.weight"
    }
    with reverted(target), built_engine(checkpoint, 1, 72, storage=storage) as engine:
        respond(engine, PROMPTS, [0, 1, 2], Sampling(1.0, 8, ()))


def generate_on_processors(
    checkpoint: str, dtype: str, feature: str
) -> list[tuple[str, list[list[int]], list[list[float]]]]:
    """Generate on a processor that has the feature, and on one that does not, by torch.cpu's name
    for it. Return for each the engine's summary, the responses and their log-probs."""
    found = []
    for answer in (lambda: True, lambda: False):
        with (
            replaced(torch.cpu, feature, answer),
            built_engine(checkpoint, 1, 72, dtype=dtype) as engine,
        ):
            responses = respond(engine, PROMPTS, [0, 1, 2], Sampling(1.0, 8, ())).generations()
            tokens = [one.token_ids for one in responses]
            found.append((engine.summary, tokens, [one.log_probs for one in responses]))
    return found


def generate_in_a_world_of_seven(checkpoint: str, patched: bool) -> None:
    """Generate with a gpt_oss model that takes seven for the number of ranks."""
    seven = SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: 7)
    original = (
        contextlib.nullcontext()
        if patched
        else replaced(vllm_patches, "in_any_world", contextlib.nullcontext)
    )
    with replaced(gpt_oss, "dist", seven), original, built_engine(checkpoint, 1, 72) as engine:
        respond(engine, PROMPTS, [0, 1, 2], Sampling(1.0, 8, ()))


def generate_with_vllms_seeds(checkpoint: str) -> None:
    """Generate responses to prompts that do not fit in one step, with a seed for each request."""
    requests = [
        vllm.SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, seed=i)
        for i in range(3)
    ]
    with built_engine(checkpoint, 1, 72, max_num_batched_tokens=72) as engine:
        engine._llm.generate(
            [vllm.TokensPrompt(prompt_token_ids=p.tolist()) for p in PROMPTS],
            requests,
            use_tqdm=False,
        )


class _GlooCollectives:
    """Stands for vLLM's collectives in shared memory, whose segments would outlive the test."""

    make_group_name = staticmethod(cpu_communicator._CPUSHMDistributed.make_group_name)

    def __init__(self, communicator: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


def uses_shared_memory(checkpoint: str, target: str) -> tuple[bool, bool]:
    """Return whether a tensor-parallel group has collectives in shared memory with one patch
    reverted, and whether vLLM's kernels for this processor have such collectives: those for AVX-512
    do, those for AVX2 do not."""
    with (
        reverted(target),
        replaced(cpu_communicator, "_CPUSHMDistributed", _GlooCollectives),
        built_engine(checkpoint, dist.get_world_size(), 64),
    ):
        communicator: Any = vllm_state.get_tp_group().device_communicator
        has_kernel = hasattr(torch.ops._C, "init_shm_manager")
        return isinstance(communicator.dist_module, _GlooCollectives), has_kernel


def own_groups(checkpoint: str) -> tuple[list[list[int]], bool, list[int], list[int]]:
    """Build an engine of ranks 1 and 0, in this order. Return the tensor-parallel groups that vLLM
    itself would build, whether they would have a message queue, the order that torch gives to [1,
    0], and the order of the engine's."""
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
            replaced(
                vllm_patches, "tensor_parallel_groups", lambda groups: contextlib.nullcontext()
            ),
            built_engine(checkpoint, 2, 64),
        ):
            order = list(vllm_state.get_tp_group().ranks)
    assert vllm_state.init_model_parallel_group is original
    group = dist.new_group([1, 0])
    # a rank that ends first would close its connections while the other one still connects
    dist.barrier(group)
    return [*asked, dist.get_process_group_ranks(group), order]  # type: ignore[return-value]


def custom_all_reduce_is_off(checkpoint: str, ranks: list[int]) -> tuple[list[bool], list[str]]:
    """Build an engine of the ranks. Return vLLM's setting for its custom all-reduce, as on a
    platform that has one, and the lines that are printed on a GPU."""
    found: list[bool] = []
    lines: list[str] = []
    original = EngineArgs.create_engine_config

    def record(*args: Any, **kwargs: Any) -> Any:
        config = original(*args, **kwargs)
        found.append(config.parallel_config.disable_custom_all_reduce)
        return config

    with (
        replaced(CpuPlatform, "use_custom_allreduce", classmethod(lambda cls: True)),
        replaced(EngineArgs, "create_engine_config", record),
        built_engine(checkpoint, len(ranks), 64, groups=[ranks]),
    ):
        pass
    with (
        replaced(platform, "use_cuda", lambda: True),
        replaced(vllm_options, "print_line", lambda line, rank_0_only: lines.append(line)),
    ):
        vllm_options.custom_all_reduce([ranks], RolloutConfig())
    return found, lines


def options_of_shared_gpus() -> dict[str, Any]:
    """Return what vLLM is told where two ranks share each GPU: whether its custom all-reduce is on,
    its options, and the GPU on which each of four local ranks builds its worker."""
    before = dict(os.environ)
    devices = []
    with (
        replaced(platform, "use_cuda", lambda: True),
        replaced(vllm_options, "print_line", lambda *_, **__: None),
    ):
        os.environ["RLHF_MC_RANKS_PER_GPU"] = "2"
        for local_rank in range(4):
            os.environ["LOCAL_RANK"] = str(local_rank)
            with vllm_patches.on_own_gpu():
                devices.append(
                    uniproc_executor.ExecutorWithExternalLauncher._distributed_args(None)[2]
                )  # type: ignore[arg-type]
            assert os.environ["LOCAL_RANK"] == str(local_rank)
        options = vllm_options.gpu_options(RolloutConfig(gpu_memory_utilization=0.6))
        custom = vllm_options.custom_all_reduce([[0, 1]], RolloutConfig())
    os.environ.clear()
    os.environ.update(before)
    return {"custom": custom, "devices": devices, **options}


def turns() -> tuple[float, float]:
    """Run an action on ranks that share a GPU. Return when it has begun and ended here, by the
    machine's clock."""
    times: list[float] = []

    def act() -> None:
        times.append(time.monotonic())
        time.sleep(0.1)
        times.append(time.monotonic())

    with replaced(platform, "ranks_per_gpu", dist.get_world_size):
        in_turn(act)
    begin, end = times
    return begin, end


def all_reduce_workspaces(patched: bool, failing: dict[str, list[int]]) -> tuple[str, list[str]]:
    """Let vLLM make the workspace of FlashInfer's all-reduce for ranks of one GPU node. failing:
    backend -> the ranks that cannot. Return the backend of this rank's workspace, and the backends
    of those that it has destroyed."""
    destroyed: list[str] = []

    def create(backend: str, rank: int, **_: Any) -> Any:
        if rank in failing.get(backend, []):
            raise RuntimeError("no kernel")
        return SimpleNamespace(backend=backend, mc_ptr=1, destroy=lambda: destroyed.append(backend))

    module = flashinfer_all_reduce
    (patch,) = (one for one in vllm_patches.on_gpu() if one.owner is module)
    fake = SimpleNamespace(create_allreduce_fusion_workspace=create)
    with (
        replaced(module, patch.name, patch.replacement if patched else patch.original),
        replaced(module, "flashinfer_comm", fake),
        replaced(module, "TorchDistBackend", lambda group: None),
        replaced(module, "_node_count", lambda group: 1),
    ):
        workspace = module.get_fi_ar_workspace(
            2, dist.get_rank(), 16, 64, torch.bfloat16, dist.group.WORLD
        )
        module._fi_ar_workspace = None
        module._fi_ar_workspace_failed = False
        module._fi_ar_workspace_groups.clear()
    return ("none" if workspace is None else workspace.backend), destroyed


def cache_names(checkpoint: str, ranks: list[int]) -> tuple[str, str]:
    """Build an engine of the ranks. Return the hash by which vLLM finds this rank's compiled code,
    and the same without additional_config."""
    with built_engine(checkpoint, len(ranks), 64, groups=[ranks]) as engine:
        config = engine._llm.llm_engine.vllm_config
        ours = config.compute_hash()
        with replaced(config, "additional_config", {}):
            return ours, config.compute_hash()


def head_types(checkpoint: str, float32_products: bool) -> tuple[str, str]:
    """Build an engine in bfloat16, as on a device with or without products into float32. Return the
    types of the head's result and of its weight after one response."""
    prompt = [np.array([1, 2, 3], np.int32)]
    with (
        replaced(platform, "float32_products", lambda: float32_products),
        built_engine(checkpoint, 1, 64, dtype="bfloat16") as engine,
    ):
        respond(engine, prompt, [0], Sampling(1.0, 4, ()))
        return str(engine._model.logits_processor.head_dtype), str(
            engine._model.lm_head.weight.dtype
        )


def registered_graph_buffers(ranks: list[int]) -> list[Any]:
    """Return the handles and offsets that vLLM's custom all-reduce registers after the capture of
    graphs. Each rank's handle is its number in the group, and its offset 10 times that."""
    group = dist.new_group(ranks, sort_ranks=False)
    rank = dist.get_rank(group)
    registered: list[Any] = []
    operations = SimpleNamespace(
        get_graph_buffer_ipc_meta=lambda pointer: ([rank], [10 * rank]),
        register_graph_buffers=lambda pointer, handles, offsets: registered.extend(
            (handles, offsets)
        ),
    )
    all_reduce = custom_all_reduce.CustomAllreduce.__new__(custom_all_reduce.CustomAllreduce)
    all_reduce.group = group
    all_reduce.rank = rank
    all_reduce._ptr = 0
    all_reduce.disabled = True  # for __del__
    with replaced(custom_all_reduce, "ops", operations):
        all_reduce.register_graph_buffers()
    return registered


def destroys_the_world(checkpoint: str) -> int:
    """Return how often vLLM destroys torch.distributed's world when an engine is shut down."""
    calls: list[None] = []
    with (
        replaced(vllm_patches, "preserved_world", contextlib.nullcontext),
        replaced(vllm_state, "destroy_distributed_environment", lambda: calls.append(None)),
        built_engine(checkpoint, 1, 64),
    ):
        pass
    return len(calls)
