"""The libraries that the processes of forked.py start with. The fork server imports this module and
nothing else."""

from __future__ import annotations

import gc
import mmap
from typing import Any
from unittest import mock

# The program first: it sets what vLLM reads when it is imported.
import rlhf_mc.checkpoint.convert
import rlhf_mc.rollout.vllm_engine
import rlhf_mc.trainer.loop  # noqa: F401

# isort: split
# Imports that vLLM makes only when it builds an engine.
import compressed_tensors  # noqa: F401
import torch
import transformers.models.qwen2.modeling_qwen2  # noqa: F401
import vllm.entrypoints.llm  # noqa: F401
from declared_metrics import declared_only
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_worker import CPUWorker

from rlhf_mc.observability.sinks import Sinks
from rlhf_mc.trainer import lifecycle

# vLLM searches all modules for its kernels in each engine. One search finds them all.
CpuPlatform.register_triton_kernel_overrides()
CpuPlatform.register_triton_kernel_overrides = staticmethod(lambda: None)

# vLLM inspects the class of a model in a new process, so that this one does not initialise CUDA. It
# caches the result in the home directory. On a new machine that is an import of vLLM for each
# family and rank.
registry._run_in_subprocess = lambda function: function()

# vLLM fills its KV cache with zeros: 1 GiB at the smallest setting, of which the tests' models use
# some MiB. Anonymous pages are zeros, aligned as kernels expect, and there only when touched.
available_memory = CPUWorker.determine_available_memory
CPUWorker.determine_available_memory = lambda worker: min(available_memory(worker), 1 << 26)
allocate = gpu_model_runner.allocate_kv_cache


def zeros(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    assert (dtype, device.type) == (torch.int8, "cpu")
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.int8)


def allocate_kv_cache(*args: Any, **kwargs: Any) -> Any:
    with mock.patch.object(torch, "zeros", zeros):
        return allocate(*args, **kwargs)


gpu_model_runner.allocate_kv_cache = allocate_kv_cache

# A plot takes 0.7 s of a run. test_quickstart.py, whose ranks do not start here, has a real one.
lifecycle.plot_run = lambda rows, output, title: output.touch()

Sinks.log = declared_only(Sinks.log)  # type: ignore[method-assign]

# The libraries' objects stay out of every garbage collection. vLLM collects 8 times for each
# engine, and it unfreezes what was frozen with the first engine: 2 s more for each one after that.
gc.collect()
gc.freeze()
freeze = gc.freeze  # for the ranks that tests share
gc.freeze = gc.unfreeze = lambda: None
