"""Plans executed between processes: through shared memory, through sockets, in buckets of any
size."""

from __future__ import annotations

from typing import Any

import pytest
import reshard_cases

# (world, tp, pp, layers of the first stage, rollout TP)
LAYOUTS = [
    (2, 2, 1, None, 1),
    (2, 1, 2, 1, 2),
    (4, 4, 1, None, 2),
    (4, 2, 2, 2, 1),
    (4, 2, 1, None, 4),
    (4, 1, 2, 1, 2),
]


@pytest.mark.parametrize("bucket", [4096, 1 << 20])
@pytest.mark.parametrize("kind", ["shared", "sockets"])
@pytest.mark.parametrize(("world", "tp", "pp", "first", "rollout_tp"), LAYOUTS)
def test_every_transport_delivers_every_block(
    pool: Any,
    kind: str,
    world: int,
    tp: int,
    pp: int,
    first: int | None,
    rollout_tp: int,
    bucket: int,
) -> None:
    results = pool(world).run(
        reshard_cases.update_weights,
        kind=kind,
        tp=tp,
        pp=pp,
        first_layers=first,
        rollout_tp=rollout_tp,
        bucket=bucket,
        # two nodes: some blocks are forwarded within a node
        ranks_per_node=2 if bucket == 4096 else world,
    )
    assert results == [(True, world if kind == "shared" else 0)] * world


@pytest.mark.parametrize("kind", ["refused", "limited"])
@pytest.mark.parametrize("world", [2, 4])
def test_memory_that_one_rank_may_not_read_is_used_by_none(
    pool: Any, kind: str, world: int
) -> None:
    layout = {"tp": world, "pp": 1, "first_layers": None, "rollout_tp": world // 2}
    results = pool(world).run(
        reshard_cases.update_weights, kind=kind, **layout, bucket=4096, ranks_per_node=2
    )
    assert results == [(True, 0)] * world


def test_messages_stay_until_the_last_rank_has_read_them(pool: Any) -> None:
    layout = {
        "tp": 2,
        "pp": 1,
        "first_layers": None,
        "rollout_tp": 1,
        "bucket": 1 << 14,
        "ranks_per_node": 2,
    }
    assert pool(2).run(reshard_cases.update_weights, kind="late", **layout) == [(True, 2)] * 2


def test_lost_aliasing_on_one_rank_is_an_error_of_all(pool: Any) -> None:
    errors = pool(2).run(reshard_cases.lose_an_alias)
    assert errors[0] == errors[1]
    assert errors[0].startswith("reshard.verify: w on rank 0 does not alias its source")
