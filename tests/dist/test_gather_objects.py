"""gather_objects: objects of any size, in groups, and errors."""

from __future__ import annotations

from typing import Any

import cases
import pytest


@pytest.mark.parametrize(
    "sizes", [(1_000_000, 0, 3, 0), (0, 1, 2, 1_000_000), (5, 70_000, 9_000, 1)]
)
def test_one_rank_has_most(pool: Any, sizes: tuple[int, ...]) -> None:
    wanted = ["abcd"[rank] * size for rank, size in enumerate(sizes)]
    assert pool(4).run(cases.gather_strings, sizes=sizes) == [wanted] * 4


def test_a_group_of_some_ranks(pool: Any) -> None:
    sizes = (0, 50_000, 0, 7)
    wanted = ["b" * 50_000, "d" * 7]
    assert pool(4).run(cases.gather_strings, sizes=sizes, members=[1, 3]) == [
        None,
        wanted,
        None,
        wanted,
    ]


def test_a_long_error_reaches_every_rank(pool: Any) -> None:
    for is_ok, error in pool(4).outcomes(cases.fail_on, rank=2):
        assert (
            not is_ok
            and error[0] == "UserError"
            and error[1] == "x" * 3960 + "... (100,000 characters)"
        )
