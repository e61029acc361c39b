"""A pass makes the host wait for the device once, at its end, whatever its number of
micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sync_cases
from gpu_parts.engines import token_batch
from gpu_parts.tiny import make_checkpoint
from workers import Workers

from rlhf_mc.data.batch import RaggedBatch

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        make_checkpoint(tmp_path_factory.mktemp("syncs") / "model", "qwen2", num_hidden_layers=4)
    )


@pytest.fixture(scope="module")
def batch() -> RaggedBatch:
    batch = token_batch(260, (3, 9, 5, 4), (6, 1, 11, 5))
    return batch.with_fields(
        **{
            name: batch.rollout_log_probs.clone()
            for name in ("old_log_probs", "ref_log_probs", "advantages", "values", "returns")
        }
    )


@pytest.mark.parametrize(
    ("world", "role", "layout", "settings"),
    [
        (1, "actor", (1, 1, 1), {"dtype": "bfloat16"}),
        (1, "actor", (1, 1, 1), {"computes_old_log_probs": True}),
        (1, "critic", (1, 1, 1), {"recompute_granularity": "full"}),
        (2, "actor", (2, 1, 1), {"sequence_parallel": True}),
        (2, "actor", (1, 2, 1), {}),
        (2, "actor", (1, 2, 2), {}),
        (2, "critic", (1, 1, 1), {"use_distributed_optimizer": True}),
    ],
)
def test_no_micro_batch_waits(
    pool: Callable[[int], Workers],
    checkpoint: str,
    batch: RaggedBatch,
    world: int,
    role: str,
    layout: tuple[int, int, int],
    settings: dict[str, Any],
) -> None:
    for found in pool(world).run(
        sync_cases.waits,
        checkpoint=checkpoint,
        role=role,
        layout=layout,
        batch=batch,
        reading=False,
        **settings,
    ):
        # Lists are of tensors on the host: lengths, and statistics that have been copied. Scores
        # are sent to the device on which they are. With sequence parallelism Megatron-Core compares
        # random states of the host.
        if settings.get("sequence_parallel"):
            for counts in found.values():
                assert [count.pop("aten._local_scalar_dense") for count in counts] == [
                    2,
                    2 * batch.num_sequences,
                ]
        scores = {"torch.Tensor.to": 1, "torch.Tensor.cpu": 1, "torch.Tensor.tolist": 1}
        statistics = {"torch.Tensor.cpu": 1, "torch.Tensor.tolist": 2}
        assert found == {"score": [scores] * 2, "gradient": [statistics] * 2}


def test_a_loss_that_waits_is_counted(
    pool: Callable[[int], Workers], checkpoint: str, batch: RaggedBatch
) -> None:
    """Count two reads of the loss in each micro-batch."""
    (found,) = pool(1).run(
        sync_cases.waits,
        checkpoint=checkpoint,
        role="actor",
        layout=(1, 1, 1),
        batch=batch,
        reading=True,
    )
    assert [counts["aten._local_scalar_dense"] for counts in found["gradient"]] == [
        2,
        2 * batch.num_sequences,
    ]
