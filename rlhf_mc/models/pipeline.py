"""P2P messages between pipeline stages whose shapes each stage knows beforehand, since it knows every micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.transformer_config import TransformerConfig

Shape = tuple[int, int, int]


class PlannedShapes(P2PCommunicator):
    """Megatron-Core's P2P messages, without its exchange of shapes before each tensor.

    With ragged micro-batches (variable_seq_lengths) the original sends the shape as a tensor of its own, waits for the
    device, and reads it on the host. Here the shapes come from the plan, in the order in which the schedule receives
    the tensors: that of the micro-batches, forward and backward, or with virtual pipeline chunks that of its schedule
    table."""

    def __init__(self, group: dist.ProcessGroup, config: TransformerConfig, lengths: Sequence[int]) -> None:
        """lengths: tokens on this rank of each micro-batch, padding included."""
        super().__init__(group, config)
        chunks = config.virtual_pipeline_model_parallel_size or 1
        table = get_schedule_table(len(lengths), chunks, config.microbatch_group_size_per_vp_stage)
        shapes = [(chunk, (lengths[micro_batch], 1, config.hidden_size)) for micro_batch, chunk in table]
        # From the last stage the first one receives the outputs of all chunks but the last, which ends the model. The
        # last stage receives the gradients of these outputs.
        around = [shape for chunk, shape in shapes if chunk < chunks - 1]
        every = [shape for _, shape in shapes]
        self._from_prev = iter(around if group.rank() == 0 else every)
        self._from_next = iter(around if group.rank() == group.size() - 1 else every)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape | None, Shape | None]:
        """Return the shapes of the next tensors from the previous and from the next stage."""
        return _next_if(recv_prev, self._from_prev), _next_if(recv_next, self._from_next)


def _next_if(wanted: bool, shapes: Iterator[Shape]) -> Shape | None:
    return next(shapes) if wanted else None
