"""Copies of attention sinks that attentions of vLLM hold: a weight update does not write them."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_mc import platform


def renew_sinks(model: torch.nn.Module) -> None:
    """Let the attentions of vLLM's model read new sinks. FlashInfer's holds a float32 copy from the end of loading, and
    captured graphs read it; on a CPU the first pass copies float16 ones."""
    for module in model.modules():
        if hasattr(module, "sinks") and hasattr(module, "attn"):
            _renew(module)


def _renew(module: Any) -> None:
    if platform.use_cuda():
        module.attn.impl.process_weights_after_loading(module.sinks.dtype)
    else:
        module.attn.impl.sinks = module.sinks
