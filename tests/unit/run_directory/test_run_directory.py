"""Ownership of an output directory by one run: an earlier run's files are moved away, inputs
stay."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from rlhf_mc.checkpoint import directory
from rlhf_mc.config.errors import UserError
from rlhf_mc.run_directory import ownership

INPUTS = ("train.parquet", "model_hf", "my_notes.txt", "run.lock")
MORE = ("train_generations", "histograms.jsonl", "report.html", "profile")
OUTPUTS = (
    "metrics.jsonl",
    "tensorboard",
    "generations",
    "training.png",
    "hf",
    "export",
    "global_step_2",
    *MORE,
)


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def write_run(root: Path, run_id: str | None = "first") -> None:
    """Write the files of a run that ended after step 3, and the inputs next to them."""
    root.mkdir(exist_ok=True)
    for name in INPUTS:
        (root / name).write_text(name)
    for name in (
        "tensorboard",
        "generations",
        "train_generations",
        "profile",
        "hf",
        "export/global_step_1",
    ):
        (root / name).mkdir(parents=True)
        (root / name / "file").write_text(f"{run_id} {name}")
    (root / "nonfinite_step_3.json").write_text("[]")
    (root / "training.png").write_bytes(b"png")
    (root / "report.html").write_text("report")
    (root / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": n, "run_id": run_id}) + "\n" for n in (1, 2, 3))
    )
    (root / "histograms.jsonl").write_text('{"step": 1}\n{"step": 3}\n')
    path = directory.begin(root, 2)
    files = {"a": directory.write_bytes(path / "a", b"a" * 100)}
    directory.commit(root, 2, files, run_id or "first")
    if run_id is not None:
        ownership.claim(root, run_id, 0, None)


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_files_of_an_earlier_run_are_moved_away(tmp_path: Path) -> None:
    write_run(tmp_path)
    before = {name: sorted((tmp_path / name).rglob("*")) for name in OUTPUTS}
    moved = ownership.move_away(tmp_path, [("data.train_files", tmp_path / "train.parquet")])
    assert moved == tmp_path / "earlier_runs" / "first"
    assert names(tmp_path) == {*INPUTS, "earlier_runs"}
    assert names(moved) == {*OUTPUTS, "nonfinite_step_3.json", "run.json"}
    for name, paths in before.items():
        assert sorted((moved / name).rglob("*")) == [
            moved / path.relative_to(tmp_path) for path in paths
        ]
    directory.verify(moved / "global_step_2")
    ownership.claim(tmp_path, "second", 0, None)
    assert ownership.owner(tmp_path) == "second" and ownership.owner(moved) == "first"


def test_without_an_earlier_run_nothing_is_moved(tmp_path: Path) -> None:
    for name in INPUTS:
        (tmp_path / name).write_text(name)
    assert ownership.move_away(tmp_path, []) is None
    assert names(tmp_path) == set(INPUTS)


def test_run_moved_back_by_hand_is_unchanged(tmp_path: Path) -> None:
    write_run(tmp_path)
    run = (tmp_path / "run.json").read_bytes()
    moved = ownership.move_away(tmp_path, [])
    assert moved is not None
    for path in moved.iterdir():
        path.rename(tmp_path / path.name)
    assert ownership.finish_moving(tmp_path) is None
    assert (tmp_path / "run.json").read_bytes() == run
    assert directory.steps_with_checkpoint(tmp_path) == [2]


@pytest.mark.parametrize("after", range(15))
def test_interrupted_move_is_finished_by_the_next_start(
    tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt the move after any file operation: the runs' files never mix, and no moved
    checkpoint is resumed."""
    write_run(tmp_path)
    outputs = names(tmp_path) - set(INPUTS)
    calls = 0

    def counted(original: object) -> object:
        def call(*args: object) -> object:
            nonlocal calls
            calls += 1
            if calls > after:
                raise KeyboardInterrupt
            return original(*args)  # type: ignore[operator]

        return call

    for name in ("rename", "replace", "unlink"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    try:
        ownership.move_away(tmp_path, [])
    except KeyboardInterrupt:
        monkeypatch.undo()
        if ownership.finish_moving(tmp_path) is None:  # the move had not begun, or was complete
            assert (outputs - {"run.json"} <= names(tmp_path)) == (
                ownership.move_away(tmp_path, []) is not None
            )
    monkeypatch.undo()
    assert names(tmp_path) - {"run.json.tmp"} == {*INPUTS, "earlier_runs"}
    assert names(tmp_path / "earlier_runs" / "first") - {"run.json.tmp"} == outputs


def test_run_without_an_id_is_named_by_its_checkpoint(tmp_path: Path) -> None:
    write_run(tmp_path / "lost", "third")
    (tmp_path / "lost" / "run.json").write_text('{"run_id": "../../elsewhere"}')
    moved = ownership.move_away(tmp_path / "lost", [])
    assert moved == tmp_path / "lost" / "earlier_runs" / "third"


def test_corrupt_checkpoint_of_a_run_without_an_id_is_moved(tmp_path: Path) -> None:
    write_run(tmp_path, None)
    (tmp_path / "global_step_2" / "manifest.json").write_text("{")
    moved = ownership.move_away(tmp_path, [])
    assert moved is not None and "global_step_2" in names(moved)


def test_files_of_another_program_are_not_moved(tmp_path: Path) -> None:
    for name in ("hf", "wandb", "metrics.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(
        UserError,
        match=r"metrics.jsonl, wandb, hf are of no run of rlhf_mc \(run.json is missing\)",
    ):
        ownership.move_away(tmp_path, [])
    assert names(tmp_path) == {"hf", "wandb", "metrics.jsonl"}


@pytest.mark.parametrize(
    ("job", "restarts", "expected"),
    [("7", "1", True), ("7", "0", False), ("8", "1", False), ("", "0", False)],
    ids=["requeued", "twice in one job", "another job", "no job"],
)
@pytest.mark.parametrize("begun_by", ["7", ""], ids=["begun by a job", "begun by none"])
def test_requeued_job_recognises_its_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    begun_by: str,
    job: str,
    restarts: str,
    expected: bool,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", begun_by)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    ownership.claim(tmp_path, "first", 0, None)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    assert ownership.is_of_requeued_job(tmp_path) == (expected and bool(begun_by))
    (tmp_path / "run.json").unlink()
    assert not ownership.is_of_requeued_job(tmp_path)


def test_input_that_would_be_moved_is_rejected(tmp_path: Path) -> None:
    write_run(tmp_path)
    before = names(tmp_path)
    reads = [
        ("data.train_files", tmp_path / "train.parquet"),
        ("model.path", tmp_path / "hf" / "file"),
    ]
    with pytest.raises(
        UserError, match=r"^model\.path: .* of the earlier run first .*another trainer"
    ):
        ownership.move_away(tmp_path, reads)
    assert names(tmp_path) == before


def test_outputs_later_than_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    write_run(tmp_path)
    for number in (2, 3):
        (tmp_path / "generations" / f"{number}.jsonl").write_text("sample")
        (tmp_path / "train_generations" / f"{number}.jsonl").write_text("sample")
        (tmp_path / "export" / f"global_step_{number}").mkdir()
        (tmp_path / "export" / f"global_step_{number}" / "run.json").write_text(
            json.dumps({"step": number})
        )
    (tmp_path / "hf" / "run.json").write_text(json.dumps({"step": 3}))
    (tmp_path / "observations").mkdir()
    for name in (
        "step_000001_0.jsonl",
        "step_000002_1.jsonl",
        "step_000003_0.jsonl",
        "step_other_0.jsonl",
    ):
        (tmp_path / "observations" / name).touch()
    lines = ownership.drop_later(tmp_path, 2)
    assert len(lines) == 2 and all("is of step 3, later than 2" in line for line in lines)
    assert names(tmp_path / "generations") == {"file", "2.jsonl"}
    assert names(tmp_path / "train_generations") == {"file", "2.jsonl"}
    assert (tmp_path / "histograms.jsonl").read_text() == '{"step": 1}\n'
    assert names(tmp_path / "export") == {
        "global_step_1",
        "global_step_2",
        "global_step_3.quarantined1",
    }
    assert "hf" not in names(tmp_path) and "hf.quarantined1" in names(tmp_path)
    assert ownership.drop_later(tmp_path, 2) == []
    assert len(names(tmp_path / "observations")) == 4, "a resumed run repeats these steps"
    ownership.drop_observations(tmp_path, 3, math.inf)
    ownership.drop_observations(tmp_path, 0, 1)
    assert names(tmp_path / "observations") == {"step_000002_1.jsonl", "step_other_0.jsonl"}


# ---------------------------------------------------------------- names


def test_directory_not_named_by_its_step_does_not_count(tmp_path: Path) -> None:
    for name in ("global_step_99", "global_step_007"):
        write_run(tmp_path / name)
        (tmp_path / name / "global_step_2").rename(tmp_path / f"{name}.tmp")
    write_run(tmp_path)
    for name in ("global_step_99", "global_step_007"):
        os.rename(tmp_path / name, tmp_path / f"of {name}")
        os.rename(tmp_path / f"{name}.tmp", tmp_path / name)
    (tmp_path / "global_step_5").mkdir()
    assert directory.steps_with_checkpoint(tmp_path) == [2]
    lines = directory.ignored(tmp_path)
    assert [line.partition("global_step_")[2].partition(";")[0] for line in lines] == [
        "007 is a checkpoint of step 2",
        "5 has no manifest.json",
        "99 is a checkpoint of step 2",
    ]
