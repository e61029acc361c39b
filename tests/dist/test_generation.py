"""Rollout engines that share one queue of requests: vLLM with fewer places than requests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rollout_cases
import torch
from gpu_parts.reference import Reference
from tiny import make_checkpoint

from rlhf_mc.data.batch import Prompt, Responses, build_batch

GROUPS = {1: [[0]], 2: [[0], [1]], 4: [[1, 0], [2, 3]]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("generation"), num_hidden_layers=2))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(4, 260) for _ in range(rng.randrange(3, 20))] for _ in range(40)]


@pytest.fixture(scope="module")
def alone(pool: Any, checkpoint: str, prompts: list[list[int]]) -> list[Any]:
    """Return the responses of one engine that runs all requests at once."""
    ((responses, _), _) = pool(1).run(
        rollout_cases.shared, checkpoint=checkpoint, groups=[[0]], prompts=prompts, max_running=64
    )[0]
    return list(responses)


@pytest.fixture(scope="module", params=[1, 4])
def crowded(
    request: pytest.FixtureRequest, pool: Any, checkpoint: str, prompts: list[list[int]]
) -> list[Any]:
    """Return each rank's result where engines have fewer places than requests."""
    results: list[Any] = pool(request.param).run(
        rollout_cases.shared_and_in_parts,
        checkpoint=checkpoint,
        groups=GROUPS[request.param],
        prompts=prompts,
        max_running=4,
        part=10,
    )
    return results


def test_shared_requests_have_the_same_responses(
    prompts: list[list[int]], alone: list[Any], crowded: list[Any]
) -> None:
    ranks = [shares for shares, _ in crowded]
    groups = GROUPS[len(ranks)]
    assert len({len(response.token_ids) for response in alone}) > 10, "responses of many lengths"
    for rank, ((responses, taken), again) in enumerate(ranks):
        assert [r.token_ids for r in responses] == [r.token_ids for r in alone]
        for one, other in zip(responses, alone, strict=True):
            torch.testing.assert_close(
                torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=1e-5, rtol=0
            )
        assert again == (responses, taken), f"rank {rank}: the second call is equal to the last bit"
    shares = [ranks[group[0]][0][1] for group in groups]
    assert sorted(number for share in shares for number in share) == list(range(len(prompts)))
    for group, share in zip(groups, shares, strict=True):
        assert all(ranks[rank][0][1] == share for rank in group), (
            "all ranks of an engine add the same requests"
        )
    if len(groups) > 1:
        assert shares[0] != list(range(0, len(prompts), 2)), "an engine takes what it has room for"


def test_a_slow_engine_takes_fewer_requests(
    pool: Any, checkpoint: str, prompts: list[list[int]], alone: list[Any]
) -> None:
    ranks = pool(2).run(
        rollout_cases.shared,
        checkpoint=checkpoint,
        groups=GROUPS[2],
        prompts=prompts,
        max_running=4,
        clock="measured",
        slow_rank=1,
    )
    for responses, _ in (call for rank in ranks for call in rank):
        assert [r.token_ids for r in responses] == [r.token_ids for r in alone]
    fast, slow = (len(rank[1][1]) for rank in ranks)
    assert fast + slow == len(prompts) and fast > 2 * slow


def test_a_response_continues_with_the_same_tokens(alone: list[Any], crowded: list[Any]) -> None:
    """Check calls that end while responses are unfinished and some have not begun."""
    parts = [found for _, found in crowded]
    lens, responses = parts[0]
    assert all(found == parts[0] for found in parts)
    assert len(lens) >= 3 and 0 in lens[0], "the first call has not begun all"
    assert any(0 < before < after for before, after in zip(lens[0], lens[-1], strict=True)), (
        "some are continued"
    )
    assert [r.token_ids for r in responses] == [r.token_ids for r in alone]
    for one, other in zip(responses, alone, strict=True):
        assert one.finished == other.finished
        torch.testing.assert_close(
            torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=1e-5, rtol=0
        )


ONE_BY_ONE = """
from pathlib import Path
def compute_score(solution_str, ground_truth=None, **row):
    (Path(__file__).parent / "scored").touch()
    return float(row["extra_info"].get("index", 0)) + 0.5
"""
TOGETHER = """
from pathlib import Path
def compute_score(solution_strs, **rows):
    (Path(__file__).parent / "scored").touch()
    return [len(solution_strs)] * len(solution_strs)
"""


