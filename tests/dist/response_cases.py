"""Functions of the ranks in test_responses.py. Each is called on every rank with the same
arguments."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rlhf_mc.data.batch import Generation
from rlhf_mc.data.responses import exchange_responses
from rlhf_mc.patching import replaced


def make_responses(count: int, max_tokens: int) -> list[Generation]:
    """Return responses of random lengths, with log-probs that are float32 numbers, as vLLM's
    are."""
    rng = random.Random(count)
    responses = []
    for i in range(count):
        length = rng.randrange(1, max_tokens)
        log_probs = torch.tensor([-rng.expovariate(1.0) for _ in range(length)]).tolist()
        responses.append(
            Generation(
                [rng.randrange(152_000) for _ in range(length)], log_probs, finished=i % 3 > 0
            )
        )
    if responses:
        responses[0].log_probs[0] = float("-inf")
    return responses


def exchange(
    engines: Sequence[Sequence[int]], count: int, max_tokens: int, other_token_on: int | None = None
) -> tuple[list[Generation], int]:
    """Exchange the responses of make_responses. Return the result, and how many bytes this rank has
    sent for each rank. Ranks in no engine have none.

    other_token_on: the rank whose engine has drawn another last token there."""
    engine = next((e for e, ranks in enumerate(engines) if dist.get_rank() in ranks), None)
    # Engine e has numbers 2e and 2e + 1, then 2(e + engines) and so on.
    mine = {
        i: one
        for i, one in enumerate(make_responses(count, max_tokens))
        if i // 2 % len(engines) == engine
    }
    if dist.get_rank() == other_token_on:
        mine[max(mine)].token_ids[-1] += 1
    sent: list[int] = []
    original = dist.all_gather_into_tensor

    def all_gather(out: Any, value: torch.Tensor, group: None) -> None:
        sent.append(value.nbytes)
        original(out, value, group)

    with replaced(dist, "all_gather_into_tensor", all_gather):
        return exchange_responses(mine, engines, count).generations(), sum(sent)
