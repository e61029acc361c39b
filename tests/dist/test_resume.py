"""A run that was cut off and went on is the run that was not: the same metrics and the same weights, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import resume_cases
from tiny import make_workspace, write_config

STEPS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "trainer": {"total_training_steps": STEPS, "save_freq": 1, "test_freq": 2, "critic_warmup": 1},
    "actor": {"optim": {"lr_decay_style": "linear"}},
    "critic": {"optim": {"lr_decay_style": "cosine"}},
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("resume"), num_hidden_layers=2)


def metrics(run: Path) -> dict[int, dict[str, float]]:
    """By step, without what a clock or the process's size decides."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    varies = ("timing_s/", "perf/time_per_step", "perf/throughput", "perf/peak_memory_gb")
    return {row["step"]: {k: v for k, v in row.items() if not k.startswith(varies)} for row in rows}


LAYOUTS = [(1, 1, 1, "float32"), (2, 2, 1, "float32"), (2, 1, 1, "bfloat16")]


@pytest.mark.parametrize(("world", "tp", "pp", "dtype"), LAYOUTS)
def test_killed_and_gone_on_with(
    pool: Any, workspace: Path, tmp_path: Path, world: int, tp: int, pp: int, dtype: str
) -> None:
    config = write_config(workspace, **SETTINGS)
    layout = [
        f"actor.megatron.tensor_model_parallel_size={tp}",
        f"actor.megatron.pipeline_model_parallel_size={pp}",
        f"actor.megatron.dtype={dtype}",
    ]

    def train(name: str, **kwargs: Any) -> Any:
        overrides = [*layout, f"trainer.default_local_dir={tmp_path / name}"]
        return pool(world).run(resume_cases.train, config_path=str(config), overrides=overrides, **kwargs)

    whole = train("whole")
    train("cut", kill_step=3, kill_phase="update_models")
    resumed = train("cut")
    # The checkpoint of step 2 may have been under way.
    assert {first for first, _ in whole} == {0} and {first for first, _ in resumed} <= {2, 3}
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert [digests for _, digests in resumed] == [digests for _, digests in whole]
