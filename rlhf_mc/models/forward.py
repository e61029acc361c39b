"""Micro-batches and their pass through this pipeline stage: sequences of the ragged batch are
packed, and the last stage's states are selected for a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from rlhf_mc import platform
from rlhf_mc.config.roles import tokens_on_rank
from rlhf_mc.data.balance import DUMMY_TOKENS
from rlhf_mc.data.batch import RaggedBatch, ragged_indices
from rlhf_mc.models.context_parallel import ONE_RANK, Context, joined
from rlhf_mc.models.layers import PackedSequences, pack
from rlhf_mc.models.megatron_patches import megatron_operations
from rlhf_mc.models.shared_prompts import (
    SharedRows,
    read,
    repeated_prompts,
)


@dataclass(frozen=True)
class MicroBatch:
    """Sequences packed end to end, with R results: one for each response token, or one for each
    sequence; and O results of observations, after these, where they are asked for. This rank has T
    of the tokens and r of the results: all, unless several ranks share the sequences. All tensors
    are on the device."""

    tokens: torch.Tensor
    """[1, T] int64."""
    packed: PackedSequences
    """The offsets of the sequences, padding included."""
    logit_positions: torch.Tensor
    """[r] int64: for each drawn token the position before it, whose final state predicts it; for a
    sequence its last token's."""
    targets: torch.Tensor
    """[r] int64: the drawn tokens; for sequences their last tokens."""
    response_index: torch.Tensor
    """[R] int64: index of each drawn token in the per-token vectors of the whole batch, or of each
    sequence in it; empty for a dummy."""
    own_results: torch.Tensor
    """[r] int64: indices in [R + O] of the results that this rank has; empty where it has all."""
    own_rows: np.ndarray
    """[r - o] int64, on the host: response_index of the results that this rank has."""
    num_observed: int = 0
    """O: tokens of observations that have a result."""
    sources: torch.Tensor | None = None
    """[T] int64: the places of the tokens in the tokens of the whole batch; -1 of padding; None:
    not asked for."""

    @property
    def is_dummy(self) -> bool:
        """True for a replica that has no sequence left but must take part in the collectives of the
        others."""
        return len(self.response_index) == 0

    def all_results(self, results: torch.Tensor) -> torch.Tensor:
        """Return the results [R + O, ...] of all context-parallel ranks, from this rank's [r, ...].
        All of them must call it."""
        context = self.packed.context
        return (
            results
            if context.size == 1
            else joined(
                results, self.own_results, len(self.response_index) + self.num_observed, context
            )
        )


_DUMMY = RaggedBatch(
    tokens=torch.zeros(DUMMY_TOKENS, dtype=torch.int32),
    prompt_lens=torch.ones(1, dtype=torch.int64),
    response_lens=torch.ones(1, dtype=torch.int64),
    rollout_log_probs=torch.zeros(1),
    finished=torch.ones(1, dtype=torch.bool),
)
"""The sequence of a micro-batch without any."""


