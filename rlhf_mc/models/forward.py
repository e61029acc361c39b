"""One packed micro-batch: cut out of the ragged batch, run through a model's stage, heads applied to the
states that predict response tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from rlhf_mc import platform
from rlhf_mc.data.batch import RaggedBatch, ragged_indices
from rlhf_mc.models.attention import PackedSequences, pack
from rlhf_mc.models.build import uses_transformer_engine


@dataclass(frozen=True)
class MicroBatch:
    """Sequences packed end to end, T tokens of which R are response tokens."""

    tokens: torch.Tensor
    """[1, T] int64, on the device."""
    packed: PackedSequences
    """Where each sequence lies."""
    predicting: torch.Tensor
    """[R] int64, on the device: position whose final state predicts each response token."""
    targets: torch.Tensor
    """[R] int64, on the device: the response tokens."""
    response_index: torch.Tensor
    """[R] int64: each response token's place in the whole batch's per-token vectors; empty for a filler."""
    last: torch.Tensor
    """[S] int64, on the device: position of each sequence's last token."""
    sequence_index: torch.Tensor
    """[S] int64: each sequence's place in the whole batch; empty for a filler."""

    @property
    def is_filler(self) -> bool:
        """True where a replica has run out of sequences but must take part in the collectives of the others."""
        return len(self.response_index) == 0


def cut_micro_batch(batch: RaggedBatch, indices: Sequence[int], multiple_of: int = 1) -> MicroBatch:
    """These sequences of the batch, packed; passes that cut a batch alike (several models, several epochs) share what
    the first of them has packed."""
    what = ("micro-batch", tuple(indices), multiple_of)
    return batch.once(what, lambda: _pack_micro_batch(batch, indices, multiple_of))


def _pack_micro_batch(batch: RaggedBatch, indices: Sequence[int], multiple_of: int) -> MicroBatch:
    """Packs these sequences of the batch, shortest first (neighbours of equal length share one attention call).
    An empty list gives a filler: the batch's first sequence, whose results count for nothing. Where their tokens are
    no multiple of `multiple_of`, one more sequence of token 0, from which nothing is predicted, makes up for it."""
    lens = batch.seq_lens
    which = torch.tensor(sorted(indices or [0], key=lambda i: (int(lens[i]), i)), dtype=torch.int64)
    seq_lens, prompt_lens, response_lens = lens[which], batch.prompt_lens[which], batch.response_lens[which]
    tokens = batch.tokens[ragged_indices(lens, which)]
    first_response = torch.cumsum(seq_lens, 0) - seq_lens + prompt_lens
    response_starts = torch.cumsum(response_lens, 0) - response_lens
    position = torch.arange(int(response_lens.sum())) + torch.repeat_interleave(
        first_response - response_starts, response_lens
    )
    ends = torch.cumsum(seq_lens, 0)
    if missing := -len(tokens) % multiple_of:
        tokens = torch.cat([tokens, tokens.new_zeros(missing)])
        seq_lens = torch.cat([seq_lens, seq_lens.new_tensor([missing])])
    device = platform.device()
    response_index = ragged_indices(batch.response_lens, which)
    return MicroBatch(
        tokens=tokens[None].to(device),
        packed=pack(seq_lens.tolist(), device, uses_transformer_engine()),
        predicting=(position - 1).to(device),
        targets=tokens[position].to(device),
        response_index=response_index if indices else response_index[:0],
        last=(ends - 1).to(device),
        sequence_index=which if indices else which[:0],
    )


def run_stage(model: Any, micro_batch: MicroBatch) -> torch.Tensor:
    """This pipeline stage's output for the micro-batch: [T, 1, hidden], or this rank's part of T with sequence
    parallelism."""
    out: torch.Tensor = model(
        input_ids=micro_batch.tokens, position_ids=None, attention_mask=None, packed_seq_params=micro_batch.packed
    )
    return out


def states_at(model: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[N, 1, hidden] at positions [N] of the last stage's [T, 1, hidden] (of this rank's part of T with sequence
    parallelism). Every tensor-parallel rank must call it; what they hand back as gradient must be the same on all."""
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=model.pg_collection.tp
        )
    return hidden.index_select(0, positions)
