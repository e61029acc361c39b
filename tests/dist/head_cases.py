"""Functions that the ranks run in test_heads.py: the output layer alone, on given hidden states and
weights."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.architectures.spec import padded_vocab_size
from rlhf_mc.models import heads


def chunked_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    upstream: torch.Tensor,
    temperature: float,
    tied: bool,
    chunk_logits: int,
    terms: tuple[str, ...],
    wide: bool = False,
) -> dict[str, torch.Tensor]:
    """Return log-probs [R] and entropies [R], with the vocabulary split over all ranks, and the
    gradients of sum(upstream * [log-probs, entropies]) over `terms` with respect to the hidden
    states [R, hidden] and to this
    rank's rows of the weight [vocab, hidden]. Padding rows are large, so that a padding row taken
    for a token shows.

    wide: products of bfloat16 matrices are float32, as on a GPU, by the definition of CUDA's
    kernel.
    """
    vocab, size = weight.shape
    padded = padded_vocab_size(vocab, dist.get_world_size())
    rows = torch.full((padded, size), 10.0, dtype=weight.dtype)
    rows[:vocab] = weight
    mine = rows.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    states = hidden.clone().requires_grad_()
    model = SimpleNamespace(
        output_weight=lambda: mine if tied else None,
        output_layer=SimpleNamespace(weight=None if tied else mine),
        pg_collection=SimpleNamespace(tp=dist.group.WORLD),
    )
    arguments = (model, states[:, None], targets, vocab, temperature)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(heads, "CHUNK_LOGITS", chunk_logits))
        if wide:
            stack.enter_context(mock.patch.object(platform, "float32_products", lambda: True))
            stack.enter_context(mock.patch.object(torch, "addmm", _addmm_of_cuda))
        if "entropy" in terms:
            log_probs, entropy = heads.log_probs_and_entropy(*arguments)
        else:
            log_probs = heads.log_probs(*arguments)
            entropy = torch.empty(0)
        loss = (upstream[0] * log_probs).sum() if "log-prob" in terms else torch.tensor(0.0)
        if "entropy" in terms:
            loss = loss + (upstream[1] * entropy).sum()
        loss.backward()
    assert states.grad is not None and mine.grad is not None
    return {
        "log-prob": log_probs.detach(),
        "entropy": entropy.detach(),
        "hidden": states.grad,
        "weight": mine.grad,
    }


def chunked_tokens(
    hidden: torch.Tensor, weight: torch.Tensor, upstream: torch.Tensor, k: int, chunk_logits: int
) -> dict[str, torch.Tensor]:
    """Return top_log_probs [R, 1 + 2 k] of token 0 at temperature 0.7, the log-probs [R, k] of its
    tokens by log_probs_and_entropy, and the gradients of sum(upstream * these) and of the entropies
    with respect to the hidden states and to this rank's rows of the weight [vocab, hidden]."""
    vocab, size = weight.shape
    rows = torch.full((padded_vocab_size(vocab, dist.get_world_size()), size), 10.0)
    rows[:vocab] = weight
    shard = rows.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    states = hidden.clone().requires_grad_()
    model = SimpleNamespace(
        output_weight=lambda: shard, pg_collection=SimpleNamespace(tp=dist.group.WORLD)
    )
    arguments = (model, states[:, None], torch.zeros(len(hidden), dtype=torch.int64), vocab, 0.7)
    with mock.patch.object(heads, "CHUNK_LOGITS", chunk_logits):
        with torch.no_grad():
            top = heads.top_log_probs(*arguments, k)
        tokens = top[:, 1 : 1 + k].long()
        _, entropy, of_tokens = heads.log_probs_and_entropy(*arguments, tokens)
        ((upstream * of_tokens).sum() + entropy.sum()).backward()
    assert states.grad is not None and shard.grad is not None
    found = {"top": top, "of_tokens": of_tokens.detach(), "hidden": states.grad}
    return {**found, "weight": shard.grad}


def _addmm_of_cuda(
    self: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out_dtype: Any,
    beta: float,
    alpha: float,
    out: Any,
) -> torch.Tensor:
    """Compute torch.addmm with out_dtype, which a CPU lacks: CUDA's takes bfloat16 matrices and a
    float32 result."""
    assert (
        a.dtype == b.dtype == torch.bfloat16
        and self.dtype == out.dtype == out_dtype == torch.float32
    )
    product = alpha * (a.float() @ b.float())
    result: torch.Tensor = out.copy_(product if beta == 0.0 else beta * self + product)
    return result


def largest_tensor(vocab: int, num_tokens: int, size: int, chunk_logits: int) -> int:
    """Return the number of elements of the largest tensor in the forward and backward pass, except
    tensors with a dimension of `size` (states, weight rows and their gradients).
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor) and size not in tensor.shape:
                    largest[0] = max(largest[0], tensor.numel())
            return out

    draw = torch.Generator().manual_seed(1)
    with Watch():
        chunked_log_probs(
            torch.randn(num_tokens, size, generator=draw),
            torch.randn(vocab, size, generator=draw),
            torch.randint(vocab, (num_tokens,), generator=draw),
            torch.randn(2, num_tokens, generator=draw),
            temperature=1.0,
            tied=False,
            chunk_logits=chunk_logits,
            terms=("log-prob", "entropy"),
        )
    return largest[0]
