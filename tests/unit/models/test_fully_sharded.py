"""The gradient norm of fsdp2."""

from __future__ import annotations

import pytest
import torch

from rlhf_mc.models.strategies.fully_sharded import sum_of_squares


def test_the_squares_of_a_large_shard_on_a_cpu_are_summed_exactly() -> None:
    """Compare with float64: the sum of each tensor at once would be 0.07 % too small."""
    shard = torch.randn(10_000, 1000, generator=torch.Generator().manual_seed(0))
    exact = sum(float(rows.double().square().sum()) for rows in shard.split(1000))
    found = sum_of_squares([shard, torch.zeros(3, 2)], torch.device("cpu"))
    assert float(found) == pytest.approx(exact, rel=1e-4)
    assert sum_of_squares([], torch.device("cpu")) == 0
