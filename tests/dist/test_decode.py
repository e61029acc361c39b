"""The rollout engine's steps against vLLM's own scheduler and output processor: schedules, KV
cache,
tokens, log-probs and experts are equal to the last bit. And the benchmarks of both at a small
size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import decode_cases
import pytest
from decode_cases import Case
from tiny import make_checkpoint

FEW_BLOCKS = 24
MANY_BLOCKS = 400
CASES = [
    *(Case(seed, FEW_BLOCKS) for seed in range(4)),
    *(Case(seed, MANY_BLOCKS) for seed in range(2)),
    Case(6, FEW_BLOCKS, asynchronous=False, v2=False),
    Case(7, FEW_BLOCKS, v2=False),
    Case(8, FEW_BLOCKS, caching=False),
    Case(9, MANY_BLOCKS, experts=True),
    Case(10, FEW_BLOCKS, experts=True),
    Case(11, FEW_BLOCKS, asynchronous=False, v2=False, experts=True),
]


def test_each_step_is_vllms(pool: Any) -> None:
    """Compare each step of random requests. Every kind of event occurs, and every case has steps of
    our own."""
    (found,) = pool(1).run(decode_cases.host_steps, cases=CASES)
    sums: dict[str, int] = {}
    for case, counts in zip(CASES, found, strict=True):
        assert 0 < counts["fast"] < counts["steps"], (case, counts)
        for name, count in counts.items():
            sums[name] = sums.get(name, 0) + count
    assert min(sums.values()) > 20, sums


def test_a_model_generates_what_vllm_returns(pool: Any, tmp_path: Path) -> None:
    """Compare sampled and greedy responses, some of them aborted and some preempted, with those of
    vLLM's output processor."""
    checkpoint = str(
        make_checkpoint(tmp_path / "model", num_hidden_layers=2, max_position_embeddings=1024)
    )
    (results,) = pool(1).run(
        decode_cases.model_steps,
        checkpoint=checkpoint,
        temperatures=(1.0, 0.0),
        kv_cache_bytes=1 << 20,
    )
    for (wanted, found, num_preempted), ends in zip(results, ({False, True}, {False}), strict=True):
        assert found == wanted
        assert num_preempted > 0
        assert {one.finished for one in wanted} == ends


def test_the_benchmarks_run(pool: Any) -> None:
    """Run both benchmarks small: they compare the responses, and their parts add up."""
    ((host, model),) = pool(1).run(decode_cases.benchmarks)
    for step, schedule, update, rest in host.values():
        assert step == pytest.approx(schedule + update + rest) and min(schedule, update, rest) > 0
    assert all(seconds > 0 and kernels == 0 for seconds, kernels in model.values())
