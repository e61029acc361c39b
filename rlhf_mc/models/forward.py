"""Micro-batches and their pass through this pipeline stage: sequences of the ragged batch are packed, and the last
stage's states are selected for a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from rlhf_mc import platform
from rlhf_mc.data.batch import RaggedBatch, ragged_indices
from rlhf_mc.models.layers import PackedSequences, pack
from rlhf_mc.models.megatron_patches import megatron_operations


@dataclass(frozen=True)
class MicroBatch:
    """Sequences packed end to end: T tokens, of which R are response tokens. All tensors are on the device."""

    tokens: torch.Tensor
    """[1, T] int64."""
    packed: PackedSequences
    """The offsets of the sequences, padding included."""
    logit_positions: torch.Tensor
    """[R] int64: for each response token the position before it, whose final state predicts it."""
    targets: torch.Tensor
    """[R] int64: the response tokens."""
    response_index: torch.Tensor
    """[R] int64: index of each response token in the per-token vectors of the whole batch; empty for a dummy."""
    last: torch.Tensor
    """[S] int64: position of each sequence's last token."""
    sequence_index: torch.Tensor
    """[S] int64: index of each sequence in the whole batch; empty for a dummy."""

    @property
    def is_dummy(self) -> bool:
        """True for a replica that has no sequence left but must take part in the collectives of the others."""
        return len(self.response_index) == 0


def packed_lengths(batch: RaggedBatch, micro_batches: Sequence[Sequence[int]], multiple_of: int = 1) -> list[int]:
    """Return the number of tokens of each micro-batch, as `pack_micro_batch` packs and pads it."""
    lens = batch.seq_lens.tolist()
    return [-(-sum(lens[i] for i in indices or [0]) // multiple_of) * multiple_of for indices in micro_batches]


def pack_micro_batch(batch: RaggedBatch, indices: Sequence[int], multiple_of: int = 1) -> MicroBatch:
    """Return these sequences of the batch, packed in order of length: neighbours of equal length share one attention
    call. Without indices it is a dummy: the batch's first sequence, of which no result is used.

    The number of tokens is padded to a multiple of `multiple_of` by one more sequence, of token 0, that has no logit
    position."""
    # By numpy: on so few numbers torch takes three times as long.
    all_lens = batch.seq_lens.numpy()
    which = np.array(sorted(indices or [0]))
    which = which[all_lens[which].argsort(kind="stable")]
    seq_lens = all_lens[which]
    response_lens = batch.response_lens.numpy()[which]
    tokens = batch.tokens.numpy()[ragged_indices(all_lens, which)].astype(np.int64)  # they index embeddings
    ends = seq_lens.cumsum()
    first_response = ends - response_lens
    response_starts = response_lens.cumsum() - response_lens
    position = np.arange(response_lens.sum()) + np.repeat(first_response - response_starts, response_lens)
    if missing := -len(tokens) % multiple_of:
        tokens = np.append(tokens, np.zeros(missing, tokens.dtype))
        seq_lens = np.append(seq_lens, missing)
    response_index = ragged_indices(batch.response_lens.numpy(), which)
    packed = pack(seq_lens.tolist())
    on_host = {
        "tokens": tokens[None],
        "logit_positions": position - 1,
        "targets": tokens[position],
        "response_index": response_index if indices else response_index[:0],
        "last": ends - 1,
        "sequence_index": which if indices else which[:0],
    }
    *fields, cu_seqlens, packed.positions = platform.to_device(
        [*map(torch.from_numpy, on_host.values()), packed.cu_seqlens_q, packed.positions]
    )
    packed.cu_seqlens_q = packed.cu_seqlens_kv = cu_seqlens
    return MicroBatch(packed=packed, **dict(zip(on_host, fields, strict=True)))


def run_stage(model: Any, micro_batch: MicroBatch) -> torch.Tensor:
    """Return this pipeline stage's output for the micro-batch: [T, 1, hidden], or this rank's part of T with sequence
    parallelism."""
    with megatron_operations(model.config):
        out: torch.Tensor = model(
            input_ids=micro_batch.tokens, position_ids=None, attention_mask=None, packed_seq_params=micro_batch.packed
        )
    return out


def states_at(model: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the states [N, 1, hidden] at positions [N] of the last stage's output [T, 1, hidden] (this rank's part of
    T with sequence parallelism). Every tensor-parallel rank must call it, and pass back the same gradient."""
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=model.pg_collection.tp
        )
    return hidden.index_select(0, positions)
