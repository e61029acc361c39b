"""The libraries that the processes of forked.py start with. The fork server imports this module and nothing else."""

from __future__ import annotations

import functools
import gc

# Beside the program's own imports, those that vLLM makes only where it builds an engine.
import compressed_tensors  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import transformers.models.qwen2.modeling_qwen2  # noqa: F401
import vllm.entrypoints.llm
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.platforms.cpu import CpuPlatform

import rlhf_mc.checkpoint.convert
import rlhf_mc.trainer.loop  # noqa: F401

# vLLM searches all modules for its kernels in each engine: the first search of a process finds them all.
search_once = functools.cache(CpuPlatform.register_triton_kernel_overrides)
CpuPlatform.register_triton_kernel_overrides = staticmethod(search_once)

# The libraries' objects stay out of every garbage collection. vLLM collects 8 times for each engine, and it unfreezes
# what was frozen with the first engine: 2 s more for each one after that.
gc.collect()
gc.freeze()
gc.freeze = gc.unfreeze = lambda: None
