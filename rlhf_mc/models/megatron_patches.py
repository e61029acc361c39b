"""Every patch of Megatron-Core, tested with megatron-core 0.16.1: replaced attributes, corrections
of the models that it has built, and its checkpoint writer without processes. Patches of torch for
Megatron-Core's sake are in torch_patches.py.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    layers,
    mappings,
)
from megatron.core.tensor_parallel import random as mcore_random
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig, attention, multi_latent_attention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.utils import local_multi_tensor_l2_norm
from torch.nn.functional import silu

from rlhf_mc import platform
from rlhf_mc.models import transformer_engine
from rlhf_mc.models.cpu_operations import GatedSiluMLP, rotate
from rlhf_mc.models.packed_latents import DuplicatedLinear
from rlhf_mc.models.steps import Assembly
from rlhf_mc.patching import Patch, apply, replaced
from rlhf_mc.torch_patches import CUDA_CALLS, CudaMeansCpu, get_rng_state, set_rng_state

TESTED_VERSION = "0.16.1"

_gather = mappings._gather_along_first_dim


def _gather_any_sizes(
    part: Any, group: Any, sizes: list[int] | None = None, use_global_buffer: bool = False
) -> Any:
    """Gather along the first dimension; parts of different sizes by an all-to-all."""
    if sizes is None or len(set(sizes)) == 1:
        return _gather(part, group, sizes, use_global_buffer)
    out = part.new_empty(sum(sizes), *part.shape[1:])
    to_each = torch.cat([part] * group.size())
    torch.distributed.all_to_all_single(
        out, to_each, sizes, [len(part)] * group.size(), group=group
    )
    return out


def _splits_as_numpy(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Convert the split sizes of the token dispatcher to numpy, as the original does after copying
    them to the host."""
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        if isinstance(splits := getattr(dispatcher, name), torch.Tensor):
            setattr(dispatcher, name, splits.numpy())
    return tokens_per_expert


_combine = MoEAlltoAllTokenDispatcher.combine_postprocess


