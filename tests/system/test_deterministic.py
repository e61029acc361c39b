"""trainer.deterministic on a CPU: every operation of a run passes, and no bit of the run
changes."""

from __future__ import annotations

import json
from pathlib import Path

import forked
import pytest
from runs import outcome
from tiny import make_workspace, write_config

pytestmark = pytest.mark.system

STEPS = 2
PROGRAM = str(Path(__file__).with_name("recording.py"))


def run(
    config: Path, directory: Path, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> dict[str, object]:
    """Train on two ranks, which share one model. Check that their settings are as asked for. Return
    the outcome."""
    directory.mkdir()
    arguments = [
        f"trainer.default_local_dir={directory / 'run'}",
        f"trainer.deterministic={str(deterministic).lower()}",
    ]
    monkeypatch.setenv("RECORD", str(directory / "rank"))
    done = forked.run_ranks(2, [PROGRAM, str(config), *arguments])
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        found = json.loads((directory / f"rank_{rank}").read_text())
        assert found["torch"] is deterministic and set(found["models"]) == {deterministic}
    return outcome(directory / "run", STEPS)


def test_deterministic_algorithms_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_workspace(tmp_path, family="qwen3_moe", num_hidden_layers=2)
    megatron = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "recompute_granularity": "full",
    }
    config = write_config(
        tmp_path,
        trainer={"total_training_steps": STEPS, "save_freq": STEPS, "logger": ["jsonl"]},
        actor={"megatron": megatron},
        rollout={"tensor_model_parallel_size": 2},
    )
    usual = run(config, tmp_path / "usual", False, monkeypatch)
    deterministic = run(config, tmp_path / "deterministic", True, monkeypatch)
    assert deterministic["metrics"] == usual["metrics"]
    assert deterministic == usual
