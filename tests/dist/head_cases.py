"""Functions that the ranks run in test_heads.py: the output layer alone, on given hidden states and weights."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

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
) -> dict[str, torch.Tensor]:
    """Return log-probs [R] and entropies [R], with the vocabulary split over all ranks, and the gradients of
    sum(upstream * [log-probs, entropies]) over `terms` with respect to the hidden states [R, hidden] and to this
    rank's rows of the weight [vocab, hidden]. Padding rows are large, so that a padding row taken for a token shows.
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
    before, heads.CHUNK_LOGITS = heads.CHUNK_LOGITS, chunk_logits
    try:
        if "entropy" in terms:
            log_probs, entropy = heads.log_probs_and_entropy(*arguments)
        else:
            log_probs = heads.log_probs(*arguments)
            entropy = torch.empty(0)
        loss = (upstream[0] * log_probs).sum() if "log-prob" in terms else torch.tensor(0.0)
        if "entropy" in terms:
            loss = loss + (upstream[1] * entropy).sum()
        loss.backward()
    finally:
        heads.CHUNK_LOGITS = before
    assert states.grad is not None and mine.grad is not None
    return {
        "log-prob": log_probs.detach(),
        "entropy": entropy.detach(),
        "hidden": states.grad,
        "weight": mine.grad,
    }


def largest_tensor(vocab: int, num_tokens: int, size: int, chunk_logits: int) -> int:
    """Return the number of elements of the largest tensor in the forward and backward pass, except tensors with a
    dimension of `size` (states, weight rows and their gradients).
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
