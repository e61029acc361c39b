"""Ranges of a flattened parameter, as the distributed optimizer holds them, as boxes of the
checkpoint's tensors."""

from __future__ import annotations

import itertools

import pytest
import torch

from rlhf_mc.checkpoint.training_blocks import _runs
from rlhf_mc.reshard.layout import Shard

FUSED = (Shard("q", ((4, 7), (0, 5)), "qkv", (0, 0)), Shard("k", ((0, 2), (0, 5)), "qkv", (3, 0)))
BIASES = (Shard("q", ((4, 7),), "qkv", (0,)), Shard("k", ((0, 2),), "qkv", (3,)))


@pytest.mark.parametrize(
    ("shards", "local_shape"), [(FUSED, (5, 5)), (BIASES, (5,))], ids=["matrix", "vector"]
)
def test_each_element_of_a_range_is_in_exactly_one_box(
    shards: tuple[Shard, ...], local_shape: tuple[int, ...]
) -> None:
    """Check every range of a parameter of several fused shards. A shard may lie entirely before or
    after the range."""
    num_elements = torch.Size(local_shape).numel()
    flat = torch.arange(1, num_elements + 1)
    tensors = {
        shard.tensor: torch.zeros(tuple(end for _, end in shard.box), dtype=torch.long)
        for shard in shards
    }
    for shard in shards:
        into = tuple(slice(start, end) for start, end in shard.box)
        rows = slice(shard.offset[0], shard.offset[0] + shard.box[0][1] - shard.box[0][0])
        tensors[shard.tensor][into] = flat.view(local_shape)[rows]
    for start, end in itertools.combinations(range(num_elements + 1), 2):
        found = []
        for shard in shards:
            for box, run in _runs(shard, local_shape, start, end):
                size = tuple(high - low for low, high in box)
                data = flat[start:end][run].view(size)
                assert torch.equal(
                    data, tensors[shard.tensor][tuple(slice(low, high) for low, high in box)]
                )
                found += data.flatten().tolist()
        assert sorted(found) == list(range(start + 1, end + 1)), (start, end)
