"""Layers for Megatron-Core's layer specification. Where Transformer Engine does not attend:
attention and rotary positions over packed sequences, with one scaled_dot_product_attention per run
of equally long sequences, so that no padded token is computed. For local layers: norms, since
Megatron-Core's own norm for them supports neither sequence parallelism nor zero-centred weights.
For all layers: attention with more tensor-parallel ranks than KV heads.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from rlhf_mc import platform
from rlhf_mc.architectures.attention import Attention
from rlhf_mc.models.context_parallel import ONE_RANK, Context
from rlhf_mc.models.cpu_operations import rms_norm, rotary_table
from rlhf_mc.models.shared_prompts import SharedRows


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron-Core's description of packed sequences, extended for PackedAttention.

    Each model sets qkv_format as its attention needs it. With "thd" Transformer Engine attends
    within the sequences. With "packed", which Megatron-Core does not know, it passes q, k and v
    through as [T, 1, heads, head_dim], and applies the rotary angles of all tokens in one operation
    (its unfused "thd" rotary splits and joins the sequences in every layer)."""

    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[T] int64: position of each token in its sequence."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """(number of sequences, their length), in packing order: adjacent sequences of equal length are
    one batch."""
    pad_between_seqs: bool = False
    """For Transformer Engine: no sequence is shorter than its place. Padding within a sequence
    counts as tokens."""
    context: Context = ONE_RANK
    """The ranks that share the sequences. `positions` are of this rank's tokens, all else is of
    whole sequences."""
    shared: SharedRows | None = None
    """Prompts that several sequences share. `positions` are of unique tokens, all else is of rows;
    None: no prompt is shared."""

    def for_format(self, qkv_format: str) -> PackedSequences:
        """Return the same description, with the same tensors, for this format."""
        config = copy.copy(self)
        config.qkv_format = qkv_format
        return config


def pack(seq_lens: Sequence[int]) -> PackedSequences:
    """Return the description of sequences of these lengths, packed one after another, with its
    tensors on the host. Sorted lengths give the fewest runs."""
    lens = np.array(seq_lens, dtype=np.int64)
    ends = lens.cumsum()
    starts = np.repeat(ends - lens, lens)
    cu_seqlens = torch.from_numpy(np.append(np.int64(0), ends).astype(np.int32))
    longest = max(seq_lens)
    return PackedSequences(
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=torch.from_numpy(np.arange(ends[-1]) - starts),
        runs=[(len(list(equal)), length) for length, equal in itertools.groupby(seq_lens)],
    )


class PackedAttention(torch.nn.Module):
    """Core attention for Megatron-Core: causal within each packed sequence, with grouped queries.

    q [T, 1, heads, head_dim], k [T, 1, kv_heads, head_dim] and v [T, 1, kv_heads, v_head_dim]
    -> [T, 1, heads * v_head_dim].

    On a GPU torch 2.13 has no kernel for grouped queries in float32 (sdp_utils.cpp,
    can_use_mem_efficient_attention) and would store all scores, length x length of each head. So k
    and v are repeated there for each query head, which its memory-efficient kernel takes. From the
    forward to the backward pass that is 8 * (heads - kv_heads) * head_dim bytes more per token and
    layer.

    With sinks (softmax_type "learnable") its parameter has the name and the shards of
    Megatron-Core's attentions, and some layers have a sliding window."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *,
        pg_collection: Any,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert config.attention_dropout == 0.0
        self.config = config
        self.scale = softmax_scale
        self.tp_group = pg_collection.tp
        is_windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self._window = config.window_size[0] + 1 if is_windowed else None
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self.tp_group.size()
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    sharded_state_dict = DotProductAttention.sharded_state_dict

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> torch.Tensor:
        assert packed_seq_params is not None and attention_mask is None and attention_bias is None
        if packed_seq_params.context.size > 1:
            assert self.softmax_offset is None and self._window is None
            out: torch.Tensor = _AttentionOverContext.apply(
                query, key, value, packed_seq_params, self.scale
            )
            return out
        parts = [count * length for count, length in packed_seq_params.runs]
        outputs = []
        for (count, length), q, k, v in zip(
            packed_seq_params.runs,
            torch.split(query, parts),
            torch.split(key, parts),
            torch.split(value, parts),
            strict=True,
        ):
            q, k, v = (x.view(count, length, x.shape[-2], x.shape[-1]) for x in (q, k, v))
            if self.softmax_offset is None:
                out = _attend(q, k, v, scale=self.scale)
            else:
                out = _attend_with_sinks(q, k, v, self.softmax_offset, self._window)
            outputs.append(out.reshape(count * length, 1, -1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Return causal attention [S, n, heads, v_head_dim] of q [S, n, heads, head_dim], the last of m
    tokens of each of S sequences, to k [S, m, kv_heads, head_dim] and v [S, m, kv_heads,
    v_head_dim]. mask [n, m]: the pairs that count, in place of causal ones. scale: of the logits;
    None: 1 / sqrt(head_dim).

    torch has flash kernels for v_head_dim = head_dim alone, and stores all scores otherwise: v is
    padded."""
    length = q.shape[1]
    end = k.shape[1]
    v_dim = v.shape[-1]
    if v_dim < q.shape[-1]:
        v = pad(v, (0, q.shape[-1] - v_dim))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if mask is None and length != end:
        mask = torch.ones(length, end, dtype=torch.bool, device=q.device).tril(end - length)
    if (
        platform.use_cuda()
        and (q.dtype == torch.float32 or mask is not None)
        and q.shape[1] != k.shape[1]
    ):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    is_grouped = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
    )
    return out.transpose(1, 2)[..., :v_dim]


_MORE_DIMS = 8
"""Dimensions that a head gets for its sink: kernels of GPUs take multiples of 8."""


def _attend_with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Return causal attention as `_attend` does, of whole sequences, with a sink [heads] for each
    head, and to the last `window` tokens alone; None: to all.

    The sink is a key before all others, with value 0. It has 1 in a dimension where other keys have
    0, and queries have sink / scale."""
    heads, head_dim = q.shape[2:]
    scale = head_dim**-0.5
    more = torch.stack((sinks / scale, torch.full_like(sinks, _FAR)), dim=-1)
    q = torch.cat(
        (q, pad(more, (0, _MORE_DIMS - 2)).expand(*q.shape[:2], heads, _MORE_DIMS)), dim=-1
    )
    k, v = (pad(x, (0, _MORE_DIMS)) for x in (k, v))
    sink = pad(k.new_ones(1), (head_dim, _MORE_DIMS - 1))
    if window is not None and q.shape[1] > window:
        return _attend_in_blocks(q, k, v, sink, window, scale)[..., :head_dim]
    q, k, v = (pad(x, (0, 0, 0, 0, 1, 0)) for x in (q, k, v))
    k = torch.cat((sink.expand_as(k[:, :1]), k[:, 1:]), dim=1)
    return _attend(q, k, v, scale=scale)[:, 1:, :, :head_dim]


_FAR = 100.0
"""Queries have it in the dimension after the sink's, and places before a sequence have -_FAR /
scale there: logits of -1e4."""


def _attend_in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor, window: int, scale: float
) -> torch.Tensor:
    """Return attention to the last `window` tokens. The queries of a block of as many tokens attend
    to the sink [head_dim], their block and the block before. The query heads of a KV head are
    queries of one head: no kernel has to know grouped queries."""
    count, length, heads, _ = q.shape
    kv_heads = k.shape[2]
    blocks = -(-length // window)
    rest = blocks * window - length
    q = pad(q, (0, 0, 0, 0, 0, rest)).reshape(
        count * blocks, window, kv_heads, heads // kv_heads, -1
    )
    q = q.movedim(3, 1).flatten(1, 2)
    k, v = (pad(x, (0, 0, 0, 0, window, rest)) for x in (k, v))
    k[:, :window, :, 1 - _MORE_DIMS] = -_FAR / scale
    # [S, blocks, kv_heads, dims, 2 x window]
    k, v = (x.unfold(1, 2 * window, window).movedim(-1, 2).flatten(0, 1) for x in (k, v))
    k = torch.cat((sink.expand_as(k[:, :1]), k), dim=1)
    pairs = torch.ones(window, 2 * window, dtype=torch.bool, device=q.device).tril(window).triu(1)
    mask = pad(pairs, (1, 0), value=True).repeat(heads // kv_heads, 1)
    out = _attend(q, k, pad(v, (0, 0, 0, 0, 1, 0)), mask, scale)
    out = out.unflatten(1, (heads // kv_heads, window)).movedim(1, 3)
    return out.reshape(count, blocks * window, heads, -1)[:, :length]


class _AttentionOverContext(torch.autograd.Function):
    """Attention of this rank's queries to the keys and values of all context-parallel ranks. Each
    pass gathers these anew: a rank stores its own tokens' alone. The backward pass computes the
    scores again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        packed: PackedSequences,
        scale: float | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.packed = packed
        ctx.scale = scale
        return _attend_to_all(
            query, packed.context.gather(key), packed.context.gather(value), packed, scale
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        context = ctx.packed.context
        query, key, value = ctx.saved_tensors
        query = query.detach().requires_grad_()
        keys = context.gather(key).requires_grad_()
        values = context.gather(value).requires_grad_()
        with torch.enable_grad():
            out = _attend_to_all(query, keys, values, ctx.packed, ctx.scale)
        of_query, of_keys, of_values = torch.autograd.grad(out, (query, keys, values), grad)
        return (
            of_query,
            context.sum_scattered(of_keys),
            context.sum_scattered(of_values),
            None,
            None,
        )


def _attend_to_all(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    packed: PackedSequences,
    scale: float | None,
) -> torch.Tensor:
    """Return the attention [T, 1, heads * v_head_dim] of this rank's queries [T, 1, heads,
    head_dim]. keys, values: [ranks, T, 1, kv_heads, head_dim or v_head_dim], of all ranks."""
    size = packed.context.size
    rank = packed.context.rank
    parts = [count * length // size for count, length in packed.runs]
    outputs = []
    for (count, length), q, k, v in zip(
        packed.runs,
        torch.split(query[:, 0], parts),
        torch.split(keys[:, :, 0], parts, dim=1),
        torch.split(values[:, :, 0], parts, dim=1),
        strict=True,
    ):
        chunk = length // (2 * size)
        k, v = (_whole_sequences(x.unflatten(1, (count, 2, chunk))) for x in (k, v))
        ends = ((rank + 1) * chunk, (2 * size - rank) * chunk)
        halves = q.unflatten(0, (count, 2, chunk)).unbind(1)
        out = [
            _attend(half, k[:, :end], v[:, :end], scale=scale)
            for half, end in zip(halves, ends, strict=True)
        ]
        outputs.append(torch.stack(out, dim=1).reshape(2 * count * chunk, 1, -1))
    return torch.cat(outputs)


def _whole_sequences(parts: torch.Tensor) -> torch.Tensor:
    """Return [S, tokens, ...] of the two chunks of each of S sequences that each rank has: [ranks,
    S, 2, chunk, ...]. The ranks have the second chunks in descending order."""
    first, second = parts.unbind(2)
    return torch.cat((first, second.flip(0))).transpose(0, 1).flatten(1, 2)


class ReplicatedKVAttention(SelfAttention):
    """Megatron-Core's attention with more tensor-parallel ranks than KV heads.

    The rows of the q, k and v weights are sharded evenly, so that each row is on one rank. All
    ranks gather the outputs of all rows. Several ranks attend with the same keys and values; the
    backward pass of the gather sums their gradients. The original does the same, but takes the
    group from the global parallel_state, which is not
    initialised here."""

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        output_gate: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Return this rank's q [T, 1, heads / ranks, head_dim], and k and v [T, 1, 1, head_dim] of
        its KV head, with output_gate also the gates of its heads, as q."""
        rows, _ = self.linear_qkv(hidden_states)
        # A collective of all tensor-parallel ranks, each with its part of all tokens.
        rows = all_gather_last_dim_from_tensor_parallel_region(rows, group=self.tp_group)
        kv_head, part = divmod(
            self.tp_group.rank(), self.world_size // self.config.num_query_groups
        )
        group = rows.unflatten(-1, (self.config.num_query_groups, -1, self.key_hidden_size))[
            :, :, kv_head
        ]
        size = self.config.num_attention_heads // self.world_size
        # of the group; its gates follow its queries
        heads = (group.shape[2] - 2) // (1 + output_gate)
        query, *gate = (
            group[:, :, start : start + size]
            for start in range(part * size, group.shape[2] - 2, heads)
        )
        key = group[:, :, -2:-1]
        value = group[:, :, -1:]
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
            key = self.k_layernorm(key)
        return query, key, value, *gate


def attention_settings(block: Attention) -> dict[str, Any]:
    """Return the settings of TransformerConfig. Every other layer has the window."""
    window = {"window_size": (block.sliding_window - 1, 0), "window_attn_skip_freq": 2}
    return {
        "num_attention_heads": block.num_heads,
        "num_query_groups": block.num_kv_heads,
        "kv_channels": block.head_dim,
        "add_qkv_bias": block.qkv_bias,
        "qk_layernorm": block.qk_norm,
        "attention_output_gate": block.attention_gate,
        "softmax_type": "learnable" if block.sinks else "vanilla",
        **(window if block.sliding_window else {}),
    }


class PackedRotaryEmbedding(RotaryEmbedding):
    """Rotary angles of the tokens of packed sequences: [T, 1, 1, head_dim]; for "thd" the angles of
    the longest sequence. On a CPU the table of `cpu_operations.rotate` in place of the angles: one
    for all layers.

    Megatron-Core calls get_rotary_seq_len, and then forward with its result. Here this result is
    the description of the packed sequences, and not a length. The original's forward caches the
    angles of the last 32 lengths: of 32k tokens, up to 0.5 GB on a GPU."""

    mscale = 1.0
    """Factor of cosines and sines in latent attention."""

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        config: Any,
        packed: PackedSequences,
    ) -> PackedSequences:
        return packed

    def forward(self, packed: PackedSequences, packed_seq: bool = False, **_: Any) -> torch.Tensor:
        if packed_seq:
            return self.get_emb(max(packed.max_seqlen_q, packed.max_seqlen_kv))
        # The products of get_emb's outer product, at the positions that occur.
        angles = packed.positions.to(self.inv_freq.dtype)[:, None] * self.inv_freq
        if not platform.use_cuda():
            return rotary_table(angles)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class RMSNorm(torch.nn.RMSNorm):
    """x / rms(x) * weight. With sequence parallelism each rank normalises its part of the tokens;
    the weight is marked, so that Megatron-Core sums its gradient over the tensor-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self._eps = eps
        mark_sequence_parallel(self.weight, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised x, of the same shape [..., hidden] and type."""
        if platform.use_cuda() or not x.dtype == self.weight.dtype == torch.float32:
            return super().forward(x)
        return rms_norm(x, self.weight, self._eps)


class ZeroCenteredRMSNorm(torch.nn.Module):
    """x / rms(x) * (1 + weight), in float32: gemma's norm. Megatron-Core has it only in Transformer
    Engine's layers: its norm for local layers rejects layernorm_zero_centered_gamma."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        mark_sequence_parallel(self.weight, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised x, of the same shape [..., hidden] and type."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


def mark_sequence_parallel(weight: torch.Tensor, config: Any) -> None:
    """Mark a weight whose gradient Megatron-Core sums over tensor-parallel ranks with sequence
    parallelism."""
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
