"""An update in which one rank runs out of memory: the token budget is halved and the update
repeated on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memory_cases
import pytest
import torch
from gpu_parts.tiny import make_checkpoint
from reduction_cases import training_batch
from test_prompts_once import grouped_batch

from rlhf_mc.data.batch import RaggedBatch

pytestmark = pytest.mark.dist


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        make_checkpoint(tmp_path_factory.mktemp("memory") / "model", family="qwen2", tied=True)
    )


@pytest.fixture(scope="module", params=["prompts of their own", "shared prompts"])
def batch(request: pytest.FixtureRequest) -> RaggedBatch:
    if request.param == "shared prompts":
        return grouped_batch(250, [(24, (9, 12, 5, 7)), (24, (11, 3, 8, 10)), (20, (6, 6, 9))])
    return training_batch()


@pytest.fixture
def updates(pool: Any, checkpoint: str, batch: RaggedBatch, tmp_path: Path) -> Any:
    def run(
        name: str, budget: int, tokens_in_memory: int | None, computes_old_log_probs: bool = False
    ) -> list[dict[str, Any]]:
        directory = tmp_path / name
        directory.mkdir()
        found: list[dict[str, Any]] = pool(2).run(
            memory_cases.updates,
            checkpoint=checkpoint,
            batch=batch,
            budget=budget,
            tokens_in_memory=tokens_in_memory,
            directory=str(directory),
            computes_old_log_probs=computes_old_log_probs,
        )
        return found

    return run


def test_update_is_repeated_with_half_the_budget(updates: Any, batch: RaggedBatch) -> None:
    budget = 2 * int(batch.seq_lens.max()) + 4
    halved = updates("halved", budget, tokens_in_memory=budget // 2)
    plain = updates("plain", budget, tokens_in_memory=None)
    assert [rank["budgets"] for rank in plain] == [[budget, budget]] * 2
    assert max(max(rank["used"]) for rank in plain) > budget // 2, (
        "the batch has no micro-batch that is too large"
    )
    for with_halving, without in zip(halved, plain, strict=True):
        assert with_halving["budgets"] == [budget, budget // 2]
        assert with_halving["after_resume"] == [None, budget // 2]
        for name, weight in without["weights"].items():
            torch.testing.assert_close(with_halving["weights"][name], weight, rtol=1e-5, atol=1e-6)
        computed = [
            rank["metrics"].pop("actor/computed_tokens") for rank in (with_halving, without)
        ]
        # half the budget has room for fewer responses of a prompt
        assert computed[0] > computed[1] or computed == [1.0, 1.0]
        for key, value in without["metrics"].items():
            assert with_halving["metrics"][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    assert equal(halved[0]["weights"], halved[1]["weights"])


def test_old_log_probs_are_those_of_the_repeated_update(updates: Any, batch: RaggedBatch) -> None:
    """Rank 0 has computed some that rank 1 computes in the repetition."""
    budget = 2 * int(batch.seq_lens.max()) + 4
    halved = updates(
        "own, halved", budget, tokens_in_memory=budget // 2, computes_old_log_probs=True
    )
    plain = updates("own", budget, tokens_in_memory=None, computes_old_log_probs=True)
    assert halved[0]["budgets"] == [budget // 2] * 2
    for with_halving, without in zip(halved, plain, strict=True):
        torch.testing.assert_close(
            with_halving["old_log_probs"], without["old_log_probs"], rtol=1e-5, atol=1e-6
        )
        assert with_halving["old_log_probs"].max() < 0.0


def test_without_room_for_the_longest_sequence_the_run_ends_on_every_rank(
    updates: Any, batch: RaggedBatch
) -> None:
    longest = int(batch.seq_lens.max())
    for rank in updates("stuck", longest, tokens_in_memory=longest // 4):
        assert rank["error"] == (
            "actor: rank 1 is out of memory in update 2 of step 1, with micro-batches of "
            f"{longest} tokens; lower actor.ppo_max_token_len_per_gpu, or shard the model over "
            "more ranks (actor.megatron)"
        )
