"""Directories of training checkpoints: commit, corruption, retention, quarantine, and the run
lock."""

from __future__ import annotations

import errno
import gc
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from rlhf_mc.checkpoint import directory, training_tensors
from rlhf_mc.checkpoint.dcp_metadata import read_metadata
from rlhf_mc.checkpoint.training_blocks import Block
from rlhf_mc.config.errors import UserError
from rlhf_mc.run_directory import lock
from rlhf_mc.run_files import LOCK_FILE, STALE_SECONDS


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def write_checkpoint(root: Path, step: int) -> Path:
    """Write a complete checkpoint of two files. Return its directory."""
    path = directory.begin(root, step)
    files = {name: directory.write_bytes(path / name, name.encode() * 1000) for name in ("a", "b")}
    directory.commit(root, step, files, "first")
    return directory.final_path(root, step)


def test_only_committed_checkpoints_count(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 2)
    write_checkpoint(tmp_path, 10)
    directory.begin(tmp_path, 11)
    (tmp_path / "global_step_12").mkdir()
    assert directory.steps_with_checkpoint(tmp_path) == [2, 10]
    directory.verify(tmp_path / "global_step_10")
    directory.remove_leftovers(tmp_path)
    assert not directory.staging_path(tmp_path, 11).exists()


@pytest.mark.parametrize(
    "change",
    [
        "truncated",
        "edited",
        "missing",
        "manifest truncated",
        "manifest edited",
        "manifest of other paths",
    ],
)
def test_corruption_is_detected(tmp_path: Path, change: str) -> None:
    path = write_checkpoint(tmp_path, 1)
    manifest = json.loads((path / directory.MANIFEST).read_text())
    if change == "truncated":
        os.truncate(path / "b", 500)
    elif change == "edited":
        (path / "b").write_bytes(b"b" * 999 + b"c")
    elif change == "missing":
        (path / "b").unlink()
    elif change == "manifest truncated":
        os.truncate(path / directory.MANIFEST, 40)
    elif change == "manifest edited":
        manifest["files"]["b"]["bytes"] = 5
        (path / directory.MANIFEST).write_text(json.dumps(manifest))
    else:
        body = {
            "format": directory.FORMAT,
            "step": 1,
            "run_id": "first",
            "files": {"../a": manifest["files"]["a"]},
        }
        (path / directory.MANIFEST).write_text(
            json.dumps({**body, "sha256": directory._checksum(body)})
        )
    with pytest.raises(
        directory.CorruptCheckpoint,
        match="b" if not change.startswith("manifest") else directory.MANIFEST,
    ):
        directory.verify(path)


def test_transient_read_error_is_not_corruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(tmp_path, 1)
    failed = []
    digest_file = directory.digest_file

    def fail_first(file: Path) -> directory.FileDigest:
        if len(failed) < limit:
            failed.append(file)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return digest_file(file)

    monkeypatch.setattr(directory, "digest_file", fail_first)
    monkeypatch.setattr(directory, "_AGAIN_SECONDS", 0.01)
    limit = 1
    directory.verify(path)
    assert failed
    limit = 3
    with pytest.raises(directory.CorruptCheckpoint, match="cannot be read"):
        directory.verify(path)


def test_another_format_is_rejected(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1)
    manifest = json.loads((path / directory.MANIFEST).read_text())
    (path / directory.MANIFEST).write_text(json.dumps({**manifest, "format": 1}))
    with pytest.raises(
        UserError, match=r"another version of the program \(format 1, not 3\)"
    ) as error:
        directory.verify(path)
    assert not isinstance(error.value, directory.CorruptCheckpoint)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("metadata.json", "dist_checkpointing_path"),
        ("config.json", "model.path"),
        ("x", "manifest"),
    ],
)
def test_directory_without_training_checkpoint_is_rejected(
    tmp_path: Path, file: str, words: str
) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(UserError, match=words):
        directory.verify(tmp_path)


