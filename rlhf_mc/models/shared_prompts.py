"""Prompts computed once for all their responses in a micro-batch. Its tokens are unique: each
prompt, and each response. Only the sequence mixer of a layer (attention, a gated delta net) gets
rows: whole sequences, for today's kernels. All else of a layer sees unique tokens.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.attention import Attention
from torch.nn.functional import embedding_bag

from rlhf_mc import platform
from rlhf_mc.data.balance import is_worth_sharing
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.steps import Assembly


@dataclass(frozen=True)
class Reads:
    """The tokens of U that N places read. All tensors are on the device."""

    index: torch.Tensor
    """[N] int64: the token that each place reads."""
    places: torch.Tensor
    """[N] int64: the places, by token."""
    starts: torch.Tensor
    """[U] int64: the start of each token's places in `places`."""

    @staticmethod
    def of(index: np.ndarray, num_tokens: int) -> Reads:
        """Return the description of index [N] int64, of U tokens."""
        counts = np.bincount(index, minlength=num_tokens)
        arrays = (index, index.argsort(kind="stable"), counts.cumsum() - counts)
        return Reads(*platform.to_device([*map(torch.from_numpy, arrays)]))


class _Read(torch.autograd.Function):
    """x [U, ...] at the places [N, ...]. embedding_bag adds the gradients of a token that several
    places read in float32 at least, in the order of the places: index_add would round after each,
    and has no fixed order on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, reads: Reads) -> torch.Tensor:
        ctx.reads = reads
        return x.index_select(0, reads.index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        reads = ctx.reads
        out = embedding_bag(reads.places, grad.flatten(1), reads.starts, mode="sum")
        return out.unflatten(1, grad.shape[1:]), None


def read(x: torch.Tensor, reads: Reads) -> torch.Tensor:
    """Return x [U, ...] at the places: [N, ...]."""
    out: torch.Tensor = _Read.apply(x, reads)
    return out


class _Owned(torch.autograd.Function):
    """The rows [N, ...] at the places `owners` [U], which differ."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(owners)
        ctx.size = len(rows)
        return rows.index_select(0, owners)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(
            0, ctx.saved_tensors[0], grad
        ), None


@dataclass(frozen=True)
class SharedRows:
    """The N row tokens and U unique tokens of a micro-batch. A prompt's tokens are owned by the
    first of its sequences."""

    logits: Reads
    """The unique tokens of the logit positions: the last one of a prompt predicts the first token
    of each response."""
    rows: Reads
    """The unique token of each row token."""
    owners: torch.Tensor
    """[U] int64: the row token that owns each unique token."""
    sources: torch.Tensor
    """[N] int64: MicroBatch.sources of the row tokens; empty where these are not asked for."""
    nodes: torch.Tensor
    """[U] int64: the node of each unique token. Sequence s of S has the nodes 2 s of its prompt,
    unused where another sequence owns it, and 2 s + 1 of its own tokens."""
    members: torch.Tensor
    """[S, 2 S] float64: 1 where a sequence has the tokens of a node, else 0."""

    @staticmethod
    def of(
        owner: np.ndarray,
        prompt_lens: np.ndarray,
        lens: np.ndarray,
        positions: np.ndarray,
        sources: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, SharedRows]:
        """Return the row token that owns each unique token [U], the unique tokens of the logit
        positions, and the description.

        owner: [S], for each sequence the one that owns its prompt. prompt_lens: [S] tokens. lens:
        [S or S + 1], padding the last. positions: row tokens of the logit positions. sources: of
        the row tokens, or empty."""
        if len(owner) < len(lens):
            owner = np.append(owner, len(owner))
            prompt_lens = np.append(prompt_lens, 0)
        ends = lens.cumsum()
        row_token = np.arange(ends[-1])
        count = np.arange(len(lens))
        sequence = np.repeat(count, lens)
        offset = row_token - (ends - lens)[sequence]
        is_prompt = offset < prompt_lens[sequence]
        is_copy = is_prompt & (owner != count)[sequence]
        of_owner = np.where(is_copy, (ends - lens)[owner[sequence]] + offset, row_token)
        rows = ((~is_copy).cumsum() - 1)[of_owner]
        members = np.zeros((len(lens), 2 * len(lens)))
        members[count, 2 * owner] = 1.0
        members[count, 2 * count + 1] = 1.0
        owners = row_token[~is_copy]
        arrays = (owners, sources, (2 * sequence + ~is_prompt)[owners], members)
        logits = rows[positions]
        return (
            owners,
            logits,
            SharedRows(
                Reads.of(logits, len(owners)),
                Reads.of(rows, len(owners)),
                *platform.to_device([*map(torch.from_numpy, arrays)]),
            ),
        )

    def over_rows(
        self, mixer: Callable[..., torch.Tensor], *tensors: torch.Tensor, recomputes: bool
    ) -> torch.Tensor:
        """Return the mixer's output [U, ...] of tensors [U, ...], computed on rows.

        recomputes: the caller computes it again in the backward pass. Otherwise rows that the mixer
        saves for it are not stored: they are gathered again."""
        rows = [read(x, self.rows) for x in tensors]
        hooks: Any = contextlib.nullcontext()
        if not recomputes and torch.is_grad_enabled():
            gather = _GatheredAgain(tensors, rows, self.rows.index)
            hooks = torch.autograd.graph.saved_tensors_hooks(gather.pack, gather.unpack)
        with hooks:
            out = mixer(*rows)
        owned: torch.Tensor = _Owned.apply(out, self.owners)
        return owned


