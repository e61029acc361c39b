"""The reduction of gradients over the replicas during the backward pass (overlap_grad_reduce)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlhf_mc.models.build import PackedGPT
from rlhf_mc.models.heads import output_weight


def set_reduction(config: Any, replicated: Sequence[Any]) -> None:
    """Let Megatron-Core's schedule reduce the gradients of these chunks (DistributedDataParallel) in the last
    micro-batch, as Megatron-LM does. `config` is that of the first chunk. Without chunks no pass reduces: a forward
    pass would enter no_sync, and never leave it.

    With pipeline stages the first one reduces during its backward pass, the others together with it (Megatron-LM's
    align_grad_reduce)."""
    no_sync = [chunk.no_sync for chunk in replicated]
    start = [chunk.start_grad_sync for chunk in replicated]
    several = len(replicated) > 1
    config.no_sync_func = no_sync if several else next(iter(no_sync), None)
    config.grad_sync_func = start if several else next(iter(start), None)


def loss_of_dummy(model: PackedGPT, hidden: torch.Tensor) -> torch.Tensor:
    """Return 0 with a gradient of 0 for every parameter. DistributedDataParallel waits for all of them, so the output
    layer, which no head applies, is among them."""
    return (hidden.float().sum() + output_weight(model).view(-1)[:1].float().sum()) * 0.0
