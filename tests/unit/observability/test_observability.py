"""Metrics, timers, the three sinks. Events and JSON are read back with the libraries that
users read them with."""

from __future__ import annotations

import io
import json
import math
import resource
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import TrainerConfig
from rlhf_mc.observability.metrics import PhaseTimer, mean_by_key, summarize, summarize_lengths
from rlhf_mc.observability.sinks import Sinks
from rlhf_mc.observability.step_table import validation_accuracies


def test_metrics_are_means_over_the_values_of_each_key() -> None:
    rows = [
        {"loss": 1.0, "skipped": 0.0},
        {"skipped": 1.0},
        {"loss": 5.0, "skipped": 0.0, "late": 2.0},
    ]
    means = mean_by_key(rows)
    assert means == {"loss": 3.0, "skipped": 1 / 3, "late": 2.0}
    assert list(means) == ["loss", "skipped", "late"]


def test_summarize() -> None:
    values = torch.tensor([[1, 2], [3, 8]], dtype=torch.int32)
    assert summarize("critic/score", values) == {
        "critic/score/mean": 3.5,
        "critic/score/max": 8.0,
        "critic/score/min": 1.0,
    }
    assert all(math.isnan(value) for value in summarize("x", torch.empty(0)).values())


def test_summarize_bfloat16_takes_the_mean_in_high_precision() -> None:
    # 257 ones are 256 in a bfloat16 sum
    assert summarize("x", torch.ones(257, dtype=torch.bfloat16))["x/mean"] == 1.0


def test_summarize_lengths_counts_those_at_the_limit() -> None:
    summary = summarize_lengths("response_length", torch.tensor([4, 16, 16, 7]), limit=16)
    assert summary["response_length/clip_ratio"] == 0.5
    assert summary["response_length/mean"] == 10.75


def test_phase_timer_adds_up_and_synchronizes() -> None:
    calls = []
    timer = PhaseTimer(synchronize=lambda: calls.append(1))
    with timer.phase("step"):
        for _ in range(2):
            with timer.phase("gen"):
                time.sleep(0.02)
    seconds = timer.result()
    assert list(seconds) == ["timing_s/gen", "timing_s/step"]
    assert 0.04 <= seconds["timing_s/gen"] <= seconds["timing_s/step"] < 10
    assert len(calls) == 6


def test_phase_timer_counts_a_phase_that_raises() -> None:
    timer = PhaseTimer()
    with pytest.raises(RuntimeError), timer.phase("gen"):
        raise RuntimeError
    assert timer.result().keys() == {"timing_s/gen"}


def strict_json(line: str) -> dict:
    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_jsonl_is_strict_flushed_each_step_and_replaces_an_earlier_run(tmp_path: Path) -> None:
    config = TrainerConfig(default_local_dir=str(tmp_path / "new" / "run"), logger=["jsonl"])
    path = tmp_path / "new" / "run" / "metrics.jsonl"
    for _ in range(2):
        sinks = Sinks(config, total_steps=2)
        sinks.log(0, {"val-core/gsm8k/acc/mean@1": 0.5})
        sinks.log(
            1,
            {
                "a": float("nan"),
                "b": float("-inf"),
                "training/global_step": 1,
                "c": torch.tensor(0.25),
            },
        )
        rows = [strict_json(line) for line in path.read_text().splitlines()]  # before close
        assert rows == [
            {"step": 0, "val-core/gsm8k/acc/mean@1": 0.5},
            {"step": 1, "a": None, "b": None, "training/global_step": 1, "c": 0.25},
        ]
        sinks.close()
    assert not (tmp_path / "new" / "run" / "tensorboard").exists()


@pytest.mark.slow
def test_tensorboard_events_read_back_and_replace_an_earlier_run(tmp_path: Path) -> None:
    config = TrainerConfig(default_local_dir=str(tmp_path), logger=["tensorboard"])
    for run, num_steps in ((1, 3), (2, 2)):
        sinks = Sinks(config, total_steps=num_steps)
        for step in range(num_steps):
            sinks.log(step, {"val-core/gsm8k/acc/mean@1": run + step / 4})
        sinks.close()
        time.sleep(1.1)  # event files are named, and so ordered, by the second

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("val-core/gsm8k/acc/mean@1")
    assert [(scalar.step, scalar.value) for scalar in scalars] == [(0, 2.0), (1, 2.25)]
    assert not (tmp_path / "metrics.jsonl").exists()


class FullStream(io.StringIO):
    """Standard output on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_unwritable_sinks_warn_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fill the disk for TensorBoard and the table of steps. metrics.jsonl continues."""
    config = TrainerConfig(default_local_dir=str(tmp_path))
    sinks = Sinks(config, total_steps=2, stream=FullStream())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        for step in range(3):
            sinks.log(step, {f"{step}/{i}": 1.0 for i in range(60)})
        sinks.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    warnings = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("rlhf_mc: ")
    ]
    assert len(warnings) == 2
    assert warnings[0].startswith(
        "rlhf_mc: warning: table of steps cannot be written (No space left on device; free"
    )
    assert warnings[1].startswith(
        "rlhf_mc: warning: TensorBoard cannot be written (File too large; "
    )


def test_unwritable_tensorboard_directory_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    sinks = Sinks(
        TrainerConfig(default_local_dir=str(tmp_path), logger=["jsonl", "tensorboard"]),
        total_steps=1,
    )
    sinks.log(1, {"a": 1.0})
    sinks.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "a": 1.0}


def test_unwritable_directory_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = TrainerConfig(default_local_dir=str(tmp_path / "file"), logger=["jsonl"])
    with pytest.raises(
        UserError, match=r"^trainer\.default_local_dir: cannot write .*/file/.+"
    ) as caught:
        Sinks(config, total_steps=1)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    sinks = Sinks(TrainerConfig(default_local_dir=str(tmp_path), logger=["jsonl"]), total_steps=1)
    with pytest.raises(UserError, match=r"metrics\.jsonl: No space left on device"):
        sinks.log(1, {"a": 1.0})


def test_validation_accuracies_of_a_source_with_slashes() -> None:
    metrics = {
        "val-core/openai/gsm8k/acc/mean@4": 0.5,
        "val-core/x/reward/mean@1": 1.0,
        "critic/score/mean": 1.0,
    }
    assert validation_accuracies(metrics) == {"openai/gsm8k": 0.5}
