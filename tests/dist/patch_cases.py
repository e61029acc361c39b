"""Functions of the ranks in test_megatron_patches.py: Megatron-Core and torch with one patch
reverted. Each is called on every rank with the same arguments."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from freeze_cases import Products
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.tensor_parallel import random as mcore_random
from model_cases import make_engine, mesh_groups
from runs import read_of, wait_until
from torch.overrides import TorchFunctionMode
from traffic_cases import recorded

from rlhf_mc.checkpoint.hf_format import HFReader
from rlhf_mc.checkpoint.megatron_format import save_mcore
from rlhf_mc.config.schema import OptimConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models import gpt_model, megatron_patches
from rlhf_mc.models.gpt_model import fusions
from rlhf_mc.models.heads import log_prob_head
from rlhf_mc.models.megatron_patches import (
    EVERYWHERE,
    LOCAL_NORM,
    ON_CPU,
    WITH_LOCAL_LAYERS,
    WITH_TRANSFORMER_ENGINE,
    mark_tensor_parallel,
    megatron_calls,
    multiply_as_matrices,
)
from rlhf_mc.models.steps import AssemblyStep
from rlhf_mc.models.strategies import distributed_optimizer
from rlhf_mc.patching import Patch, replaced
from rlhf_mc.torch_patches import CUDA_CALLS, GLOO_GROUPS, CudaMeansCpu

MEGATRON = (*EVERYWHERE, *WITH_TRANSFORMER_ENGINE, *WITH_LOCAL_LAYERS, *LOCAL_NORM, *ON_CPU)
PATCHES = {patch.target: patch for patch in (*CUDA_CALLS, *GLOO_GROUPS, *MEGATRON)}


def small_batch() -> RaggedBatch:
    """Return two sequences of random tokens."""
    return RaggedBatch(
        tokens=torch.randint(4, 260, (22,), generator=torch.Generator().manual_seed(0)),
        prompt_lens=torch.tensor([5, 9]),
        response_lens=torch.tensor([4, 4]),
        rollout_log_probs=torch.zeros(8),
        finished=torch.ones(2, dtype=torch.bool),
    )


@contextlib.contextmanager
def reverted(patch: Patch) -> Iterator[None]:
    """Apply all patches but this one."""
    with megatron_calls():
        pass
    with replaced(patch.owner, patch.name, patch.original):
        yield


def _step(checkpoint: str, tp: int, pp: int, **megatron: Any) -> None:
    with mesh_groups(tp, pp) as groups:
        model = make_engine(checkpoint, "actor", groups, sequence_parallel=tp > 1, **megatron)
        model.make_trainable(OptimConfig(), total_steps=1)
        model.train_step(
            small_batch(),
            [[0], [1]],
            lambda model, states, micro: (states.float().square().mean(), {}),
        )


def step_without(target: str, checkpoint: str, tp: int, pp: int) -> None:
    """Build a model and take one optimizer step with the patch of `target` reverted."""
    mcore_random.get_cuda_rng_tracker().reset()
    # An engine of vLLM, built earlier in this process, has replaced torch.cuda.Stream.
    with reverted(PATCHES[target]), replaced(torch.cuda, "Stream", torch.cuda.streams.Stream):
        _step(checkpoint, tp, pp)


def kept_routing(checkpoint: str, original: bool) -> list[str]:
    """Return the tensors of tokens that the dispatchers of experts keep after a step, by the
    attribute's name."""
    dispatcher = "megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher"
    target = f"{dispatcher}.combine_postprocess"
    with (
        reverted(PATCHES[target]) if original else contextlib.nullcontext(),
        mesh_groups(1, 1) as groups,
    ):
        model = make_engine(checkpoint, "actor", groups)
        dispatcher = next(
            module.token_dispatcher
            for module in model.model.modules()
            if hasattr(module, "token_dispatcher")
        )
        before = {
            name for name, value in vars(dispatcher).items() if isinstance(value, torch.Tensor)
        }
        model.my_scores(small_batch(), [[0], [1]], log_prob_head(model.shape.vocab_size, 1.0))
        kept = {
            name: value
            for name, value in vars(dispatcher).items()
            if isinstance(value, torch.Tensor)
        }
    experts = model.shape.num_experts
    return sorted(name for name in kept.keys() - before if kept[name].numel() > experts)


def save_without_synchronize(checkpoint: str, directory: str) -> None:
    """Write a Megatron checkpoint with the patch of torch.cuda.synchronize reverted."""
    with mesh_groups(2, 1) as groups:
        engine = make_engine(checkpoint, "actor", groups)
        with reverted(PATCHES["torch.cuda.synchronize"]):
            save_mcore(engine.model, directory, HFReader(checkpoint))


class DeviceOnly(TorchFunctionMode):
    """Creates CPU tensors where "cuda" is asked for, as CudaMeansCpu does, but reports their own
    types."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.type:
            return func(*args, **(kwargs or {}))
        return CudaMeansCpu.__torch_function__(self, func, types, args, kwargs)  # type: ignore[arg-type]


def step_in_mode(checkpoint: str, mode: str) -> None:
    """Build a model and take one step of the distributed optimizer in another mode than
    CudaMeansCpu."""
    with replaced(
        megatron_patches,
        "CudaMeansCpu",
        {"none": contextlib.nullcontext, "device only": DeviceOnly}[mode],
    ):
        _step(checkpoint, 1, 2, use_distributed_optimizer=True)


def step_without_random_states(checkpoint: str) -> None:
    """Build a model with sequence parallelism and take one optimizer step without
    add_random_states."""
    mcore_random.get_cuda_rng_tracker().reset()
    with replaced(gpt_model, "add_random_states", lambda: None):
        _step(checkpoint, 2, 1)


def gather_different_sizes() -> None:
    """Call Megatron-Core's own gather with 1 token of rank 0 and 2 of rank 1."""
    patch = PATCHES[f"{mappings.__name__}._gather_along_first_dim"]
    with reverted(patch), megatron_calls():
        patch.original(torch.ones(dist.get_rank() + 1, 4), dist.group.WORLD, [1, 2])