def test_commit_rejects_files_missing_from_the_directory(tmp_path: Path) -> None:
    path = directory.begin(tmp_path, 1)
    file = directory.write_bytes(path / "a", b"a")
    with pytest.raises(UserError, match="one directory that all nodes share"):
        directory.commit(tmp_path, 1, {"a": file, "__1_0.distcp": file}, "first")
    assert directory.steps_with_checkpoint(tmp_path) == []


def test_retention_of_checkpoints() -> None:
    steps = [2, 4, 6, 8]
    assert directory.to_remove(steps, None, {}) == []
    assert directory.to_remove(steps, 2, {}) == [2, 4]
    assert directory.to_remove(steps, 1, {None, 4}) == [2, 6]
    assert directory.to_remove(steps, 9, {2}) == []


def test_quarantined_checkpoint_does_not_count(tmp_path: Path) -> None:
    for _ in range(2):
        write_checkpoint(tmp_path, 3)
        directory.quarantine_step(tmp_path, 3)
    assert directory.steps_with_checkpoint(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 2


# ---------------------------------------------------------------- pickles


class MaliciousPickle:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


@pytest.mark.parametrize("kind", ["malicious", "truncated", "text"])
def test_reading_metadata_executes_no_code(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    intact = pickle.dumps(Metadata(state_dict_metadata={"a": torch.Size([1])}))
    (tmp_path / "m").write_bytes(intact)
    read_metadata(tmp_path / "m")
    content = {
        "malicious": pickle.dumps(Metadata(state_dict_metadata={"a": MaliciousPickle()})),
        "truncated": intact[:-9],
        "text": b"hello",
    }
    (tmp_path / "m").write_bytes(content[kind])
    with pytest.raises(UserError, match="not the metadata of a checkpoint's tensors"):
        read_metadata(tmp_path / "m")
    assert not (tmp_path / "executed").exists()


# ---------------------------------------------------------------- tensors


class OnDevice(torch.Tensor):
    """A tensor that the writer treats as a GPU's: not in host memory until cpu() is called."""

    is_cpu = False
    collector_was_on: ClassVar[list[bool]] = []

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.collector_was_on.append(gc.isenabled())
        return self.as_subclass(torch.Tensor)


def blocks_over(data: torch.Tensor) -> list[Block]:
    """Return the rows of a tensor [2, 6] as two blocks."""
    return [
        Block("a", (2, 6), ((row, row + 1), (0, 6)), data[row : row + 1], True) for row in range(2)
    ]


def test_gpu_tensors_are_written_without_buffers(tmp_path: Path) -> None:
    data = torch.arange(12.0).view(2, 6)
    OnDevice.collector_was_on.clear()
    writing = training_tensors.TensorWriter(blocks_over(data.as_subclass(OnDevice)), tmp_path, None)
    files = writing.finish()
    assert files["__0_0.distcp"].num_bytes >= data.nbytes
    assert OnDevice.collector_was_on == [True, True]
    back = torch.zeros(2, 6)
    training_tensors.read_tensors(blocks_over(back), tmp_path)
    assert (back == data).all()


@pytest.mark.parametrize("in_background", [True, False])
def test_host_memory_is_written_where_it_is(tmp_path: Path, in_background: bool) -> None:
    """Megatron-Core must clone no tensor: each is written from the buffers, or from the parameter
    itself."""
    data = torch.arange(36.0).bfloat16().view(6, 6)
    values = [data[0:2], data[2:3], data[3:6].flatten()[1:4], torch.arange(5.0)]
    blocks = [
        Block(f"t{i}", tuple(v.shape), tuple((0, n) for n in v.shape), v, True)
        for i, v in enumerate(values)
    ]
    buffers = training_tensors.HostBuffers() if in_background else None
    writing = training_tensors.TensorWriter(blocks, tmp_path, buffers)
    ((*_, (_, written)),) = writing._writer.write_buckets
    of_block = {item.index.fqn: tensor.data_ptr() for item, tensor in written}
    addresses = [of_block[block.key] for block in blocks]
    if buffers is None:
        assert addresses == [value.data_ptr() for value in values]
    else:
        assert addresses == [
            view.data_ptr() for view in buffers._arena.views([value.nbytes for value in values])
        ]
    writing.finish()
    wanted = [value.clone() for value in values]
    data.zero_()
    training_tensors.read_tensors(blocks, tmp_path)
    assert all(map(torch.equal, values, wanted))


def test_a_column_is_written_although_it_is_not_contiguous(tmp_path: Path) -> None:
    data = torch.arange(12.0).view(2, 6)
    block = Block("a", (2, 3), ((0, 2), (0, 3)), data[:, 3:], True)
    training_tensors.TensorWriter([block], tmp_path, None).finish()
    data.zero_()
    training_tensors.read_tensors([block], tmp_path)
    assert data.tolist() == [[0, 0, 0, 3, 4, 5], [0, 0, 0, 9, 10, 11]]


def test_background_save_has_the_values_of_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bucket = training_tensors.write_bucket
    has_changed = threading.Event()

    def later(*args: Any, **kwargs: Any) -> None:
        has_changed.wait()
        write_bucket(*args, **kwargs)

    monkeypatch.setattr(training_tensors, "write_bucket", later)
    data = torch.arange(12.0).view(2, 6)
    wanted = data.clone()
    writing = training_tensors.TensorWriter(
        blocks_over(data), tmp_path, training_tensors.HostBuffers()
    )
    data.fill_(torch.nan)  # an optimizer step while the files are written
    gc.collect()
    has_changed.set()
    writing.finish()
    training_tensors.read_tensors(blocks_over(data), tmp_path)
    assert torch.equal(data, wanted)


def test_every_file_is_synced_to_disk(tmp_path: Path, synced: dict[str, int]) -> None:
    files = training_tensors.TensorWriter(blocks_over(torch.ones(2, 6)), tmp_path, None).finish()
    assert len(files) == 4
    assert synced.items() >= {name: file.num_bytes for name, file in files.items()}.items()


def test_ranks_poll_while_another_rank_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Poll with short collectives, so that a disk slower than the collective timeout does not abort
    the run."""
    polls = []
    write_bucket = training_tensors.write_bucket
    was_polled = threading.Event()

    def slowly(*args: Any, **kwargs: Any) -> None:
        was_polled.wait()
        write_bucket(*args, **kwargs)

    def counted(flag: bool) -> bool:
        polls.append(flag)
        if len(polls) == 3:
            was_polled.set()
        return flag

    monkeypatch.setattr(training_tensors, "write_bucket", slowly)
    monkeypatch.setattr(training_tensors, "_ASK_SECONDS", 0.05)
    writing = training_tensors.TensorWriter(
        blocks_over(torch.ones(2, 6)), tmp_path, training_tensors.HostBuffers()
    )
    monkeypatch.setattr(training_tensors, "all_ranks", counted)
    writing.wait()
    assert polls.count(False) >= 3 and polls[-1] is True and writing.is_done()


# ---------------------------------------------------------------- the lock


def owner(**changes: Any) -> lock.Owner:
    mine = lock.Owner.this_process()
    return lock.Owner(**{**vars(mine), **changes})


def write_lock_of(root: Path, other: lock.Owner, seconds_ago: float = 0.0) -> None:
    (root / LOCK_FILE).write_text(json.dumps(vars(other)))
    then = time.time() - seconds_ago
    os.utime(root / LOCK_FILE, (then, then))


def test_lock_of_a_live_process_is_respected(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        other = owner(pid=child.pid, started=lock._start_time(child.pid), job="77")
        write_lock_of(tmp_path, other, seconds_ago=1000)  # suspended for long, but alive
        with pytest.raises(
            UserError, match=f"belongs to another run: process {child.pid} on {other.host}, job 77"
        ):
            lock.Lock(tmp_path).take()
    finally:
        child.kill()
        child.wait()
    mine = lock.Lock(tmp_path)
    mine.take()
    mine.check_still_ours()
    mine.release()
    assert list(tmp_path.iterdir()) == []


def test_lock_whose_pid_is_reused_is_free(tmp_path: Path) -> None:
    write_lock_of(tmp_path, owner(started="1"))
    lock.Lock(tmp_path).take()


def test_lock_of_another_host_expires_when_stale(tmp_path: Path) -> None:
    write_lock_of(tmp_path, owner(host="elsewhere"), seconds_ago=20)
    with pytest.raises(UserError, match=r"elsewhere.*touched its lock 20 s ago"):
        lock.Lock(tmp_path).take()
    write_lock_of(tmp_path, owner(host="elsewhere"), seconds_ago=STALE_SECONDS + 1)
    lock.Lock(tmp_path).take()


def test_pid_of_another_container_is_not_trusted(tmp_path: Path) -> None:
    write_lock_of(tmp_path, owner(pid_namespace="another boot pid:[1]", started="1"))
    with pytest.raises(UserError, match="touched its lock"):
        lock.Lock(tmp_path).take()


@pytest.mark.parametrize("alive", [True, False])
def test_lock_of_another_host_is_watched_before_takeover(
    tmp_path: Path, alive: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if alive and len(waits) == 2:
            write_lock_of(tmp_path, owner(host="elsewhere"))

    write_lock_of(tmp_path, owner(host="elsewhere"), seconds_ago=20)
    monkeypatch.setattr(lock.Lock, "_age", lambda self: 20.0 + 15 * len(waits))
    monkeypatch.setattr(time, "sleep", sleep)
    if alive:
        with pytest.raises(UserError, match="belongs to another run"):
            lock.check_free(tmp_path)
    else:
        lock.check_free(tmp_path)
        lock.Lock(tmp_path).take()
    assert len(waits) == (2 if alive else 3)
    assert capfd.readouterr().err.count("waiting to see whether it touches its lock") == 1


def test_lock_age_is_measured_by_the_file_systems_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lock_of(tmp_path, owner(host="elsewhere"), seconds_ago=20)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    with pytest.raises(UserError, match=r"touched its lock 20 s ago"):
        lock.Lock(tmp_path).take()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]


def test_requeued_job_takes_the_lock_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lock_of(tmp_path, owner(host="elsewhere", job="5", restarts=0))
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    with pytest.raises(UserError, match="job 5"):  # another step of the same start of the job
        lock.Lock(tmp_path).take()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    lock.Lock(tmp_path).take()


def test_lock_in_an_unwritable_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lock.check_free(tmp_path / "file" / "run")
    with pytest.raises(
        UserError,
        match=r"trainer.default_local_dir: .*run\.lock cannot be written: Not a directory",
    ):
        lock.Lock(tmp_path / "file" / "run").take()


def test_lock_works_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    mine = lock.Lock(tmp_path)
    mine.take()
    mine.check_still_ours()
    with pytest.raises(FileExistsError):
        mine._put(tmp_path / LOCK_FILE)


def test_lock_survives_deletion_and_transient_read_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = lock.Lock(tmp_path)
    mine.take()
    (tmp_path / LOCK_FILE).unlink()
    mine.check_still_ours()
    assert (tmp_path / LOCK_FILE).exists()
    answers = [OSError(errno.ESTALE, "stale"), mine._owner]
    monkeypatch.setattr(mine, "_read", mock.Mock(side_effect=answers))
    monkeypatch.setattr(lock, "_LOOK_SECONDS", 0.01)
    mine.check_still_ours()
    monkeypatch.setattr(mine, "_read", mock.Mock(side_effect=answers[:1] * 9))
    with pytest.raises(OSError, match="stale"):
        mine.check_still_ours()


def test_takeover_of_the_lock_is_noticed(tmp_path: Path) -> None:
    mine = lock.Lock(tmp_path)
    mine.take()
    write_lock_of(tmp_path, owner(host="elsewhere", pid=7))
    with pytest.raises(UserError, match="taken over by process 7 on elsewhere"):
        mine.check_still_ours()
    mine.release()
    assert (tmp_path / LOCK_FILE).exists()  # it belongs to the other run
