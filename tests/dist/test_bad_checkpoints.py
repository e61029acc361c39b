"""Training checkpoints that are corrupt, of another kind or model, or cannot be written: one clear
line each, and complete checkpoints stay."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import resume_cases
from tiny import make_workspace, write_config

from rlhf_mc.checkpoint import directory
from rlhf_mc.run_files import steps_logged


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = make_workspace(tmp_path_factory.mktemp("bad"), num_hidden_layers=1)
    return write_config(
        workspace, trainer={"total_training_steps": 3, "save_freq": 1, "val_before_train": False}
    )


@pytest.fixture(scope="module")
def good(pool: Any, config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run with checkpoints of steps 1, 2 and 3."""
    root = tmp_path_factory.mktemp("good")
    overrides = [f"trainer.default_local_dir={root}"]
    pool(1).run(resume_cases.train, config_path=str(config), overrides=overrides, record_at=0)
    assert directory.steps_with_checkpoint(root) == [1, 2, 3]
    return root


def truncate(path: Path) -> None:
    file = path / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 100)


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "__0_0.distcp").write_bytes(data)


def swap(path: Path) -> None:
    """Exchange the names of the checkpoint and the one before it."""
    other = path.with_name("global_step_2")
    path.rename(path.with_name("moved"))
    other.rename(path)
    path.with_name("moved").rename(other)


def rename_all(path: Path) -> None:
    """Name each checkpoint of the run by another one's step."""
    swap(path)
    (path.parent / "global_step_1").rename(path.parent / "global_step_4")


