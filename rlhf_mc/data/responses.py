"""The exchange of responses: each rollout engine has generated a share of them, and every rank
needs all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np
import torch
import torch.distributed as dist

from rlhf_mc.config.errors import UserError
from rlhf_mc.data.batch import Generation, Responses
from rlhf_mc.topology.consensus import gather_vectors


def exchange_responses(
    local: Mapping[int, Generation], engines: Sequence[Sequence[int]], num_responses: int
) -> Responses:
    """Return responses 0 to num_responses - 1 on every rank. Every rank must call it.

    local: the responses of this rank's engine, by number; none on a rank without an engine.
    engines: the ranks of each engine. All of them have the engine's responses, and each sends an
    equal part.

    Every rank receives 8 bytes a token, and the padding to the engine with most tokens. gloo's
    all-gather is a ring: each rank passes every byte on once. Its broadcast is a tree: one from a
    rank of each engine would take log2(ranks) times as long, 6 times at 64 ranks and 9 times at
    512.

    Raise UserError, on all ranks, if the ranks of one engine have different tokens."""
    rank = dist.get_rank()
    own_ranks = next((ranks for ranks in engines if rank in ranks), (rank,))
    numbers = np.array(sorted(local), dtype=np.int32)
    responses = Responses.of([local[number] for number in sorted(local)])
    message = _encode(numbers, responses)
    heads = gather_vectors(
        torch.cat([torch.tensor([len(message), len(numbers)]), _digest(numbers, responses)])
    )
    _check_same_tokens(engines, heads[:, 2:])
    sizes = [int(heads[ranks[0], 0]) for ranks in engines]
    part = max(-(-size // len(ranks)) for size, ranks in zip(sizes, engines, strict=True))
    padded = torch.zeros(len(own_ranks), part, dtype=torch.int32)
    padded.view(-1)[: len(message)] = message
    parts = gather_vectors(padded[own_ranks.index(rank)])
    decoded = [
        _decode(parts[list(ranks)].view(-1)[:size], int(heads[ranks[0], 1]))
        for ranks, size in zip(engines, sizes, strict=True)
    ]
    order = np.concatenate([numbers for numbers, _ in decoded]).argsort()
    assert len(order) == num_responses, f"{len(order)} responses of {num_responses}"
    return Responses(
        *(np.concatenate([getattr(part, f.name) for _, part in decoded]) for f in fields(Responses))
    ).select(order)


def _encode(numbers: np.ndarray, responses: Responses) -> torch.Tensor:
    """Return one int32 vector: numbers, lengths, whether each response is finished, tokens, and the
    bits of the log-probs, which are float32 numbers."""
    parts = (
        numbers,
        responses.lens,
        responses.finished,
        responses.tokens,
        responses.log_probs.view(np.int32),
    )
    return torch.from_numpy(np.concatenate(parts, dtype=np.int32, casting="same_kind"))


def _decode(message: torch.Tensor, count: int) -> tuple[np.ndarray, Responses]:
    """Return the numbers and the `count` responses of a vector of _encode."""
    numbers, lens, finished, rest = np.split(message.numpy(), [count, 2 * count, 3 * count])
    tokens, log_probs = np.split(rest, 2)
    return numbers, Responses(
        lens.astype(np.int64), tokens, log_probs.view(np.float32), finished.astype(np.bool_)
    )


def _digest(numbers: np.ndarray, responses: Responses) -> torch.Tensor:
    """Return a hash of all tokens and the numbers of their responses, [4] int64."""
    digest = hashlib.sha256(
        numbers.tobytes() + responses.lens.tobytes() + responses.tokens.tobytes()
    )
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)


def _check_same_tokens(engines: Sequence[Sequence[int]], digests: torch.Tensor) -> None:
    """Raise UserError if ranks of one engine have different digests. All have the same `digests`
    [ranks, 4]: all raise."""
    for first, *others in engines:
        for rank in others:
            if not torch.equal(digests[first], digests[rank]):
                raise UserError(
                    f"rollout: ranks {first} and {rank} of one engine drew different tokens; they "
                    "must run the same version, the same weights and the same seeds (is one of "
                    "them on other hardware or another version?)"
                )
