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
