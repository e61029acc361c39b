"""benchmarks/rollout_tail.py at a small size: vLLM's schedule is the simulator's, and a step's
responses are too."""

from __future__ import annotations

from typing import Any

import tail_cases


def test_vllm_and_the_simulator_train_on_the_same_responses(pool: Any) -> None:
    ranks = pool(2).run(tail_cases.measured, kind="bimodal")
    for name, figures in ranks[0].items():
        assert figures["tokens"] == figures["simulated"]["tokens"] == ranks[1][name]["tokens"], name
        assert figures["staleness"] == figures["simulated"]["staleness"]
        assert 0 <= figures["waits"] <= figures["idle"] < 1 and figures["seconds"] > 0
    assert (
        len({figures["tokens"] for name, figures in ranks[0].items() if name != "partial rollouts"})
        == 1
    )