def _combine_and_forget(dispatcher: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Do as the original, and drop the tensors that say where the tokens went."""
    output: torch.Tensor = _combine(dispatcher, tokens)
    dispatcher.probs = dispatcher.routing_map = (
        dispatcher.reversed_local_input_permutation_mapping
    ) = None
    return output


def _norm_of_all(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[list[torch.Tensor]],
    per_tensor: bool,
    *_: Any,
) -> tuple[torch.Tensor, None]:
    """Return the norm of all elements of all tensors, [1] float32, without a wait for the device:
    Megatron-Core's l2_norm_impl, whose other arguments and result nothing uses."""
    norms = torch._foreach_norm([tensor for tensors in tensor_lists for tensor in tensors])
    return torch.linalg.vector_norm(torch.stack(norms)).float().view(1), None


EVERYWHERE = (
    Patch(
        moe_utils,
        "te_general_gemm",
        getattr(moe_utils, "te_general_gemm", None),
        "the router reads the name, which is defined only where Transformer Engine is installed",
    ),
    Patch(
        MoEAlltoAllTokenDispatcher,
        "combine_postprocess",
        _combine_and_forget,
        "each layer keeps the routing of its last micro-batch, 0.7 GB of 128 experts, 24 layers "
        "and 16k tokens",
    ),
    Patch(
        gated_delta_net,
        "HAVE_FLA",
        True,
        "without FLA's kernels, which models/gated_delta_net.py does not use, the layer is not "
        "built",
    ),
)
WITH_TRANSFORMER_ENGINE = (
    Patch(
        layers,
        "_grad_accum_fusion_available",
        True,
        "with gradient_accumulation_fusion the output layer asks for Apex's kernel, which only its "
        "forward pass uses; heads.py takes the place of that, and all other linear layers are "
        "Transformer Engine's",
    ),
)
WITH_LOCAL_LAYERS = (
    Patch(
        multi_latent_attention,
        "TELinear",
        DuplicatedLinear,
        "of any other class latent attention does not build a projection that each tensor-parallel "
        "rank has whole",
    ),
)
ON_CPU = (
    Patch(
        mcore_random,
        "_get_cuda_rng_state",
        get_rng_state,
        "it raises without a GPU; the tracker of random states calls it",
    ),
    Patch(
        mcore_random,
        "_set_cuda_rng_state",
        set_rng_state,
        "it queues each call until a GPU is initialised: on a CPU the queue only grows",
    ),
    Patch(
        MoEAlltoAllTokenDispatcher,
        "cuda_dtoh_stream",
        torch.device("cpu"),  # anything but None, for which a CUDA stream is created
        "the token dispatcher creates a CUDA stream",
    ),
    Patch(
        MoEAlltoAllTokenDispatcher,
        "_maybe_dtoh_and_synchronize",
        _splits_as_numpy,
        "the token dispatcher copies its split sizes to the host on a CUDA stream",
    ),
    Patch(
        mappings,
        "_gather_along_first_dim",
        _gather_any_sizes,
        "gloo's all_gather refuses tensors of different sizes: tokens of experts, by "
        "tensor-parallel rank",
    ),
    Patch(
        attention,
        "apply_rotary_pos_emb",
        rotate,
        "it computes cosines and sines of the same angles for q and k of every layer, and copies "
        "its result once more",
    ),
)
LOCAL_NORM = (
    Patch(
        clip_grads,
        "l2_norm_impl",
        _norm_of_all,
        "without Transformer Engine and Apex it is a call of torch for each tensor, and on a GPU a "
        "wait for each",
    ),
)


@functools.cache
def _patch() -> None:
    apply(EVERYWHERE)
    if transformer_engine.uses_transformer_engine():
        apply((*WITH_TRANSFORMER_ENGINE, *transformer_engine.patches()))
    else:
        apply(WITH_LOCAL_LAYERS)
    if not platform.use_cuda() or LOCAL_NORM[0].original is local_multi_tensor_l2_norm:
        apply(LOCAL_NORM)
    if not platform.use_cuda():
        apply(CUDA_CALLS)
        apply(ON_CPU)


@contextlib.contextmanager
def megatron_calls() -> Iterator[None]:
    """Patch Megatron-Core, and on a CPU let it create CPU tensors while the body runs.

    Every call into Megatron-Core is inside this context; no call of vLLM is, which must see the
    real devices."""
    _patch()
    with contextlib.nullcontext() if platform.use_cuda() else CudaMeansCpu():
        yield


def megatron_operations(config: TransformerConfig) -> AbstractContextManager[None]:
    """Return the context of a forward pass within `megatron_calls`: without CudaMeansCpu, if the
    layers are dense.

    The mode is a Python call for each operation and each attribute of a tensor, 4 to 8 % of the
    passes of a small model, and dense layers name no device. The router of experts does."""
    return own_operations() if config.num_moe_experts is None else contextlib.nullcontext()


def own_operations() -> AbstractContextManager[None]:
    """Return the context of operations within `megatron_calls` that name no device "cuda": without
    CudaMeansCpu."""
    if platform.use_cuda():
        return contextlib.nullcontext()
    context: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


def mark_tensor_parallel(assembly: Assembly) -> None:
    """Mark the parameters that are sharded over tensor-parallel ranks.

    Reason: Megatron-Core marks them only while it initialises weights (perform_initialization).
    It counts an unmarked parameter once in the gradient norm, as if every rank had the same."""
    for module in assembly.model.modules():
        dim = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}.get(
            type(module)
        )
        if dim is None:
            continue
        for name, param in module.named_parameters(recurse=False):
            if name == "weight" or (name == "bias" and dim == 0):
                for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
                    if hasattr(param, attribute):
                        delattr(param, attribute)
                set_tensor_model_parallel_attributes(param, True, dim, 1)


def multiply_as_matrices(assembly: Assembly) -> None:
    """Let each linear layer of the model multiply matrices: its input [T, 1, hidden] as [T,
    hidden]. Where nothing is to be communicated or added to main_grad, torch's own linear layer
    does, which adds the bias in the product. Transformer Engine's layers are of other classes,
    flatten their input themselves, and are left alone.

    Reason: Megatron-Core calls torch.matmul with a 3-D input and a matrix. torch.matmul
    computes one product of matrices only where the matrix requires a gradient, or where the
    strides of the input show that its leading dimensions are contiguous. Otherwise it computes
    T products, for which a CPU copies the matrix T times in bfloat16. A frozen layer after a
    tensor-parallel embedding is such a case: the embedding returns [T, 1, hidden] as a
    transposed [1, T, hidden], whose dimension of size 1 has stride T * hidden."""
    for module in assembly.model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module._forward_impl = _on_matrices(module._forward_impl)