def edit_state(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Return a change of state.json that keeps the checkpoint intact."""

    def rewrite(path: Path) -> None:
        state = json.loads((path / "state.json").read_text())
        change(state)
        replace_file(path, 3, "state.json", json.dumps(state))

    return rewrite


def replace_file(path: Path, step: int, name: str, text: str) -> None:
    """Replace one file of the checkpoint and its checksum, so that the checkpoint stays intact."""
    manifest = directory.read_manifest(path)
    files = manifest.files
    path.rename(directory.staging_path(path.parent, step))
    files[name] = directory.write_bytes(
        directory.staging_path(path.parent, step) / name, text.encode()
    )
    directory.commit(path.parent, step, files, manifest.run_id)


def set_start(start: Path, config_of_step_3: bytes | None) -> Callable[[Path], None]:
    """Return a change to checkpoints of a run that began at `start`; the newest one's settings are
    unreadable, or missing if None.
    """

    def rewrite(path: Path) -> None:
        sizes = "data: {train_batch_size: 8, gen_batch_size: null}"
        settings = f"{sizes}\ntrainer: {{resume_from_path: {start}}}"
        replace_file(path.with_name("global_step_2"), 2, "config.yaml", settings)
        (path / "config.yaml").unlink()
        if config_of_step_3 is not None:
            (path / "config.yaml").write_bytes(config_of_step_3)

    return rewrite


def set_vocabulary(state: dict[str, Any]) -> None:
    state["models"]["actor"]["shape"]["vocab_size"] += 7


def set_dtype(state: dict[str, Any]) -> None:
    state["models"]["critic"]["dtype"] = "bfloat16"


def remove_critic(state: dict[str, Any]) -> None:
    del state["models"]["critic"]


def change_prompts(state: dict[str, Any]) -> None:
    state["inputs"]["data.train_files"]["file 1"]["sha256"] = "0" * 64


def change_reward(state: dict[str, Any]) -> None:
    state["inputs"]["custom_reward_function.path"]["file"]["bytes"] += 1


def remove_file(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def make_directory(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    return change


def randomise(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes(
        random.Random(name).randbytes((path / name).stat().st_size)
    )


def halve(name: str) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size // 2)


def flip_one_bit(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 1
        (path / name).write_bytes(data)

    return change


FILES = (".metadata", "metadata.json", "common.pt", "state.json", "config.yaml", "__0_0.distcp")
CORRUPTIONS = (remove_file, make_directory, randomise, halve, flip_one_bit)


def rewrite(name: str, text: str) -> Callable[[Path], None]:
    """Return a change of a file to content that no run writes, with a matching manifest."""
    return lambda path: replace_file(path, 3, name, text)


def copy_as(name: str) -> Callable[[Path], None]:
    """Return a change that copies step 2 under another name."""
    return lambda path: (
        shutil.copytree(path.with_name("global_step_2"), path.with_name(name)) and None
    )


def set_owner(run_id: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.with_name("run.json").write_text(json.dumps({"run_id": run_id}))

    return change


def set_job(number: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        about = json.loads(path.with_name("run.json").read_text())
        path.with_name("run.json").write_text(
            json.dumps({**about, "slurm_job": str(number), "slurm_restarts": 0})
        )

    return change


def convert_to_another_version(path: Path) -> None:
    manifest = json.loads((path / directory.MANIFEST).read_text())
    (path / directory.MANIFEST).write_text(json.dumps({**manifest, "format": 9}))


def changed_copy(
    good: Path, root: Path, change: Callable[[Path], None], steps: tuple[int, ...] = (3,)
) -> Path:
    shutil.copytree(good, root)
    for step in steps:
        change(root / f"global_step_{step}")
    return root


def test_resume_from_corrupt_or_unsuitable_checkpoints(
    pool: Any, config: Path, good: Path, tmp_path: Path
) -> None:
    """Make all attempts to resume with one build of the models."""
    attempts: list[tuple[list[str], str]] = []

    def auto(
        name: str, change: Callable[[Path], None], outcome: str, steps: tuple[int, ...] = (3,)
    ) -> None:
        root = changed_copy(good, tmp_path / name, change, steps)
        attempts.append(([f"default_local_dir={root}"], outcome))

    def named(name: str, path: Path, outcome: str) -> None:
        here = f"default_local_dir={tmp_path / name}"
        attempts.append(([here, "resume_mode=resume_path", f"resume_from_path={path}"], outcome))

    auto("truncated", truncate, "step 2")
    auto("flipped", flip_a_bit, "step 2")
    auto("two truncated", truncate, "step 1", (2, 3))
    auto("all truncated", truncate, "none of the 3 training checkpoints is intact", (1, 2, 3))
    auto("vocabulary", edit_state(set_vocabulary), "the actor's vocab_size is")
    auto(
        "type",
        edit_state(set_dtype),
        "the critic was trained in bfloat16; set its megatron.dtype to that",
    )
    auto("one model", edit_state(remove_critic), "holds no critic; it is a checkpoint of actor")
    auto(
        "prompts",
        edit_state(change_prompts),
        "data.train_files has changed since the checkpoint: file 1 (",
    )
    changed_copy(good, tmp_path / "allowed", edit_state(change_prompts))
    attempts.append(
        ([f"default_local_dir={tmp_path / 'allowed'}", "resume_changed_inputs=allow"], "step 3")
    )
    auto("reward", edit_state(change_reward), "step 3")
    for file, change in (
        *(("manifest.json", change) for change in CORRUPTIONS),
        *((file, flip_one_bit) for file in FILES),
    ):
        auto(f"{file} {change.__name__}", change(file), "step 2")
    for file, text in itertools.product(
        ("state.json", "config.yaml"), ("{}", "[1, 2]", "[" * 100_000, '{"loop": 1}')
    ):
        # valid, without settings
        if (file, text[:2]) not in (("config.yaml", "{}"), ("config.yaml", '{"')):
            auto(f"{file} rewritten {text[:2]}", rewrite(file, text), "step 2")
    auto("copy 99", copy_as("global_step_99"), "step 3")
    auto("copy 007", copy_as("global_step_007"), "step 3")
    auto(
        "swapped",
        swap,
        "is a checkpoint of step 3, and no later one is named by its step; rename it to "
        "global_step_3",
    )
    auto(
        "all renamed",
        rename_all,
        "is a checkpoint of step 3, and no later one is named by its step; rename it to",
    )
    auto(
        "of another run",
        set_owner("another"),
        "its run.json says run another, its newest checkpoint is of run ",
    )
    auto("no jsonl", truncate, "step 2")
    attempts[-1][0].append("logger=tensorboard")
    for job, outcome in ((7, "step 3"), (8, "step 0")):
        root = changed_copy(good, tmp_path / f"begun by job {job}", set_job(job))
        requeued = ["resume_mode=disable", "SLURM_JOB_ID=7", "SLURM_RESTART_COUNT=1"]
        attempts.append(([f"default_local_dir={root}", *requeued], outcome))
    auto(
        "another version",
        convert_to_another_version,
        "written by another version of the program (format 9, not 3)",
    )
    named("named", changed_copy(good, tmp_path / "n", truncate) / "global_step_3", "corrupt")
    named(
        "Hugging Face checkpoint",
        config.parent / "model",
        "Hugging Face checkpoints are given as model.path",
    )
    named("nowhere", tmp_path / "nothing", "no such directory")
    earlier = ("metrics.jsonl", "nonfinite_step_9.json", "run.json")
    (tmp_path / "fine").mkdir()
    for name in earlier:
        (tmp_path / "fine" / name).write_text("{}")
    named("fine", good / "global_step_2", "step 2")
    start = good / "global_step_1"
    for name, content in {
        "requeued": None,
        "binary": b"\xff\xfe",
        "not a mapping": b"hello",
    }.items():
        changed_copy(good, tmp_path / name, set_start(start, content))
        named(name, start, "step 2")
    samples = tmp_path / "run" / "nonfinite_step_1.json"
    samples.parent.mkdir()
    samples.write_text("[]")
    (tmp_path / "run" / "run.json").write_text("{}")
    attempts.append(
        ([f"default_local_dir={tmp_path / 'killed before its first checkpoint'}"], "step 0")
    )
    attempts.append(
        (
            [
                f"default_local_dir={changed_copy(good, tmp_path / 'anew', truncate)}",
                "resume_mode=disable",
            ],
            "step 0",
        )
    )
    # The same directory: the later steps are of a run that resumed from step 1 before.
    branched = changed_copy(good, tmp_path / "branched", lambda path: None)
    point = f"resume_from_path={branched / 'global_step_1'}"
    attempts.append(([f"default_local_dir={branched}", "resume_mode=resume_path", point], "step 1"))

    outcomes = pool(1).run(
        resume_cases.resume_attempts,
        config_path=str(config),
        root=str(tmp_path / "run"),
        attempts=[attempt for attempt, _ in attempts],
    )[0]
    for (attempt, outcome), text in zip(attempts, outcomes, strict=True):
        assert outcome in text and "\n" not in text, f"{attempt}: {text}"
    assert (tmp_path / "copy 99" / "global_step_99").is_dir() and (
        tmp_path / "copy 007" / "global_step_007"
    ).is_dir()
    assert not any(
        (tmp_path / name / "earlier_runs").exists() for name in ("swapped", "all renamed")
    )
    assert steps_logged(tmp_path / "no jsonl" / "metrics.jsonl") == [1, 2]
    assert json.loads((tmp_path / "begun by job 8" / "run.json").read_text())["slurm_job"] == "7"
    assert sorted(p.name for p in (tmp_path / "two truncated").glob("global*")) == [
        "global_step_1",
        "global_step_2.quarantined1",
        "global_step_3.quarantined1",
    ]
    assert directory.steps_with_checkpoint(branched) == [1]
    assert not samples.exists()
    (moved,) = (tmp_path / "fine" / "earlier_runs").iterdir()
    assert {path.name for path in moved.iterdir()} == {*earlier}
    (moved,) = (tmp_path / "anew" / "earlier_runs").iterdir()
    assert sorted(path.name for path in (tmp_path / "anew").iterdir()) == [
        "earlier_runs",
        "run.json",
    ]
    assert {path.name for path in moved.iterdir()} == {path.name for path in good.iterdir()}
    assert not list(tmp_path.glob("*/run.lock"))


def test_checkpoint_unreadable_on_one_rank_is_skipped_on_all(
    pool: Any, config: Path, good: Path, tmp_path: Path
) -> None:
    names = ("state.json", "config.yaml")
    roots = {name: str(changed_copy(good, tmp_path / name, lambda path: None)) for name in names}
    steps = pool(2).run(
        resume_cases.resume_with_read_error_on_rank_1, config_path=str(config), roots=roots
    )
    assert steps == [[2, 2], [2, 2]]


def test_second_run_in_a_directory_moves_the_first_away(
    pool: Any, config: Path, tmp_path: Path
) -> None:
    """Run the same command twice, without training checkpoints: two runs, each with all of its
    files."""
    overrides = [
        f"trainer.default_local_dir={tmp_path}",
        "trainer.save_freq=-1",
        "trainer.total_training_steps=1",
    ]
    for _ in range(2):
        pool(1).run(resume_cases.train, config_path=str(config), overrides=overrides, record_at=0)
    (first,) = (tmp_path / "earlier_runs").iterdir()
    files = {
        "metrics.jsonl",
        "tensorboard",
        "generations",
        "hf",
        "run.json",
        "success.json",
    }
    files |= {
        "resolved_config.yaml",
        "starts.jsonl",
        "histograms.jsonl",
        "health.jsonl",
        "train_generations",
    }
    files |= {"report.html"}
    assert {path.name for path in first.iterdir()} == files
    assert {path.name for path in tmp_path.iterdir()} == {*files, "earlier_runs"}
    ids = []
    for run in (first, tmp_path):
        (row,) = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
        names = [
            row["run_id"],
            *(json.loads((run / at / "run.json").read_text())["run_id"] for at in (".", "hf")),
        ]
        assert len(set(names)) == 1
        ids.append(names[0])
    assert ids[0] == first.name != ids[1]


@pytest.mark.parametrize(
    ("is_async", "start"),
    [
        (False, "{root}/global_step_2.tmp: cannot be written: File too large"),
        (
            True,
            "trainer.default_local_dir: cannot write {root}/metrics.jsonl: No space left on device",
        ),
    ],
)
def test_disk_that_is_full_during_training(
    pool: Any, config: Path, tmp_path: Path, is_async: bool, start: str
) -> None:
    """Begin the error with what could not be written first, and keep no file of the unfinished
    checkpoint."""
    arguments = {"config_path": str(config), "root": str(tmp_path), "is_async": is_async}
    for message, left in pool(2).run(resume_cases.train_on_a_full_disk, **arguments):
        assert message.startswith(start.format(root=tmp_path)) and "\n" not in message, message
        assert message.endswith(
            f"the checkpoint of step 1 is complete and untouched: {tmp_path / 'global_step_1'}"
        )
        assert "global_step_1" in left and not [
            name for name in left if name.startswith("global_step_2")
        ]


def test_full_disk_keeps_the_complete_checkpoint(pool: Any, config: Path, tmp_path: Path) -> None:
    *full, undeletable = pool(1).run(
        resume_cases.save_on_a_full_disk,
        config_path=str(config),
        root=str(tmp_path / "run"),
        limit=1 << 20,
    )[0]
    assert len(full) == 2
    for text in full:
        assert "cannot be written: File too large" in text and "\n" not in text
        assert (
            "the checkpoint of step 1 is complete and untouched: "
            f"{tmp_path / 'run' / 'global_step_1'}"
        ) in text
    assert (
        "warning: an old checkpoint cannot be deleted" in undeletable
        and "Permission denied (old)" in undeletable
    )
    assert directory.steps_with_checkpoint(tmp_path / "run") == [1, 4]
    directory.read_manifest(tmp_path / "run" / "global_step_1")
    assert not list((tmp_path / "run").glob("*.tmp"))
