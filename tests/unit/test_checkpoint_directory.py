"""Training checkpoints as directories: what counts, what is found damaged, what is kept, and who may write."""

from __future__ import annotations

import errno
import gc
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from rlhf_mc.checkpoint import directory, writer
from rlhf_mc.checkpoint.blocks import Block
from rlhf_mc.checkpoint.unpickling import check_metadata
from rlhf_mc.config.errors import UserError
from rlhf_mc.runtime import run_lock


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def written(root: Path, step: int) -> Path:
    """A complete checkpoint of two files."""
    path = directory.begin(root, step)
    files = {name: directory.write_bytes(path / name, name.encode() * 1000) for name in ("a", "b")}
    directory.commit(root, step, files)
    return directory.final_path(root, step)


def test_only_what_is_committed_counts(tmp_path: Path) -> None:
    written(tmp_path, 2)
    written(tmp_path, 10)
    directory.begin(tmp_path, 11)
    (tmp_path / "global_step_12").mkdir()
    assert directory.steps_with_checkpoint(tmp_path) == [2, 10]
    directory.verify(tmp_path / "global_step_10")
    directory.remove_leftovers(tmp_path)
    assert not directory.staging_path(tmp_path, 11).exists()


@pytest.mark.parametrize("harm", ["cut", "edited", "missing", "manifest cut", "manifest edited", "manifest elsewhere"])
def test_damage_is_found(tmp_path: Path, harm: str) -> None:
    path = written(tmp_path, 1)
    manifest = json.loads((path / directory.MANIFEST).read_text())
    if harm == "cut":
        os.truncate(path / "b", 500)
    elif harm == "edited":
        (path / "b").write_bytes(b"b" * 999 + b"c")
    elif harm == "missing":
        (path / "b").unlink()
    elif harm == "manifest cut":
        os.truncate(path / directory.MANIFEST, 40)
    elif harm == "manifest edited":
        manifest["files"]["b"]["bytes"] = 5
        (path / directory.MANIFEST).write_text(json.dumps(manifest))
    else:
        body = {"format": 1, "step": 1, "run_id": None, "files": {"../a": manifest["files"]["a"]}}
        (path / directory.MANIFEST).write_text(json.dumps({**body, "sha256": directory._sum_of(body)}))
    with pytest.raises(
        directory.CorruptCheckpoint, match="b" if not harm.startswith("manifest") else directory.MANIFEST
    ):
        directory.verify(path)


def test_a_file_that_cannot_be_read_for_a_moment_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, 1)
    refused = []
    summed = directory.summed

    def once(file: Path) -> directory.File:
        if len(refused) < limit:
            refused.append(file)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return summed(file)

    monkeypatch.setattr(directory, "summed", once)
    monkeypatch.setattr(directory, "_AGAIN_SECONDS", 0.01)
    limit = 1
    directory.verify(path)
    assert refused
    limit = 3
    with pytest.raises(directory.CorruptCheckpoint, match="cannot be read"):
        directory.verify(path)


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path, 1)
    manifest = json.loads((path / directory.MANIFEST).read_text())
    (path / directory.MANIFEST).write_text(json.dumps({**manifest, "format": 2}))
    with pytest.raises(UserError, match=r"newer version of the program \(format 2; this one reads up to 1\)") as error:
        directory.verify(path)
    assert not isinstance(error.value, directory.CorruptCheckpoint)


@pytest.mark.parametrize(
    ("file", "words"), [("metadata.json", "dist_checkpointing_path"), ("config.json", "model.path"), ("x", "manifest")]
)
def test_a_foreign_directory_is_refused(tmp_path: Path, file: str, words: str) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(UserError, match=words):
        directory.verify(tmp_path)


def test_files_that_another_node_wrote_elsewhere(tmp_path: Path) -> None:
    path = directory.begin(tmp_path, 1)
    file = directory.write_bytes(path / "a", b"a")
    with pytest.raises(UserError, match="one directory that all nodes share"):
        directory.commit(tmp_path, 1, {"a": file, "__1_0.distcp": file})
    assert directory.steps_with_checkpoint(tmp_path) == []


def test_what_is_kept() -> None:
    steps = [2, 4, 6, 8]
    assert directory.to_remove(steps, None, None) == []
    assert directory.to_remove(steps, 2, None) == [2, 4]
    assert directory.to_remove(steps, 1, 4) == [2, 6]
    assert directory.to_remove(steps, 9, 2) == []