def packed_lengths(
    batch: RaggedBatch,
    micro_batches: Sequence[Sequence[int]],
    multiple_of: int,
    contexts: Sequence[Context],
    share_prompts: bool = False,
) -> list[int]:
    """Return this rank's number of tokens of each micro-batch, as `pack_micro_batch` packs and pads
    it."""
    all_lens = batch.seq_lens.tolist()

    def tokens(indices: Sequence[int], context: Context) -> int:
        lens = [all_lens[i] for i in indices] or [DUMMY_TOKENS]
        unit = context.multiple(multiple_of)
        total = sum(tokens_on_rank(length, context.size) * context.size for length in lens)
        if share_prompts and context.size == 1 and indices:
            total -= repeated_prompts(batch, np.array(indices))[1]
        return -(-total // unit) * unit // context.size

    return list(map(tokens, micro_batches, contexts))


def pack_micro_batch(
    batch: RaggedBatch,
    indices: Sequence[int],
    multiple_of: int = 1,
    context: Context = ONE_RANK,
    at_last_token: bool = False,
    with_sources: bool = False,
    share_prompts: bool = False,
    with_observations: bool = False,
) -> MicroBatch:
    """Return these sequences of the batch, packed in order of length: neighbours of equal length
    share one attention call. Without indices it is a dummy, of which no result is used. With
    at_last_token it has a result for each sequence, else for each response token, and
    with_observations for each token of an observation.

    This rank's number of tokens is padded to a multiple of `multiple_of` by one more sequence, of
    token 0, that has no logit position. With context parallelism the end of each sequence is padded
    too, which no other token attends
    to. share_prompts: sequences with equal prompts have the prompt's tokens once, where that saves
    enough; not with context parallelism."""
    is_dummy = not indices
    if is_dummy:
        batch = _DUMMY
        indices = [0]
    # By numpy: on so few numbers torch takes three times as long.
    all_lens = batch.seq_lens.numpy()
    which = np.array(sorted(indices))
    which = which[all_lens[which].argsort(kind="stable")]
    lens = all_lens[which]
    seq_lens = context.padded(lens)
    ends = seq_lens.cumsum() - seq_lens + lens  # without the padding
    shares = share_prompts and context.size == 1
    owner, saved = repeated_prompts(batch, which) if shares else (None, 0)
    if missing := (saved - seq_lens.sum()) % context.multiple(multiple_of):
        seq_lens = np.append(seq_lens, missing)
    tokens = np.zeros(seq_lens.sum(), dtype=np.int64)  # they index embeddings
    packed_index = _ranges(ends - lens, lens)
    source = ragged_indices(all_lens, which)
    tokens[packed_index] = batch.tokens.numpy()[source]
    sources = np.full(len(tokens) if with_sources else 0, -1)
    if with_sources and not is_dummy:
        sources[packed_index] = source
    index = which
    position = ends - 1
    if not at_last_token:
        index = ragged_indices(batch.response_lens.numpy(), which)
        position = _before_drawn(batch, which, ends, packed_index, source, with_observations)
    targets = tokens[position if at_last_token else position + 1]
    num_observed = len(position) - len(index)
    packed = pack(seq_lens.tolist())
    packed.context = context
    own_results = np.empty(0, np.int64)
    if context.size > 1:
        on_rank = context.own_tokens(seq_lens)
        index_on_rank = np.full(len(tokens), -1)
        index_on_rank[on_rank] = np.arange(len(on_rank))
        tokens = tokens[on_rank]
        sources = sources[on_rank] if with_sources else sources
        packed.positions = packed.positions[on_rank]
        own_results = np.flatnonzero(index_on_rank[position] >= 0)
        position = index_on_rank[position[own_results]]
        targets = targets[own_results]
    if owner is not None and saved:
        prompt_lens = batch.prompt_lens.numpy()[which]
        owners, position, packed.shared = SharedRows.of(
            owner, prompt_lens, seq_lens, position, sources
        )
        tokens = tokens[owners]
        sources = sources[owners] if with_sources else sources
        packed.positions = packed.positions[owners]
    on_host = {
        "tokens": tokens[None],
        "logit_positions": position,
        "targets": targets,
        "response_index": index[:0] if is_dummy else index,
        "own_results": own_results,
        **({"sources": sources} if with_sources else {}),
    }
    *fields, cu_seqlens, packed.positions = platform.to_device(
        [*map(torch.from_numpy, on_host.values()), packed.cu_seqlens_q, packed.positions]
    )
    packed.cu_seqlens_q = packed.cu_seqlens_kv = cu_seqlens
    if context.size > 1:
        # The padding at the end of a sequence counts as tokens: causal attention to it has no
        # effect on the others.
        packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = cu_seqlens
        packed.cp_group = context.group
    else:
        # Transformer Engine's attention keeps the group of the micro-batch before
        packed.local_cp_size = 1
    own_rows = index[own_results[own_results < len(index)]] if context.size > 1 else index
    tensors = dict(zip(on_host, fields, strict=True))
    return MicroBatch(packed=packed, own_rows=own_rows, num_observed=num_observed, **tensors)


def _before_drawn(
    batch: RaggedBatch,
    which: np.ndarray,
    ends: np.ndarray,
    packed_index: np.ndarray,
    source: np.ndarray,
    with_observations: bool,
) -> np.ndarray:
    """Return the places before the drawn tokens of the sequences `which` [S], packed with these
    ends [S], then with_observations those before the tokens of observations. packed_index, source:
    of all their tokens, in the micro-batch and in the batch."""
    if batch.response_mask is not None:
        is_drawn = batch.response_mask.numpy()[source]
        drawn: np.ndarray = packed_index[is_drawn]
        if with_observations:
            lens = batch.seq_lens.numpy()[which]
            is_drawn[_ranges(lens.cumsum() - lens, batch.prompt_lens.numpy()[which])] = True
            drawn = np.append(drawn, packed_index[~is_drawn])
        return drawn - 1
    response_lens = batch.response_lens.numpy()[which]
    return _ranges(ends - response_lens, response_lens) - 1


def _ranges(starts: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """Return the numbers start to start + length of each range, end to end."""
    return np.arange(lens.sum()) + np.repeat(starts - lens.cumsum() + lens, lens)


def run_stage(model: Any, micro_batch: MicroBatch) -> torch.Tensor:
    """Return this pipeline stage's output for the micro-batch: [T, 1, hidden], or this rank's part
    of T with sequence parallelism."""
    with megatron_operations(model.config):
        out: torch.Tensor = model(
            input_ids=micro_batch.tokens,
            position_ids=None,
            attention_mask=None,
            packed_seq_params=micro_batch.packed,
        )
    return out


def states_at(model: Any, hidden: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    """Return the states [r, 1, hidden] at the logit positions of the last stage's output [T, 1,
    hidden] (this rank's part of T with sequence parallelism). Every tensor-parallel rank must call
    it, and pass back the same gradient."""
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=model.pg_collection.tp
        )
    if micro_batch.packed.shared is not None:
        return read(hidden, micro_batch.packed.shared.logits)
    return hidden.index_select(0, micro_batch.logit_positions)
