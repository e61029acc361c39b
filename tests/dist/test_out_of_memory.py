"""A rank that runs out of memory in an update says what to lower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memory_cases
import pytest
from gpu_parts.tiny import make_checkpoint
from reduction_cases import training_batch

pytestmark = pytest.mark.dist


def test_error_says_what_to_lower(pool: Any, tmp_path: Path) -> None:
    batch = training_batch()
    checkpoint = make_checkpoint(tmp_path / "model", family="qwen2", tied=True)
    (notes,) = pool(1).run(
        memory_cases.hungry_update,
        checkpoint=str(checkpoint),
        batch=batch,
        directory=str(tmp_path),
    )
    assert notes == [
        "actor: rank 0 is out of memory in update 2 of step 1, with micro-batches of "
        f"{int(batch.seq_lens.max())} tokens; lower actor.ppo_max_token_len_per_gpu, or shard the "
        "model over more ranks (actor.megatron)"
    ]
