"""Context parallelism: the part of each packed sequence that a rank has, and the exchanges between
the ranks that share the sequences of a micro-batch. Attention over all parts is in layers.py, and
on GPUs Transformer Engine's.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.attention import Attention

from rlhf_mc.data.batch import ragged_indices
from rlhf_mc.models.steps import Assembly
from rlhf_mc.topology.groups import ProcessGroups, context_group


@dataclass(frozen=True)
class Context:
    """The ranks that share the sequences of a micro-batch, one rank by default.

    Each sequence is padded to 2 x size chunks of equal length, and rank r has the chunks r and 2 x
    size - 1 - r: causal attention then costs every rank the same. It is Transformer Engine's split
    (attn_forward_func_with_cp)."""

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0

    @staticmethod
    def of(groups: ProcessGroups, size: int) -> Context:
        """Return the `size` context-parallel ranks of a mesh that include this one."""
        return (
            ONE_RANK
            if size == 1
            else Context(_group(groups, size), size, groups.coordinate.cp % size)
        )

    def padded(self, lens: np.ndarray) -> np.ndarray:
        """Return the lengths of sequences after padding."""
        return lens if self.size == 1 else -(-lens // (2 * self.size)) * (2 * self.size)

    def multiple(self, multiple_of: int) -> int:
        """Return the number of which the tokens of all ranks together are a multiple, if those of
        one rank are to be a multiple of `multiple_of`."""
        return multiple_of if self.size == 1 else math.lcm(2, multiple_of) * self.size

    def own_tokens(self, lens: np.ndarray) -> np.ndarray:
        """Return the positions of this rank's tokens in packed sequences of these padded lengths:
        [T / size]."""
        chunks = 2 * self.size
        first = np.arange(len(lens))[:, None] * chunks
        return ragged_indices(
            np.repeat(lens // chunks, chunks), (first + [self.rank, chunks - 1 - self.rank]).ravel()
        )

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the tensors [size, ...] of all ranks. Every rank of the group must call it."""
        parts = part.new_empty(self.size, *part.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), part.contiguous(), group=self.group)
        return parts

    def sum_scattered(self, parts: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum of `parts` [size, ...] over all ranks. Every rank of
        the group must call it."""
        part = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(part, parts.contiguous().flatten(0, 1), group=self.group)
        return part


ONE_RANK = Context()


def _group(groups: ProcessGroups, size: int) -> dist.ProcessGroup:
    group: dist.ProcessGroup = getattr(groups.collection, context_group(groups.mesh, size))
    return group


def rotate_in_context(assembly: Assembly) -> None:
    """Let each attention of Megatron-Core take the ranks of its micro-batch's context for the
    positions of the tokens. On a CPU the rotation has the positions themselves.

    Transformer Engine's attention is passed pad_between_seqs. Without it versions 2.11 to 2.17
    compare the offsets of the sequences with and without padding in every layer, and wait for
    the device unless these are one tensor.

    Reason: Megatron-Core's attention takes all context-parallel ranks for those of each
    micro-batch."""
    if assembly.groups.mesh.cp == 1:
        return
    groups = assembly.groups
    collections = {size: copy.copy(groups.collection) for size in (1, *groups.mesh.context_sizes)}
    for size, collection in collections.items():
        collection.cp = _group(groups, size)

    def choose(attention: Any, args: Any, kwargs: Any) -> None:
        attention.pg_collection = collections[kwargs["packed_seq_params"].context.size]

    for module in assembly.model.modules():
        if isinstance(module, Attention):
            module.register_forward_pre_hook(choose, with_kwargs=True)
        # TEDotProductAttention
        if isinstance(passed := getattr(module, "kept_packed_seq_params", None), set):
            passed.add("pad_between_seqs")


class _Joined(torch.autograd.Function):
    """The results [N, ...] of all ranks, of which this rank has those at `index`. Every rank
    computes the same loss of them, so the gradient of its own is not summed over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, results: torch.Tensor, index: torch.Tensor, size: int, context: Context
    ) -> torch.Tensor:
        ctx.save_for_backward(index)
        out = results.new_zeros(size, *results.shape[1:]).index_copy_(0, index, results)
        dist.all_reduce(out, group=context.group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return grad[ctx.saved_tensors[0]], None, None, None


def joined(results: torch.Tensor, index: torch.Tensor, size: int, context: Context) -> torch.Tensor:
    """Return [size, ...] numbers on all ranks of the context, each row from the rank that has its
    position in `index`. Every rank of the context must call it, and compute the same loss of the
    result."""
    out: torch.Tensor = _Joined.apply(results, index, size, context)
    return out
