"""Experiment trackers with the real libraries, offline: what they have recorded is read back from
their own files."""

from __future__ import annotations

import json
import math
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import TrainerConfig
from rlhf_mc.observability import trackers
from rlhf_mc.observability.sinks import Sinks
from rlhf_mc.observability.trackers import TRACKERS, TrackedRun, check_loggers, mlflow_name
from rlhf_mc.run_files import flattened

RUN_ID = "20261122-170000-abc123"
SETTINGS = {
    "trainer": {"seed": 1, "logger": ["jsonl"]},
    "actor": {"optim": {"lr": 1e-6}},
    "long": "x" * 9000,
    "ü//..": 2,
}
Recorded = dict[str, list[tuple[int, float]]]
"""(step, value) by metric."""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for name in ("MLFLOW_TRACKING_URI", "WANDB_DIR", "SWANLAB_LOG_DIR"):
        monkeypatch.delenv(name, raising=False)


def log_steps(
    directory: Path, name: str, steps: range, after_step: int | None, value: float = 0.0
) -> None:
    """Log as a start of the run does. Step 1 has values that are not finite."""
    config = TrainerConfig(
        default_local_dir=str(directory), logger=["jsonl", name], project_name="sums"
    )
    sinks = Sinks(config, total_steps=9, after_step=after_step, run_id=RUN_ID, settings=SETTINGS)
    for step in steps:
        bad = {"actor/grad_norm": math.nan, "critic/vf_loss": math.inf} if step == 1 else {}
        sinks.log(
            step, {"critic/score/a b/mean": value + step, "val-core/sums/acc/mean@4": 0.5, **bad}
        )
    sinks.close()
    sinks.close()


def log_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file in the format of LevelDB's log, which W&B and SwanLab write
    offline: a header of 7 bytes, then blocks of 32 KiB with parts of records, each after 4 bytes of
    checksum, 2 of length and 1 of type."""
    data = path.read_bytes()
    at = 7
    record = b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def wandb_records(directory: Path) -> tuple[Recorded, set[str], dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    points: Recorded = {}
    ids: set[str] = set()
    config: dict[str, Any] = {}
    for path in sorted((directory / "wandb").glob("offline-run-*/*.wandb")):
        for data in log_records(path):
            record = wandb_internal_pb2.Record.FromString(data)
            ids |= {record.run.run_id} - {""}
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            for item in record.history.item:
                key = item.key or "/".join(item.nested_key)
                if not key.startswith("_"):
                    points.setdefault(key, []).append(
                        (record.history.step.num, float(json.loads(item.value_json)))
                    )
    return points, ids, config


def swanlab_records(directory: Path) -> tuple[Recorded, set[str], dict[str, Any]]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    points: Recorded = {}
    ids: set[str] = set()
    config: dict[str, Any] = {}
    for path in sorted((directory / "swanlog").glob("run-*/*.swanlab")):
        for data in log_records(path):
            record = Record.FromString(data)
            ids |= {record.start.id} - {""}
            if record.scalar.key:
                points.setdefault(record.scalar.key, []).append(
                    (record.scalar.step, record.scalar.value.number)
                )
        settings = yaml.safe_load((path.parent / "files" / "config.yaml").read_text())
        config |= {key: item["value"] for key, item in settings.items()}
    return points, ids, config


def mlflow_records(directory: Path) -> tuple[Recorded, set[str], dict[str, Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"file://{directory.resolve()}/mlruns")
    experiment = client.get_experiment_by_name("sums")
    runs = client.search_runs([experiment.experiment_id])
    assert [run.info.run_name for run in runs] == [directory.name]
    assert [run.info.status for run in runs] == ["FINISHED"]
    history = {
        key: [
            (point.step, point.value) for point in client.get_metric_history(run.info.run_id, key)
        ]
        for run in runs
        for key in run.data.metrics
    }
    return history, {run.data.tags["rlhf_mc.run_id"] for run in runs}, runs[0].data.params


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "records"),
    [("wandb", wandb_records), ("mlflow", mlflow_records), ("swanlab", swanlab_records)],
)
def test_a_resumed_run_continues_the_run_of_the_tracker(
    tmp_path: Path, name: str, records: Callable[[Path], tuple[Recorded, set[str], dict[str, Any]]]
) -> None:
    pytest.importorskip(name)
    log_steps(tmp_path, name, range(4), None)
    time.sleep(1.1)  # offline directories are named by the second
    log_steps(tmp_path, name, range(2, 6), 1, value=10.0)  # resumed after step 1
    points, ids, config = records(tmp_path)
    accuracy = "val-core/sums/acc/mean_at_4" if name == "mlflow" else "val-core/sums/acc/mean@4"
    scores = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 14.0), (5, 15.0)]
    # it may lack steps 2 and 3, and gets them again; of a step that it has, its server keeps one
    if name != "mlflow":
        scores[4:4] = [(2, 12.0), (3, 13.0)]
    assert points == {
        "critic/score/a b/mean": scores,
        accuracy: [(step, 0.5) for step, _ in scores],
    }
    assert ids == {RUN_ID}
    assert (
        config["actor.optim.lr"] == "1e-06"
        if name == "mlflow"
        else config["actor"]["optim"]["lr"] == 1e-6
    )
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["critic/score/a b/mean"] for row in rows] == [0.0, 1.0, 12.0, 13.0, 14.0, 15.0]
    assert rows[1]["actor/grad_norm"] is None


@pytest.mark.parametrize("first_failure", [0, 2])
def test_a_tracker_that_fails_is_dropped_with_a_warning(
    tmp_path: Path,
    first_failure: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fail when the tracker is built, and at the second step."""

    class Failing:
        def __init__(self, run: TrackedRun) -> None:
            self.log(0, {})

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            if step >= first_failure:
                raise ConnectionError("no route to host\nsecond line")

    monkeypatch.setitem(TRACKERS, "wandb", Failing)
    config = TrainerConfig(default_local_dir=str(tmp_path), logger=["jsonl", "wandb"])
    sinks = Sinks(config, total_steps=3, run_id=RUN_ID)
    for step in (1, 2, 3):
        sinks.log(step, {"actor/loss": 1.0})
    sinks.close()
    assert capsys.readouterr().err.splitlines() == [
        "rlhf_mc: warning: wandb cannot be written (no route to host); the run continues without"
    ]
    assert [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2, 3]


