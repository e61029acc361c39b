"""The options that vLLM is given: of its engine, of a GPU, of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlhf_mc.rollout import vllm_patches  # isort: skip  (first: it sets what vllm reads)
import vllm
from vllm.device_allocator.alloc_conf import expandable_segments_enabled_from_env

from rlhf_mc import platform
from rlhf_mc.architectures.families import FAMILIES
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.rollout.base import Request, Sampling
from rlhf_mc.rollout.vllm_scheduler import DecodeScheduler
from rlhf_mc.runtime.console import print_line


def engine_settings(
    model_path: str, shape: ModelShape, cfg: RolloutConfig, max_model_len: int, dtype: str
) -> dict[str, Any]:
    """Return vLLM's arguments for the model and its layout."""
    vllm_patches.register_text_models(shape.family)
    family = FAMILIES[shape.family]
    # They replace keys of config.json.
    overrides: dict[str, Any] = {"tie_word_embeddings": shape.tie_embeddings}
    for block in shape.blocks:
        overrides |= block.vllm_overrides
    if platform.float32_products():
        # The trainer's logits are then float32 (models/heads.py): vLLM's are rounded no
        # differently.
        overrides["head_dtype"] = "float32"
    return {
        "model": model_path,
        "config_format": "hf",  # not mistral's params.json, which the trainer does not read
        "skip_tokenizer_init": True,
        "hf_overrides": text_overrides(overrides) if family.is_nested else overrides,
        "tensor_parallel_size": cfg.tensor_model_parallel_size,
        "distributed_executor_backend": "external_launcher",
        "load_format": vllm_patches.LOAD_FORMAT,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": cfg.max_num_seqs,
        "max_num_batched_tokens": max(cfg.max_num_batched_tokens, max_model_len),
        "scheduler_cls": DecodeScheduler,
        "disable_log_stats": True,
        **{key: value for block in shape.blocks for key, value in block.vllm_options.items()},
    }


def text_overrides(overrides: dict[str, Any]) -> Callable[[Any], Any]:
    """Return vLLM's override that replaces a model of images and text by its language model, with
    other values of its keys."""

    def override(config: Any) -> Any:
        text = config.get_text_config()
        family = FAMILIES.get(text.model_type)
        names = {"architectures": [family.architecture]} if family else {}
        text.update(overrides | names)
        return text

    return override


def gpu_options(cfg: RolloutConfig) -> dict[str, Any]:
    """Return vLLM's options that a CPU does not have."""
    options: dict[str, Any] = {
        "gpu_memory_utilization": cfg.gpu_memory_utilization / platform.ranks_per_gpu(),
        "enforce_eager": cfg.enforce_eager,
        "enable_sleep_mode": cfg.free_cache_engine,
        # The memory of CUDA graphs is copied to the host and back. vLLM does so only if asked to.
        "sleep_mode_offload_cudagraph": offloads_graphs(cfg),
        # The only backend that does not repack the weights of experts: a weight update writes them
        # in place.
        "moe_backend": "triton",
        # FlashInfer's kernel of linear attention is compiled by nvcc in the first run, on every
        # node.
        "gdn_prefill_backend": "triton",
    }
    if torch.are_deterministic_algorithms_enabled() or platform.ranks_per_gpu() > 1:
        # FlashInfer's all-reduce, alone (runtime/determinism.py, topology/shared_gpu.py) or fused
        # with a norm, adds in no fixed order, and needs a GPU for each rank.
        options["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    return options


def offloads_graphs(cfg: RolloutConfig) -> bool:
    """Return whether a sleep moves the memory of CUDA graphs to the host."""
    return cfg.free_cache_engine and cfg.offload_cuda_graphs


def custom_all_reduce(groups: Sequence[Sequence[int]], cfg: RolloutConfig) -> bool:
    """Return whether vLLM may use its custom all-reduce; on a GPU print a line if not.

    CustomAllreduce.register_graph_buffers collects the addresses in captured graphs by sorted rank,
    but files this rank's own by its rank in the group. The two differ in groups that do not ascend,
    and a capture fails. It fails too where torch allocates expandable segments, which
    cudaIpcGetMemHandle refuses (vLLM issue 42609); graphs that vLLM offloads are not registered.
    vLLM's other all-reduces (FlashInfer, symmetric memory, NCCL) number the ranks as the group
    does, and share memory of their own."""
    unsorted = next((list(group) for group in groups if list(group) != sorted(group)), None)
    reason = ""
    if platform.ranks_per_gpu() > 1:
        reason = f"it needs a GPU for each rank ({platform.RANKS_PER_GPU})"
    elif unsorted is not None:
        reason = f"it needs ascending ranks, and an engine has {unsorted}"
    elif not (offloads_graphs(cfg) or cfg.enforce_eager) and expandable_segments_enabled_from_env():
        reason = (
            "it cannot share the memory of CUDA graphs, since PYTORCH_CUDA_ALLOC_CONF has "
            "expandable_segments"
        )
    if reason and platform.use_cuda():
        print_line(f"rollout: vLLM's custom all-reduce is off: {reason}", rank_0_only=True)
    return not reason


def sampling_params(
    sampling: Sampling, request: Request, draws_itself: bool
) -> vllm.SamplingParams:
    """Return vLLM's parameters of a request. draws_itself: vLLM draws the tokens, not the
    trainer."""
    return vllm.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=(request.max_tokens or sampling.max_tokens) - len(request.partial.token_ids),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # the end tokens are among stop_token_ids
        detokenize=False,
        # vLLM changes nothing in it that differs by request: a shallow copy is enough
        skip_clone=True,
        seed=request.seed if draws_itself else None,
        logprobs=0 if draws_itself else None,
    )
