"""Transports of a single rank. tests/dist/test_reshard_ranks.py has several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard import weight_sync
from rlhf_mc.reshard.execute import BoundPlan, bind, execute
from rlhf_mc.reshard.layout import EMPTY, whole_layout
from rlhf_mc.reshard.plan import make_plan


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_correction_biases_are_verified_after_an_update(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = whole_layout({"w": (4, 2), "bias": (3,)})
    sync = weight_sync.plan_weight_sync(
        [layout], [layout], frozenset({"bias"}), 0, torch.bfloat16, "always", 1000
    )
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
        sync = weight_sync.plan_weight_sync(
            [layout], [layout], frozenset(), 0, torch.float32, "off", 1000, keep_views=keep_views
        )
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
