"""Recovery from running out of memory in the passes of an update, before any weight has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rlhf_mc import platform


class OutOfMemory(Exception):
    """A rank has run out of memory in the passes of an update. Raised on every rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is out of memory")
        self.rank = rank
        """The highest rank that has."""


class MemoryRecovery:
    """Lets every rank abandon an update in whose passes a rank runs out of memory.

    Until its gradients are reduced, a rank must not wait for another: one whose pass has failed
    would never come. So it is for models with data parallelism alone, without overlap_grad_reduce.
    It costs one reduction of 4 bytes over CPU memory for each update."""

    def __init__(self, config: Any) -> None:
        """config: Megatron-Core's TransformerConfig, whose finalize_model_grads_func reduces the
        gradients."""
        finalize = config.finalize_model_grads_func
        self._is_agreed = False

        def agree_then_finalize(*args: Any, **kwargs: Any) -> Any:
            self._agree(False)
            return finalize(*args, **kwargs)

        config.finalize_model_grads_func = agree_then_finalize

    def run(self, passes: Callable[[], None]) -> None:
        """Run the passes and the reduction that follows them. Raise OutOfMemory on every rank if
        one has run out of memory in its passes; all memory of the passes is free then. Every rank
        must call it."""
        self._is_agreed = False
        failed = False
        try:
            passes()
        except RuntimeError as error:
            if self._is_agreed or not platform.is_out_of_memory(error):
                raise
            # outside of this block nothing refers to the stack, which holds the activations
            failed = True
        if failed:
            platform.free_cached_memory()
            self._agree(True)

    def _agree(self, failed: bool) -> None:
        """Raise OutOfMemory if a rank calls it with True. Every rank must call it."""
        # CPU memory: over gloo
        rank = torch.tensor([dist.get_rank() if failed else -1], dtype=torch.int32)
        dist.all_reduce(rank, op=dist.ReduceOp.MAX)
        self._is_agreed = True
        if rank.item() >= 0:
            raise OutOfMemory(int(rank.item()))