def queued_random_states() -> int:
    """Return the number of calls that Megatron-Core's own _set_cuda_rng_state has queued for a GPU,
    of one."""
    patch = PATCHES[f"{mcore_random.__name__}._set_cuda_rng_state"]
    before = len(torch.cuda._queued_calls)
    with reverted(patch):
        patch.original(torch.get_rng_state())
    count = len(torch.cuda._queued_calls) - before
    del torch.cuda._queued_calls[before:]
    return count


def steps_without(left_out: AssemblyStep) -> list[AssemblyStep]:
    return [step for step in gpt_model.STEPS if step is not left_out]


def unmarked_parameters(checkpoint: str) -> list[str]:
    """Return the parameters that differ between tensor-parallel ranks and that Megatron-Core alone
    does not mark."""
    with (
        mesh_groups(2, 1) as groups,
        replaced(gpt_model, "STEPS", steps_without(mark_tensor_parallel)),
    ):
        params = make_engine(checkpoint, "actor", groups).named_parameters()
    unmarked = []
    for name, param in params.items():
        copies: list[Any] = [None, None]
        dist.all_gather_object(copies, param.detach())
        if not torch.equal(*copies) and not getattr(param, "tensor_model_parallel", False):
            unmarked.append(name)
    return unmarked


def groups_of_gloo(
    original: bool = False, variables: Sequence[str] = ()
) -> tuple[int, float, float]:
    """Make two groups of one rank and one of all, as this process makes them or by torch's
    original, with these environment variables set. Return the threads that this has started, the
    groups' timeout in seconds, and the sum of ones over the last group."""
    patch = PATCHES["torch.distributed.distributed_c10d.ProcessGroupGloo.__init__"]
    timeout = datetime.timedelta(seconds=90)
    expected = 3 if original or variables else 0
    before = _gloo_threads()
    with (
        reverted(patch) if original else contextlib.nullcontext(),
        mock.patch.dict(os.environ, dict.fromkeys(variables, "1")),
    ):
        alone = [
            dist.new_group([dist.get_rank()], timeout=timeout, use_local_synchronization=True)
            for _ in range(2)
        ]
        everyone = dist.new_group(list(range(dist.get_world_size())), timeout=timeout)
    wait_until(lambda: _gloo_threads() - before >= expected, seconds=10 if expected else 0.1)
    started = _gloo_threads() - before
    ones = torch.ones(1)
    dist.all_reduce(ones, group=everyone)
    (seconds,) = {
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for group in (*alone, everyone)
    }
    return started, seconds, float(ones)


def _gloo_threads() -> int:
    """Return the number of gloo's threads. A new one has its starter's name until it sets its own;
    one that has just ended has none."""
    tasks = [path.name for path in Path("/proc/self/task").iterdir()]
    return sum(read_of(os.getpid(), f"task/{task}/comm") == b"gloo_tcp_loop\n" for task in tasks)


def batched_products(checkpoint: str) -> int:
    """Return the number of batched matrix products of a frozen model without
    multiply_as_matrices."""
    with (
        mesh_groups(2, 1) as groups,
        replaced(gpt_model, "STEPS", steps_without(multiply_as_matrices)),
    ):
        model = make_engine(checkpoint, "actor", groups, dtype="bfloat16")
        with Products() as products:
            model.score(
                small_batch(), [[0], [1]], lambda model, states, micro: states.float().mean((1, 2))
            )
    return sum("bmm" in name for name, _ in products.seen)


def output_layer_with_fused_accumulation(checkpoint: str, patched: bool) -> None:
    """Build a model with gradient_accumulation_fusion, as Transformer Engine's layers have it
    without Apex."""
    patch = PATCHES[f"{layers.__name__}._grad_accum_fusion_available"]

    def with_fusion(shape: Any) -> dict[str, Any]:
        return {**fusions(shape), "gradient_accumulation_fusion": True}

    with (
        replaced(gpt_model, "fusions", with_fusion),
        replaced(patch.owner, patch.name, patch.replacement if patched else patch.original),
        mesh_groups(1, 2) as groups,
    ):
        make_engine(checkpoint, "actor", groups)


def gathered_parameters(checkpoint: str, patched: bool) -> int:
    """Return the bytes that are gathered in an optimizer step of a model whose experts are
    sharded."""
    unpatched = replaced(distributed_optimizer, "gather_parameters_once", lambda optimizer: None)
    with contextlib.nullcontext() if patched else unpatched:
        mesh = {"ep": dist.get_world_size()}
        (counts,) = recorded(
            checkpoint, "actor", mesh, 1, trains=[True], use_distributed_optimizer=True
        )
    return counts["all_gather", tuple(range(dist.get_world_size()))][0]


def tie_by_parallel_state(checkpoint: str) -> None:
    """Call GPTModel's own tie_embeddings_and_output_weights_state_dict on the last of two
    stages."""
    with mesh_groups(1, 2) as groups:
        model: Any = make_engine(checkpoint, "actor", groups).model
        if groups.is_last_stage:
            GPTModel.tie_embeddings_and_output_weights_state_dict(
                model, {"weight": None}, "weight", "embedding"
            )