def _on_matrices(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def on_matrices(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **settings: Any
    ) -> torch.Tensor:
        matrix = input.flatten(0, -2)
        if any(settings[name] for name in _BEYOND_THE_PRODUCT):
            out = forward(matrix, weight, bias, **settings)
        else:
            out = torch.nn.functional.linear(matrix, weight, bias)
        # sequence parallelism gathers: more tokens than in the input
        return out.unflatten(0, (-1, *input.shape[1:-1]))

    return on_matrices


_BEYOND_THE_PRODUCT = (
    "gradient_accumulation_fusion",
    "allreduce_dgrad",
    "sequence_parallel",
    "grad_output_buffer",
)
"""Arguments of Megatron-Core's linear layers by which they do more than torch's."""


def gate_on_cpu(assembly: Assembly) -> None:
    """Let the feed-forward parts of the model compute their gate as GatedSiluMLP does. It is left
    as it is with another activation.

    Reason: Megatron-Core's activation passes over memory four times more. It stays for experts,
    whose MLP also weighs tokens, and where its fused function is set."""
    if (
        platform.use_cuda()
        or assembly.model.config.bias_activation_fusion
        or assembly.model.config.num_moe_experts
    ):
        return
    for module in assembly.model.modules():
        if type(module) is MLP and module.activation_func is silu:
            module.__class__ = GatedSiluMLP


def add_random_states() -> None:
    """Add every random state that a layer may enter; all roles share them.

    Reason: Megatron-Core expects its global initialisation to have added them. With sequence
    parallelism its embedding enters one for dropout, with rate 0 too. Transformer Engine's linear
    layers enter one while they are built, once there is any, or a model has been recomputed: one of
    their own for experts, and one for layers that are the same on all tensor-parallel ranks.
    Nothing is drawn from them, so their seeds do not matter."""
    tracker = mcore_random.get_cuda_rng_tracker()
    names = (
        mcore_random._MODEL_PARALLEL_RNG_TRACKER_NAME,
        mcore_random.get_expert_parallel_rng_tracker_name(),
        mcore_random.get_data_parallel_rng_tracker_name(),
    )
    for seed, name in enumerate(names):
        if name not in tracker.get_states():
            tracker.add(name, seed)


def gathering_objects_in(group: dist.ProcessGroup) -> AbstractContextManager[None]:
    """Let torch.distributed.all_gather_object gather over this group while an optimizer is built.

    Reason: Megatron-Core gathers the kinds of parameters of all ranks of the world, and ranks of
    another pool build no optimizer."""

    original = dist.all_gather_object

    def gather(objects: list[Any], own: Any) -> None:
        del objects[group.size() :]
        original(objects, own, group)

    return replaced(dist, "all_gather_object", gather)


def gather_parameters_once(optimizer: Any) -> None:
    """Let only the last of several distributed optimizers gather the parameters after a step.

    Reason: experts that are sharded have an optimizer of their own. The step of each of the two
    gathers the parameters of the whole model, so that all are gathered twice."""
    for part in optimizer.chained_optimizers[:-1]:
        if isinstance(part, DistributedOptimizer):
            part.step_with_ready_grads = functools.partial(
                MixedPrecisionOptimizer.step_with_ready_grads, part
            )


def parameters_in_order(
    chunk: torch.nn.Module, ordered: Sequence[tuple[str, torch.nn.Parameter]]
) -> AbstractContextManager[None]:
    """Let DistributedDataParallel, which is built meanwhile, register the parameters of a chunk in
    this order."""
    return replaced(chunk, "named_parameters", lambda **_: ordered)


def remove_hooks(nodes: list[Any]) -> None:
    """Remove all hooks of autograd's nodes.

    Reason: through them Megatron-Core's DistributedDataParallel refers to itself, and garbage
    collection does not follow nodes: a later run in the same process would have less memory.
    torch removes a hook by its handle, and Megatron-Core keeps none. Each handle refers to the
    dictionary of all hooks of its node, so a hook is added for its handle."""
    for node in nodes:
        handle = node.register_hook(lambda *gradients: None)
        handle.hooks_dict_ref().clear()
    nodes.clear()


def fuse_adam(optimizer: Any) -> None:
    """Let torch's AdamW update all parameters in one call. Apex's and Transformer Engine's do so
    anyway.

    Reason: Megatron-Core leaves it at torch's default, a call for each operation of each
    parameter."""
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group["fused"] = True


write_bucket = inspect.unwrap(FileSystemWriterAsync.write_preloaded_data)
"""FileSystemWriterAsync.write_preloaded_data without its decorator. Reason: the decorator turns the
garbage collector off, for the whole process; it is meant for a process of its own, and the caller
is a thread."""


def keep_results_in_process() -> None:
    """Have the next save of Megatron-Core put the results of its writers in a queue of this
    process.

    Reason: the first save starts a manager process for that queue, which imports the program and
    torch. A save that is not asynchronous reads the queue in the process that has filled it."""
    filesystem_async._results_queue = queue.SimpleQueue()


class PlannedSave(TorchDistSaveShardedStrategy):
    """dist_checkpointing's strategy up to the plan: `writer` and `plan` after async_save. One file
    per rank.

    Reason: Megatron-Core writes in processes. It forks them from a process with threads (vLLM's,
    gloo's), starts a manager process for their results, and all of them outlive a rank that is
    killed."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        keep_results_in_process()

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any) -> AsyncRequest:
        """Keep the plan; the original returns a request that starts the processes."""
        self.writer = writer
        self.plan = planned[1]
        return AsyncRequest(None, (), [])
