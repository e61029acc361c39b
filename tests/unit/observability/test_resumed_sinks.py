"""Metrics of a resumed run: records of steps after the checkpoint are dropped, the others stay."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf_mc.config.schema import TrainerConfig
from rlhf_mc.observability.sinks import Sinks


def log_steps(
    directory: Path, logger: str, steps: range, after_step: int | None, value: float
) -> None:
    sinks = Sinks(
        TrainerConfig(default_local_dir=str(directory), logger=[logger]),
        total_steps=9,
        after_step=after_step,
    )
    for step in steps:
        sinks.log(step, {"a": value + step})
    sinks.close()


def test_rows_of_later_steps_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(tmp_path, "jsonl", range(5), None, 0.0)
    with path.open("a") as file:
        file.write('not a line\n[1]\n{"no": "step"}\n{"step": 2, "cut')
    log_steps(tmp_path, "jsonl", range(3, 6), 2, 10.0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["a"]) for row in rows] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (3, 13.0),
        (4, 14.0),
        (5, 15.0),
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_logged_row_is_synced_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sync the row before the checkpoint of its step counts: a crash of the machine must not lose
    it."""
    synced: dict[str, int] = {}
    fsync = os.fsync

    def recorded_fsync(descriptor: int) -> None:
        synced[Path(os.readlink(f"/proc/self/fd/{descriptor}")).name] = os.fstat(descriptor).st_size
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    config = TrainerConfig(default_local_dir=str(tmp_path), logger=["jsonl", "tensorboard"])
    sinks = Sinks(config, total_steps=9, run_id="first")
    assert tmp_path.name in synced  # the directory, for the file's name
    for step in (1, 2):
        sinks.log(step, {"a": 1.0})
        (events,) = (tmp_path / "tensorboard").iterdir()
        for path in (tmp_path / "metrics.jsonl", events):
            assert synced[path.name] == path.stat().st_size > 0
    sinks.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1]) == {
        "step": 2,
        "run_id": "first",
        "a": 1,
    }


def test_run_resumed_in_another_directory_begins_a_file(tmp_path: Path) -> None:
    log_steps(tmp_path, "jsonl", range(3, 5), 2, 0.0)
    assert [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ] == [3, 4]


@pytest.mark.slow
def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    log_steps(tmp_path, "tensorboard", range(5), None, 0.0)
    time.sleep(1.1)  # event files are named, and so ordered, by the second
    log_steps(tmp_path, "tensorboard", range(3, 6), 2, 10.0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = [(scalar.step, scalar.value) for scalar in events.Scalars("a")]
    assert shown == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0), (5, 15.0)]