class _GatheredAgain:
    """Hooks of autograd that store a view of rows as a description: of which tensor, and where."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], index: torch.Tensor
    ) -> None:
        self._tensors = [x.detach() for x in tensors]
        self._index = index
        self._numbers = {x.untyped_storage().data_ptr(): i for i, x in enumerate(rows)}

    def pack(self, saved: torch.Tensor) -> Any:
        """Return what is stored in place of the tensor."""
        number = self._numbers.get(saved.untyped_storage().data_ptr())
        if number is None:
            return saved
        return number, saved.shape, saved.stride(), saved.storage_offset()

    def unpack(self, stored: Any) -> torch.Tensor:
        """Return the tensor."""
        if isinstance(stored, torch.Tensor):
            return stored
        number, shape, stride, offset = stored
        source = self._tensors[number]
        size = source[0].numel()
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        first = offset // size
        rows = source.index_select(0, self._index[first : last // size + 1])
        return rows.as_strided(shape, stride, offset - first * size)


def attend_over_rows(assembly: Assembly) -> None:
    """Let each attention of Megatron-Core compute over rows where a micro-batch shares prompts. The
    module around it then has the format "packed", whose rotary angles are those of the positions.

    Reason: Megatron-Core's attention takes whole sequences."""
    if not assembly.megatron.share_prompts or 1 not in assembly.groups.mesh.context_sizes:
        return  # sequences that several ranks share have their prompts each
    for module in assembly.model.modules():
        if isinstance(module, Attention):
            core = module.core_attention
            recomputes = (
                module.checkpoint_core_attention or module.config.recompute_granularity == "full"
            )
            core.forward = functools.partial(
                _attend, core.forward, assembly.model.qkv_format, recomputes
            )


def _attend(
    kernel: Callable[..., torch.Tensor],
    qkv_format: str,
    recomputes: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    packed_seq_params: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Return the kernel's output, of unique tokens [U, 1, heads * v_head_dim] where they are
    shared."""
    shared = packed_seq_params.shared
    if shared is None:
        return kernel(query, key, value, *args, packed_seq_params=packed_seq_params, **kwargs)
    packed = packed_seq_params.for_format(qkv_format)

    def attend(*rows: torch.Tensor) -> torch.Tensor:
        inputs = (x.squeeze(1) for x in rows) if qkv_format == "thd" else rows
        return kernel(*inputs, *args, packed_seq_params=packed, **kwargs).reshape(
            len(rows[0]), 1, -1
        )

    out: torch.Tensor = shared.over_rows(attend, query, key, value, recomputes=recomputes)
    return out


def repeated_prompts(batch: RaggedBatch, which: np.ndarray) -> tuple[np.ndarray, int]:
    """Return for each of the sequences `which` [S], in their order, the place in `which` of the
    first one with an equal prompt: [S] int64; and the tokens that sharing prompts saves, 0 where
    they are too few."""
    firsts, inverse = np.unique(batch.prompt_groups[which], return_index=True, return_inverse=True)[
        1:
    ]
    owner = firsts[inverse]
    tokens = int(batch.seq_lens.numpy()[which].sum())
    saved = int(batch.prompt_lens.numpy()[which][owner != np.arange(len(which))].sum())
    return owner, saved if is_worth_sharing(tokens, tokens - saved) else 0
