"""The exchange of responses between the ranks of several engines, without an engine. With vLLM:
test_layouts.py."""

from __future__ import annotations

from typing import Any

import pytest
import response_cases

ENGINES = [[[0]], [[0], [1]], [[1, 0]], [[0, 2], [3, 1]], [[0, 1, 2, 3]], [[1]], [[2], [3]]]
"""Ranks before the first one of an engine have none."""


@pytest.mark.parametrize("engines", ENGINES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 7, 32])
def test_every_rank_has_all_responses(pool: Any, engines: list[list[int]], count: int) -> None:
    world = 1 + max(map(max, engines))
    wanted = response_cases.make_responses(count, 40)
    for responses, _ in pool(world).run(
        response_cases.exchange, engines=engines, count=count, max_tokens=40
    ):
        assert responses == wanted


def test_bytes_are_eight_a_token_and_the_padding_to_the_largest_engine(pool: Any) -> None:
    engines = [[0, 2], [3, 1]]
    responses = response_cases.make_responses(32, 400)
    tokens = max(
        sum(len(r.token_ids) for i, r in enumerate(responses) if i // 2 % 2 == e) for e in range(2)
    )
    for _, sent in pool(4).run(response_cases.exchange, engines=engines, count=32, max_tokens=400):
        # Half of the engine's tokens, and of 16 numbers, lengths and flags; two counts, and a hash
        # of 32 bytes.
        assert sent == 4 * -(-(2 * tokens + 3 * 16) // 2) + 16 + 32


@pytest.mark.parametrize(("rank", "engines"), [(2, [[0, 2], [3, 1]]), (0, [[3, 1], [0, 2]])])
def test_ranks_of_one_engine_must_have_the_same_tokens(
    pool: Any, rank: int, engines: list[list[int]]
) -> None:
    outcomes = pool(4).outcomes(
        response_cases.exchange, engines=engines, count=9, max_tokens=40, other_token_on=rank
    )
    for ok, value in outcomes:
        assert not ok and value[0] == "UserError"
        assert value[1].startswith(
            "rollout: ranks 0 and 2 of one engine drew different tokens; they must run the same"
        )
        assert "\n" not in value[1]
