"""NodeMemory with one rank. Ranks that read each other's memory: tests/dist/test_reshard_ranks.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rlhf_mc.reshard.node_memory import NodeMemory


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("num_bytes", [0, 8, 24])
def test_node_memory_of_any_size(world: dist.ProcessGroup, num_bytes: int) -> None:
    memory = NodeMemory(num_bytes, world)
    assert memory.ranks == {0}
    for dtype in (torch.bfloat16, torch.float32):
        assert memory.own(dtype).numel() * dtype.itemsize == max(num_bytes, 8)


def test_without_memfd_there_is_no_node_memory(world: dist.ProcessGroup) -> None:
    with mock.patch.object(os, "memfd_create", side_effect=PermissionError):
        assert NodeMemory(8, world).ranks == frozenset()