def test_responses_are_scored_while_others_are_generated(
    pool: Any, checkpoint: str, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Check too that a function which scores responses together gets all of a rank in one call."""
    (tmp_path / "one_by_one.py").write_text(ONE_BY_ONE)
    (tmp_path / "together.py").write_text(TOGETHER)
    ranks = pool(2).run(
        rollout_cases.scored_meanwhile,
        checkpoint=checkpoint,
        prompts=prompts[:17],
        directory=str(tmp_path),
        names=["one_by_one", "together"],
    )
    for one_by_one, (scores, is_scored_meanwhile) in ranks:
        assert one_by_one == ([0.5] * 17, True)
        assert scores == ranks[0][1][0] and len(scores) == 17
        assert not is_scored_meanwhile
        assert set(scores) == {scores.count(score) for score in scores}


def test_requests_that_vllm_preempts(pool: Any, tmp_path: Path) -> None:
    """Check a KV cache that holds the beginnings of more responses than it holds whole ones."""
    checkpoint = str(
        make_checkpoint(tmp_path / "model", num_hidden_layers=2, max_position_embeddings=512)
    )
    roomy, tight = (
        pool(2).run(
            rollout_cases.preempted, checkpoint=checkpoint, groups=GROUPS[2], kv_cache_bytes=size
        )
        for size in (1 << 28, 1 << 20)
    )
    assert [count for _, count in roomy] == [0, 0] and max(count for _, count in tight) > 0
    assert all(responses == roomy[0][0] for responses, _ in (*roomy, *tight))


ENVIRONMENT = """
import asyncio

class Environment:
    def __init__(self):
        self.turn = 0

    def reset(self, row):
        self.number = row["ground_truth"]

    async def step(self, response, token_ids):
        self.turn += 1
        await asyncio.sleep(0.02 * (self.number % 3))
        return [10 + token_ids[0] % 7, 8, 9], self.number + self.turn, self.turn > self.number % 4, {}
"""  # noqa: E501


def test_conversations_do_not_depend_on_the_engines(pool: Any, tmp_path: Path) -> None:
    """Check too that a conversation has the log-probs of one pass over its tokens, and that a turn
    computes its new tokens alone, and those of its last block, of 128 tokens, in the prefix
    cache."""
    checkpoint = str(
        make_checkpoint(tmp_path / "model", num_hidden_layers=2, max_position_embeddings=256)
    )
    (tmp_path / "environment.py").write_text(ENVIRONMENT)
    rng = random.Random(6)
    prompts = [[rng.randrange(4, 260) for _ in range(rng.randrange(130, 150))] for _ in range(10)]
    arguments = {
        "checkpoint": checkpoint,
        "prompts": prompts,
        "path": str(tmp_path / "environment.py"),
    }
    (((wanted, episodes, num_computed),),) = pool(1).run(
        rollout_cases.conversations, layouts=[[[0]]], **arguments
    )
    layouts = [[[1, 0]], [[0], [1]]]
    ranks = pool(2).run(rollout_cases.conversations, layouts=layouts, **arguments)
    for layout in range(len(layouts)):
        assert ranks[0][layout][1] == ranks[1][layout][1] == episodes
        for responses in (rank[layout][0] for rank in ranks):
            assert [one.token_ids for one in responses] == [one.token_ids for one in wanted]
            for one, other in zip(responses, wanted, strict=True):
                torch.testing.assert_close(
                    torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=1e-5, rtol=0
                )
    rows = [Prompt(i, np.array(prompt, np.int32), "", None) for i, prompt in enumerate(prompts)]
    batch = build_batch(rows, Responses.of(wanted))
    with torch.no_grad():
        log_probs, _ = Reference(checkpoint).log_probs(batch)
    torch.testing.assert_close(batch.rollout_log_probs, log_probs, atol=1e-5, rtol=0)
    expected = 0
    for number, (prompt, one) in enumerate(zip(prompts, wanted, strict=True)):
        places = [place for place, _ in episodes[number].rewards]
        assert len(places) == 1 + number % 4 and places[-1] == one.num_drawn - 1
        # at the end of each turn
        lens = [len(prompt) + place + 1 + 3 * turn for turn, place in enumerate(places)]
        # Every token but the last is computed, in each turn anew if it is not of the cached block.
        expected += sum(length - 1 - (128 if turn else 0) for turn, length in enumerate(lens))
    assert num_computed == expected
