"""Memory of the node, by one rank. Ranks that read each other's are in tests/dist/test_reshard_ranks.py."""

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
def test_a_rank_may_have_nothing_to_send(world: dist.ProcessGroup, num_bytes: int) -> None:
    memory = NodeMemory(num_bytes, world)
    assert memory.ranks == {0}
    for dtype in (torch.bfloat16, torch.float32):
        assert memory.own(dtype).numel() * dtype.itemsize == max(num_bytes, 8)


def test_a_system_without_anonymous_files_has_no_memory_of_the_node(world: dist.ProcessGroup) -> None:
    with mock.patch.object(os, "memfd_create", side_effect=PermissionError):
        assert NodeMemory(8, world).ranks == frozenset()
