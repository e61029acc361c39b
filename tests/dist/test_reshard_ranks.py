"""Plans executed between processes, in buckets of any size."""

from __future__ import annotations

from typing import Any

import pytest
import reshard_cases


@pytest.mark.parametrize("bucket", [4096, 1 << 20])
@pytest.mark.parametrize(
    ("world", "tp", "pp", "first_layers", "rollout_tp"),
    [
        (2, 2, 1, None, 1),
        (2, 1, 2, 1, 2),
        (4, 4, 1, None, 2),
        (4, 2, 2, 2, 1),
        (4, 2, 1, None, 4),
        (4, 1, 2, 1, 2),
    ],
)
def test_every_block_is_delivered(
    pool: Any,
    world: int,
    tp: int,
    pp: int,
    first_layers: int | None,
    rollout_tp: int,
    bucket: int,
) -> None:
    results = pool(world).run(
        reshard_cases.update_weights,
        tp=tp,
        pp=pp,
        first_layers=first_layers,
        rollout_tp=rollout_tp,
        bucket=bucket,
        # two nodes: some blocks are forwarded within a node
        ranks_per_node=2 if bucket == 4096 else world,
    )
    assert results == [True] * world
