"""benchmarks/rollout_simulator.py: the trainer's loop over simulated engines, at a small size."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import rollout_simulator as simulator
from rollout_workload import KINDS, VARIANTS, Workload

from rlhf_mc.rollout.work_sharing import CLOCKS, VirtualClock

COSTS = simulator.default_costs(8)


@pytest.fixture(scope="module", params=KINDS)
def workload(request: pytest.FixtureRequest) -> Any:
    return Workload(request.param, engines=4, limit=256, places=8)


@pytest.fixture(scope="module")
def results(workload: Any) -> dict[str, Any]:
    return {
        name: simulator.simulate(workload, variant, COSTS) for name, variant in VARIANTS.items()
    }


@pytest.mark.slow
def test_all_but_partial_rollouts_train_on_the_same_responses(results: dict[str, Any]) -> None:
    tokens = {figures.tokens for name, figures in results.items() if name != "partial rollouts"}
    assert len(tokens) == 1
    assert all(
        figures.staleness == 0 for name, figures in results.items() if name != "partial rollouts"
    )
    assert results["partial rollouts"].staleness > 0


def test_no_step_takes_less_than_its_necessary_work(workload: Any, results: dict[str, Any]) -> None:
    least = simulator.bound(workload, COSTS)
    assert all(
        results[name].seconds >= least for name in ("static", "shared", "shared, expected lengths")
    )


def test_expected_lengths_and_partial_rollouts_shorten_a_step(results: dict[str, Any]) -> None:
    static = results["static"]
    shared = results["shared, expected lengths"]
    partial = results["partial rollouts"]
    assert shared.seconds < 0.95 * static.seconds
    assert partial.tokens_per_second > shared.tokens_per_second
    assert partial.idle < static.idle


def test_sharing_costs_little_at_equal_lengths() -> None:
    workload = Workload("equal", engines=2, limit=2048, steps=1)
    costs = simulator.default_costs(workload.places)
    static, shared = (
        simulator.simulate(workload, VARIANTS[name], costs) for name in ("static", "shared")
    )
    assert shared.seconds < 1.01 * static.seconds


def test_the_clock_counts_the_tokens_in_the_kv_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check responses of which some are cut and continue in the next step."""
    counted = []
    cached = []

    class RecordedClock(VirtualClock):
        def step(self, num_running: int, num_prompt_tokens: int, cache_cost: float) -> None:
            counted.append(cache_cost)
            super().step(num_running, num_prompt_tokens, 0.0)

    class RecordedEngine(simulator.SimulatedEngine):
        def step(self) -> Any:
            ended = super().step()
            running, _, before = self.last_step
            cached.append(before + running)  # the token that each has drawn
            return ended

    monkeypatch.setitem(CLOCKS, "virtual", RecordedClock)
    monkeypatch.setattr(simulator, "SimulatedEngine", RecordedEngine)
    workload = Workload("geometric", engines=1, limit=64, places=4)
    simulator.simulate(
        workload, VARIANTS["partial rollouts"], replace(COSTS, cached_token_cost=1.0)
    )
    assert counted == cached and len(counted) > 100


def test_a_response_has_the_length_of_its_prompt_and_seed(workload: Any) -> None:
    lens = [workload.length(prompt, seed) for prompt in range(200) for seed in range(4)]
    assert lens == [workload.length(prompt, seed) for prompt in range(200) for seed in range(4)]
    assert min(lens) >= 1 and max(lens) <= workload.limit
    assert len(set(lens)) > 30


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--engines", "2", "--lengths", "bimodal", "--limit", "64", "--places", "4"]
    monkeypatch.setattr(sys, "argv", ["rollout_simulator.py", *arguments])
    simulator.main()
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 + len(VARIANTS)
    assert len({row.count("|") for row in rows}) == 1