def test_a_checkpoint_that_is_set_aside_does_not_count(tmp_path: Path) -> None:
    for _ in range(2):
        written(tmp_path, 3)
        directory.quarantine_step(tmp_path, 3)
    assert directory.steps_with_checkpoint(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 2


# ---------------------------------------------------------------- pickles


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


@pytest.mark.parametrize("what", ["evil", "cut", "text"])
def test_nothing_in_a_file_is_executed(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = pickle.dumps(Metadata(state_dict_metadata={"a": torch.Size([1])}))
    (tmp_path / "m").write_bytes(whole)
    check_metadata(tmp_path / "m")
    content = {"evil": pickle.dumps(Metadata(state_dict_metadata={"a": Evil()})), "cut": whole[:-9], "text": b"hello"}
    (tmp_path / "m").write_bytes(content[what])
    with pytest.raises(UserError, match="not the description of a checkpoint's tensors"):
        check_metadata(tmp_path / "m")
    assert not (tmp_path / "executed").exists()


# ---------------------------------------------------------------- tensors


class OnDevice(torch.Tensor):
    """What a GPU's tensor is to the writer: not in the host's memory until it is asked for."""

    is_cpu = False
    collector_was_on: ClassVar[list[bool]] = []

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.collector_was_on.append(gc.isenabled())
        return self.as_subclass(torch.Tensor)


def blocks_over(data: torch.Tensor) -> list[Block]:
    """A tensor of twelve elements in two rows, as two blocks."""
    return [Block("a", (2, 6), ((row, row + 1), (0, 6)), data[row : row + 1], True) for row in range(2)]


def test_tensors_of_a_gpu_are_written_without_buffers(tmp_path: Path) -> None:
    data = torch.arange(12.0).view(2, 6)
    OnDevice.collector_was_on.clear()
    writing = writer.Writing(blocks_over(data.as_subclass(OnDevice)), tmp_path, None)
    files = writing.finish()
    assert files["__0_0.distcp"].num_bytes >= data.nbytes
    assert OnDevice.collector_was_on == [True, True]
    back = torch.zeros(2, 6)
    writer.read_tensors(blocks_over(back), tmp_path)
    assert (back == data).all()


def test_all_that_is_written_is_on_the_disk_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[str, int] = {}
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced[Path(os.readlink(f"/proc/self/fd/{descriptor}")).name] = os.fstat(descriptor).st_size
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    files = writer.Writing(blocks_over(torch.ones(2, 6)), tmp_path, None).finish()
    assert len(files) == 4
    assert synced.items() >= {name: file.num_bytes for name, file in files.items()}.items()


def test_ranks_ask_again_while_one_still_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk slower than the collectives' time-out must not keep the others in one of them."""
    asked = []
    write = writer._write_bucket

    def slowly(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.5)
        write(*args, **kwargs)

    def counted(value: Any) -> list[Any]:
        asked.append(value)
        return [value]

    monkeypatch.setattr(writer, "_write_bucket", slowly)
    monkeypatch.setattr(writer, "_ASK_SECONDS", 0.05)
    writing = writer.Writing(blocks_over(torch.ones(2, 6)), tmp_path, writer.HostBuffers())
    monkeypatch.setattr(writer, "gather_objects", counted)
    writing.wait()
    assert asked.count(False) >= 3 and asked[-1] is True and writing.is_done()


# ---------------------------------------------------------------- the lock


def owner(**changes: Any) -> run_lock.Owner:
    mine = run_lock.Owner.this_process()
    return run_lock.Owner(**{**vars(mine), **changes})


def left_by(root: Path, other: run_lock.Owner, seconds_ago: float = 0.0) -> None:
    (root / run_lock.NAME).write_text(json.dumps(vars(other)))
    then = time.time() - seconds_ago
    os.utime(root / run_lock.NAME, (then, then))


def test_the_lock_of_a_living_process_is_respected(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        other = owner(pid=child.pid, started=run_lock._start_of(child.pid), job="77")
        left_by(tmp_path, other, seconds_ago=1000)  # stopped for long, but there
        with pytest.raises(UserError, match=f"belongs to another run: process {child.pid} on {other.host}, job 77"):
            run_lock.Lock(tmp_path).take()
    finally:
        child.kill()
        child.wait()
    mine = run_lock.Lock(tmp_path)
    mine.take()
    mine.check_still_ours()
    mine.release()
    assert list(tmp_path.iterdir()) == []


def test_a_number_of_a_process_that_is_used_again(tmp_path: Path) -> None:
    left_by(tmp_path, owner(started="1"))
    run_lock.Lock(tmp_path).take()


def test_on_another_machine_signs_of_life_count(tmp_path: Path) -> None:
    left_by(tmp_path, owner(host="elsewhere"), seconds_ago=20)
    with pytest.raises(UserError, match=r"elsewhere.*sign of life 20 s ago"):
        run_lock.Lock(tmp_path).take()
    left_by(tmp_path, owner(host="elsewhere"), seconds_ago=run_lock.STALE_SECONDS + 1)
    run_lock.Lock(tmp_path).take()


def test_numbers_of_processes_of_another_container_say_nothing(tmp_path: Path) -> None:
    left_by(tmp_path, owner(numbered_by="another boot pid:[1]", started="1"))
    with pytest.raises(UserError, match="sign of life"):
        run_lock.Lock(tmp_path).take()


@pytest.mark.parametrize("lives", [True, False])
def test_an_owner_that_cannot_be_asked_is_watched(
    tmp_path: Path, lives: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if lives and len(waits) == 2:
            left_by(tmp_path, owner(host="elsewhere"))

    left_by(tmp_path, owner(host="elsewhere"), seconds_ago=20)
    monkeypatch.setattr(run_lock.Lock, "_age", lambda self: 20.0 + 15 * len(waits))
    monkeypatch.setattr(time, "sleep", sleep)
    if lives:
        with pytest.raises(UserError, match="belongs to another run"):
            run_lock.check_free(tmp_path)
    else:
        run_lock.check_free(tmp_path)
        run_lock.Lock(tmp_path).take()
    assert len(waits) == (2 if lives else 3)
    assert capfd.readouterr().err.count("waiting for a sign of life") == 1


def test_the_clock_is_the_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_by(tmp_path, owner(host="elsewhere"), seconds_ago=20)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    with pytest.raises(UserError, match=r"sign of life 20 s ago"):
        run_lock.Lock(tmp_path).take()
    assert [path.name for path in tmp_path.iterdir()] == [run_lock.NAME]


def test_a_requeued_job_takes_over_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_by(tmp_path, owner(host="elsewhere", job="5", restarts=0))
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    with pytest.raises(UserError, match="job 5"):  # another step of the same start of the job
        run_lock.Lock(tmp_path).take()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run_lock.Lock(tmp_path).take()


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run_lock.check_free(tmp_path / "file" / "run")
    with pytest.raises(
        UserError, match=r"trainer.default_local_dir: .*run\.lock cannot be written \(Not a directory\)"
    ):
        run_lock.Lock(tmp_path / "file" / "run").take()


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    mine = run_lock.Lock(tmp_path)
    mine.take()
    mine.check_still_ours()
    with pytest.raises(FileExistsError):
        mine._put(tmp_path / run_lock.NAME)


def test_a_lock_that_is_gone_or_not_seen_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = run_lock.Lock(tmp_path)
    mine.take()
    (tmp_path / run_lock.NAME).unlink()
    mine.check_still_ours()
    assert (tmp_path / run_lock.NAME).exists()
    answers = [OSError(errno.ESTALE, "stale"), mine._owner]
    monkeypatch.setattr(mine, "_read", mock.Mock(side_effect=answers))
    monkeypatch.setattr(run_lock, "_LOOK_SECONDS", 0.01)
    mine.check_still_ours()
    monkeypatch.setattr(mine, "_read", mock.Mock(side_effect=answers[:1] * 9))
    with pytest.raises(OSError, match="stale"):
        mine.check_still_ours()


def test_a_run_whose_directory_was_taken_over_notices(tmp_path: Path) -> None:
    mine = run_lock.Lock(tmp_path)
    mine.take()
    left_by(tmp_path, owner(host="elsewhere", pid=7))
    with pytest.raises(UserError, match="taken over by process 7 on elsewhere"):
        mine.check_still_ours()
    mine.release()
    assert (tmp_path / run_lock.NAME).exists()  # it is theirs
