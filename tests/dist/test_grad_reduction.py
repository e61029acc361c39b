"""Reducing gradients during the backward pass gives the same steps as reducing them after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import reduction_cases
import torch
from gpu_parts.tiny import make_checkpoint
from reduction_cases import Training, training_batch
from workers import Workers

from rlhf_mc.config.roles import overlaps_reduction
from rlhf_mc.config.schema import MegatronConfig
from rlhf_mc.data.batch import RaggedBatch

pytestmark = pytest.mark.dist
ALL = (0, 1, 2, 3, 4, 5, 6)
LONGEST = 30
"""Tokens of the longest sequence, a token budget with several micro-batches."""
OFFLOAD = {"grad_offload": True, "optimizer_offload": True, "param_offload": True}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("reduction")
    families: dict[str, dict[str, Any]] = {
        "tied": {"family": "qwen2", "tied": True},
        "untied": {"family": "qwen2", "tied": False},
        "experts": {"family": "qwen3_moe", "tied": False},
    }
    return {name: str(make_checkpoint(root / name, **extra)) for name, extra in families.items()}


@pytest.fixture(scope="module")
def batch() -> RaggedBatch:
    return training_batch()


@pytest.mark.parametrize(
    ("world", "mesh", "family", "role", "frozen", "settings"),
    [
        (2, {}, "tied", "actor", None, {}),
        (
            2,
            {},
            "untied",
            "actor",
            "layers.0.",
            {"use_distributed_optimizer": True, "dtype": "bfloat16"},
        ),
        (2, {}, "untied", "critic", None, {"use_distributed_optimizer": True, **OFFLOAD}),
        (2, {"ep": 2}, "experts", "actor", None, {"use_distributed_optimizer": True}),
        (4, {"pp": 2}, "tied", "actor", None, {"use_distributed_optimizer": True}),
        (4, {"pp": 2, "vpp": 2}, "untied", "actor", None, {"use_distributed_optimizer": True}),
        (
            4,
            {"tp": 2},
            "tied",
            "actor",
            None,
            {"sequence_parallel": True, "recompute_granularity": "full"},
        ),
    ],
)
def test_steps_are_the_same(
    pool: Callable[[int], Workers],
    checkpoints: dict[str, str],
    batch: RaggedBatch,
    world: int,
    mesh: dict[str, int],
    family: str,
    role: str,
    frozen: str | None,
    settings: dict[str, Any],
) -> None:
    """Train on mini-batches with several micro-batches, and on ones that leave a replica with
    dummies only: in the first step, in which Megatron-Core counts the gradients, and in a later
    one."""
    # With other buckets the sum of the norm has another order. Without clipping, two replicas take
    # equal steps.
    exact = settings.get("dtype") == "bfloat16"

    def train(overlap: bool) -> list[Training]:
        arguments = {
            "checkpoint": checkpoints[family],
            "role": role,
            "mesh": mesh,
            "batch": batch,
            "frozen": frozen,
        }
        results: list[Training] = pool(world).run(
            reduction_cases.train,
            minis=[(2,), ALL, (5,), ALL],
            budget=LONGEST,
            offload="grad_offload" in settings,
            clip_grad=0.0 if exact else 0.5,
            overlap_grad_reduce=overlap,
            **arguments,
            **settings,
        )
        return results

    for after, during in zip(train(overlap=False), train(overlap=True), strict=True):
        assert after.early == 0
        if "pp" not in mesh:
            assert during.num_groups > 2 and during.early > 1
        for plain, overlapped in zip(after.metrics, during.metrics, strict=True):
            assert overlapped == pytest.approx(plain, rel=1e-5)
            assert overlapped["skipped"] == 0.0
        for name, weight in after.weights.items():
            tolerance = 0.0 if exact else 1e-4
            torch.testing.assert_close(
                during.weights[name], weight, rtol=tolerance, atol=tolerance / 100
            )


@pytest.mark.parametrize(
    ("world", "mesh", "family", "settings"),
    [
        (2, {}, "tied", {"use_distributed_optimizer": False}),
        (2, {"tp": 2}, "tied", {"use_distributed_optimizer": False}),
        (2, {"ep": 2}, "experts", {"use_distributed_optimizer": False}),
        (4, {"ep": 2}, "experts", {"use_distributed_optimizer": True}),
        (4, {"tp": 2, "pp": 2}, "untied", {"use_distributed_optimizer": False}),
        (
            4,
            {"pp": 2, "vpp": 2},
            "untied",
            {"use_distributed_optimizer": True, "dtype": "bfloat16"},
        ),
    ],
)
def test_one_ranks_fault_is_seen_by_all(
    pool: Callable[[int], Workers],
    checkpoints: dict[str, str],
    batch: RaggedBatch,
    world: int,
    mesh: dict[str, int],
    family: str,
    settings: dict[str, Any],
) -> None:
    """Compare all ranks: the norm of the gradient alone tells the others, so it must not be finite
    on any."""
    faults = ("", "loss", "statistic", "", "statistic")
    ranks = pool(world).run(
        reduction_cases.steps_with_faults,
        checkpoint=checkpoints[family],
        mesh=mesh,
        batch=batch,
        budget=LONGEST,
        faults=faults,
        **settings,
    )
    for results in ranks:
        for fault, (stats, changed), (of_rank_0, _) in zip(faults, results, ranks[0], strict=True):
            assert stats == of_rank_0
            assert changed == (fault == "")
            assert (stats == {"skipped": 1.0}) == (fault != "")
        assert results[0][0]["pg_loss"] != results[3][0]["pg_loss"]
        assert results[0][0]["entropy"] > 1.0


@pytest.mark.parametrize("cuda", [False, True])
def test_reduction_overlaps_on_gpus_with_several_replicas(cuda: bool) -> None:
    assert overlaps_reduction(MegatronConfig(), 2, cuda) == cuda
    assert not overlaps_reduction(MegatronConfig(), 1, cuda)
    assert overlaps_reduction(MegatronConfig(overlap_grad_reduce=True), 1, cuda)
    assert not overlaps_reduction(MegatronConfig(overlap_grad_reduce=False), 2, cuda)
