"""The elements of a flattened parameter that an optimizer holds, as boxes of the checkpoint's tensors."""

from __future__ import annotations

import itertools

import pytest
import torch

from rlhf_mc.checkpoint.blocks import _runs
from rlhf_mc.reshard.layout import Shard

JOINED = (Shard("q", ((4, 7), (0, 5)), "qkv", (0, 0)), Shard("k", ((0, 2), (0, 5)), "qkv", (3, 0)))
BIASES = (Shard("q", ((4, 7),), "qkv", (0,)), Shard("k", ((0, 2),), "qkv", (3,)))


@pytest.mark.parametrize(("pieces", "local_shape"), [(JOINED, (5, 5)), (BIASES, (5,))], ids=["matrix", "vector"])
def test_every_element_of_a_part_is_in_one_box_of_its_piece(
    pieces: tuple[Shard, ...], local_shape: tuple[int, ...]
) -> None:
    """Wherever the distributed optimizer cuts a parameter that joins several tensors: a piece may lie wholly before or
    beyond a rank's part."""
    num_elements = torch.Size(local_shape).numel()
    flat = torch.arange(1, num_elements + 1)
    tensors = {piece.tensor: torch.zeros(tuple(end for _, end in piece.box), dtype=torch.long) for piece in pieces}
    for piece in pieces:
        into = tuple(slice(start, end) for start, end in piece.box)
        rows = slice(piece.offset[0], piece.offset[0] + piece.box[0][1] - piece.box[0][0])
        tensors[piece.tensor][into] = flat.view(local_shape)[rows]
    for start, end in itertools.combinations(range(num_elements + 1), 2):
        found = []
        for piece in pieces:
            for box, run in _runs(piece, local_shape, start, end):
                size = tuple(high - low for low, high in box)
                data = flat[start:end][run].view(size)
                assert torch.equal(data, tensors[piece.tensor][tuple(slice(low, high) for low, high in box)])
                found += data.flatten().tolist()
        assert sorted(found) == list(range(start + 1, end + 1)), (start, end)
