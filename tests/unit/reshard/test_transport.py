"""Transports of a single rank. tests/dist/test_reshard_ranks.py has several ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard import weight_sync
from rlhf_mc.reshard.execute import BoundPlan, bind, execute
from rlhf_mc.reshard.layout import EMPTY, whole_layout
from rlhf_mc.reshard.plan import make_plan, make_plans
from rlhf_mc.reshard.shared_memory import SharedMemory, host_transport
from rlhf_mc.reshard.transport import PointToPoint


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("num_bytes", [0, 8, 24])
def test_shared_memory_of_any_size(world: dist.ProcessGroup, num_bytes: int) -> None:
    memory = SharedMemory(num_bytes, world)
    plan = make_plan([EMPTY], [EMPTY], 4, 1000).for_rank(0)
    assert memory.ranks == {0}
    for dtype in (torch.bfloat16, torch.float32):
        assert memory.buffers(plan, dtype).outbox.nbytes == max(num_bytes, 8)


def test_without_memfd_messages_are_point_to_point(world: dist.ProcessGroup) -> None:
    with mock.patch.object(os, "memfd_create", side_effect=PermissionError):
        assert SharedMemory(8, world).ranks == frozenset()
        assert isinstance(host_transport(8, world), PointToPoint)


def test_correction_biases_are_verified_after_an_update(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = whole_layout({"w": (4, 2), "bias": (3,)})
    plans = make_plans([layout], [layout], {"bias"}, 2, 1000)
    sync = weight_sync.WeightSync(plans, 0, "always", torch.bfloat16)
    source = {"w": torch.randn(4, 2).bfloat16(), "bias": torch.randn(3)}
    target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    sync.run(source, target)
    assert all(torch.equal(target[name], source[name]) for name in source)

    assert sync.metrics["reshard/copied_bytes"] == 8 * 2 + 3 * 4, "biases are counted"
    run = BoundPlan.execute

    def execute_wrongly(plan: BoundPlan, *others: Any) -> None:
        run(plan, *others)
        target["bias"][1] += 1.0

    monkeypatch.setattr(BoundPlan, "execute", execute_wrongly)
    with pytest.raises(
        UserError,
        match=r"^reshard.verify: bias\[0:3\] on rank 0 differs from bias\[0:3\] on rank 0",
    ):
        sync.run(source, target)


def test_without_a_transport_a_plan_with_messages_is_rejected() -> None:
    tensor = whole_layout({"w": (4, 2)})
    plan = make_plan([tensor, EMPTY], [EMPTY, tensor], 4, 1000)
    with pytest.raises(AssertionError, match="rank 1's plan has messages"):
        execute(plan.for_rank(1), {}, {"w": torch.zeros(4, 2)}, transport=None)


def test_views_are_made_again_only_for_other_memory(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Include a resized storage, as an offload leaves it, which its views follow."""
    bound: list[Any] = []
    monkeypatch.setattr(weight_sync, "bind", lambda *args: bound.append(args) or bind(*args))
    layout = whole_layout({"w": (4, 2)})

    def updates(keep_views: bool) -> Iterator[int]:
        bound.clear()
        plans = make_plans([layout], [layout], (), 4, 1000)
        sync = weight_sync.WeightSync(plans, 0, "off", torch.float32, keep_views)
        source = {"w": torch.randn(4, 2)}
        target = {"w": torch.zeros(4, 2)}
        for change in ("nothing", "values", "storage", "target"):
            if change == "storage":
                source["w"].untyped_storage().resize_(0)
                source["w"].untyped_storage().resize_(32)
            if change == "target":
                target = {"w": torch.zeros(4, 2)}
            source["w"].normal_()
            sync.run({"w": source["w"].detach()}, {"w": target["w"].detach()})
            assert torch.equal(target["w"], source["w"]), change
            yield len(bound)

    assert list(updates(True)) == [1, 1, 1, 2]
    assert list(updates(False)) == [1, 2, 3, 4]
