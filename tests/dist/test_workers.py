"""The workers of the tests: a rank that ends fails one test, and no other."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.dist


def end(failing_rank: int) -> None:
    if dist.get_rank() == failing_rank:
        os._exit(7)


def rank() -> int:
    dist.barrier()
    return dist.get_rank()


def test_a_rank_that_ends_is_replaced(pool: Any) -> None:
    outcomes = pool(2).outcomes(end, failing_rank=1)
    assert outcomes[0] == (True, None)
    assert outcomes[1][0] is False and "ended with code 7" in outcomes[1][1][1]
    assert pool(2).run(rank) == [0, 1]


def leave(failing_rank: int) -> None:
    """Raise on a rank within a collective that the other one has begun."""
    if dist.get_rank() == failing_rank:
        raise ValueError("raised here")
    work = dist.barrier(async_op=True)
    assert not work.is_completed()


def test_ranks_of_a_failed_run_are_replaced(pool: Any) -> None:
    before = pool(2)
    with pytest.raises(pytest.fail.Exception) as failure:
        before.run(leave, failing_rank=1)
    assert str(failure.value).startswith("rank 1: ValueError: raised here\nrank 1: Traceback")
    assert pool(2) is not before
    assert pool(2).run(rank) == [0, 1]
