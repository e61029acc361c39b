"""Settings of Megatron-Core's pipeline schedule: shapes of the P2P messages, the reduction of
gradients during the backward pass (overlap_grad_reduce), and named ranges in traces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.transformer_config import TransformerConfig

from rlhf_mc import platform
from rlhf_mc.models.gpt_model import PackedGPT
from rlhf_mc.models.heads import output_weight

Shape = tuple[int, int, int]


class PlannedShapes(P2PCommunicator):
    """Megatron-Core's P2P messages, without its exchange of shapes before each tensor.

    With ragged micro-batches (variable_seq_lengths) the original sends the shape as a tensor of its
    own, waits for the device, and reads it on the host. Here the shapes come from the plan, in the
    order in which the schedule receives the tensors: the order of the micro-batches, forward and
    backward, or with virtual pipeline chunks of its schedule table."""

    def __init__(
        self, group: dist.ProcessGroup, config: TransformerConfig, lengths: Sequence[int]
    ) -> None:
        """lengths: tokens on this rank of each micro-batch, padding included."""
        super().__init__(group, config)
        chunks = config.virtual_pipeline_model_parallel_size or 1
        table = get_schedule_table(len(lengths), chunks, config.microbatch_group_size_per_vp_stage)
        shapes = [
            (chunk, (lengths[micro_batch], 1, config.hidden_size)) for micro_batch, chunk in table
        ]
        # From the last stage the first one receives the outputs of all chunks but the last, which
        # ends the model. The last stage receives the gradients of these outputs.
        around = [shape for chunk, shape in shapes if chunk < chunks - 1]
        every = [shape for _, shape in shapes]
        self._from_prev = iter(around if group.rank() == 0 else every)
        self._from_next = iter(around if group.rank() == group.size() - 1 else every)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape | None, Shape | None]:
        """Return the shapes of the next tensors from the previous and from the next stage."""
        return next(self._from_prev) if recv_prev else None, next(
            self._from_next
        ) if recv_next else None


def set_reduction(config: Any, replicated: Sequence[Any]) -> None:
    """Let Megatron-Core's schedule reduce the gradients of these chunks (DistributedDataParallel)
    in the last micro-batch, as Megatron-LM does. config: the first chunk's. Without chunks no pass
    reduces: a forward
    pass would enter no_sync, and never leave it.

    With pipeline stages the first one reduces during its backward pass, the others together with it
    (Megatron-LM's align_grad_reduce)."""
    no_sync = [chunk.no_sync for chunk in replicated]
    start = [chunk.start_grad_sync for chunk in replicated]
    several = len(replicated) > 1
    config.no_sync_func = no_sync if several else next(iter(no_sync), None)
    config.grad_sync_func = start if several else next(iter(start), None)


def loss_of_dummy(model: PackedGPT, hidden: torch.Tensor) -> torch.Tensor:
    """Return 0 with a gradient of 0 for every parameter. DistributedDataParallel waits for all of
    them, so the output layer, which no head applies, is among them."""
    return (hidden.float().sum() + output_weight(model).view(-1)[:1].float().sum()) * 0.0


_NAMES = {"forward-compute": "forward", "backward-compute": "backward"}


class _Timers:
    """Stands for Megatron-Core's Timers: what is timed becomes a named range."""

    def __init__(self) -> None:
        self._open: dict[str, Any] = {}
        self._name = ""

    def __call__(self, name: str, log_level: int | None = None) -> _Timers:
        """Choose the timer that the next call starts or stops. log_level: Megatron-Core's,
        unused."""
        self._name = name
        return self

    def start(self, barrier: bool = False) -> None:
        """Enter the range. barrier: unused, so that a trace shows how long ranks wait for others,
        and where."""
        self._open[self._name] = platform.named_range(_NAMES.get(self._name, self._name))
        self._open[self._name].__enter__()

    def stop(self, barrier: bool = False) -> None:
        """Leave the range."""
        self._open.pop(self._name).__exit__(None, None, None)

    def close(self) -> None:
        """Leave the ranges that an error has left open, the last first."""
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)


@contextlib.contextmanager
def schedule_ranges(config: Any) -> Iterator[None]:
    """Let Megatron-Core's schedule of a model with this config (TransformerConfig) mark its parts,
    where ranges are recorded."""
    if not platform.ranges_are_recorded():
        yield
        return
    config.timers = timers = _Timers()
    try:
        yield
    finally:
        timers.close()
        config.timers = None