def test_a_package_that_is_not_installed_is_named_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, package in (("wandb", "wandb"), ("mlflow", "mlflow-skinny"), ("swanlab", "swanlab")):
        with pytest.raises(UserError) as caught:
            check_loggers(["console", name])
        expected = (
            f"trainer.logger: {name} is not installed: pip install {package}, or leave {name} out"
        )
        assert str(caught.value) == expected
    check_loggers(["console", "jsonl", "tensorboard"])


def test_names_and_settings_for_mlflow() -> None:
    assert (
        mlflow_name("val-core/openai/gsm8k/acc/best@4/mean")
        == "val-core/openai/gsm8k/acc/best_at_4/mean"
    )
    assert mlflow_name("reward/Müll (a=b)/x:y") == "reward/M_ll _a_b_/x:y_3fa64c7c"
    assert dict(flattened(SETTINGS)) == {
        "trainer.seed": 1,
        "trainer.logger": ["jsonl"],
        "actor.optim.lr": 1e-6,
        "long": "x" * 9000,
        "ü//..": 2,
    }


@pytest.mark.slow
def test_mlflow_takes_any_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log, in several batches, keys that MLflow refuses as they are, some of which differ only in
    what it refuses."""
    pytest.importorskip("mlflow")
    keys = [
        "数学/acc",
        "物理/acc",
        "a//b",
        "a/./b",
        "a/../b",
        "../b",
        "/b",
        "b/",
        "..b",
        "x" * 300,
        "x" * 301,
        "",
    ]
    monkeypatch.setattr(trackers, "_MLFLOW_METRICS", 5)
    config = TrainerConfig(
        default_local_dir=str(tmp_path), logger=["jsonl", "mlflow"], project_name="sums"
    )
    sinks = Sinks(config, total_steps=1, run_id=RUN_ID, settings=SETTINGS)
    sinks.log(1, {key: float(number) for number, key in enumerate(keys)})
    sinks.close()
    points, _, _ = mlflow_records(tmp_path)
    assert sorted(points.values()) == [[(1, float(number))] for number in range(len(keys))]


@pytest.mark.parametrize("hanging", ["start", "close"])
def test_a_tracker_without_an_answer_is_left(
    tmp_path: Path,
    hanging: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    released = threading.Event()

    class Hanging:
        def __init__(self, run: TrackedRun) -> None:
            if hanging == "start":
                released.wait()

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            pass

        def close(self) -> None:
            released.wait()

    monkeypatch.setitem(TRACKERS, "mlflow", Hanging)
    monkeypatch.setattr(trackers, f"{hanging.upper()}_SECONDS", 0.05)
    config = TrainerConfig(default_local_dir=str(tmp_path), logger=["jsonl", "mlflow"])
    sinks = Sinks(config, total_steps=1, run_id=RUN_ID)
    sinks.log(1, {"actor/loss": 1.0})
    sinks.close()
    released.set()
    assert capsys.readouterr().err.splitlines() == [
        (
            "rlhf_mc: warning: mlflow cannot be written (no answer within 0.05 s); the run "
            "continues without"
        )
    ]
