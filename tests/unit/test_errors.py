"""What is said of an error of the system, by its number."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys

import pytest

from rlhf_mc.config.errors import reason_of
from rlhf_mc.runtime.heartbeat import _to_bind
from rlhf_mc.topology.consensus import disk_error


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EMFILE, f"this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files"),
        (errno.ENFILE, "sysctl fs.file-max"),
        (errno.ENOSPC, "free some space"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EACCES, ""),
        (errno.ENOENT, ""),
        (errno.EIO, ""),
    ],
)
def test_only_a_full_disk_is_worded_as_one(number: int, words: str) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number), "metrics.jsonl")

    said = str(disk_error("trainer.default_local_dir", fail))
    assert said.startswith(f"trainer.default_local_dir: {os.strerror(number)}") and said.endswith(" (metrics.jsonl)")
    assert words in said
    assert ("space" in said) == (number == errno.ENOSPC)
    assert words or reason_of(OSError(number, "x")) == "x"


SHORT_OF_FILES = """
import os, resource, sys
from pathlib import Path
from rlhf_mc.checkpoint.directory import CorruptCheckpoint, read_json, read_manifest
root = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        os.open("/dev/null", os.O_RDONLY)
except OSError:
    pass
for read in (lambda: read_manifest(root), lambda: read_json(root / "manifest.json")):
    try:
        read()
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_a_checkpoint_is_not_damaged_where_files_run_out(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "manifest.json")
    with open(path, "w") as file:
        file.write("{}")
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OF_FILES, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done
    for line in lines:
        assert line.startswith("UserError ") and "may have 64 files and connections open" in line


@pytest.mark.parametrize(
    ("everyone", "expected"),
    [
        ([("a", ["127.0.0.1"]), ("a", ["127.0.0.1"])], ["127.0.0.1"]),
        ([("a", ["127.0.1.1"]), ("a", ["127.0.1.1"]), ("b", ["10.0.0.5"])], ["10.0.0.5"]),
        ([("a", ["::1", "127.0.0.1"]), ("a", ["::1"])], ["::1", "127.0.0.1"]),
        ([("a", ["10.0.0.5"]), ("b", ["10.0.0.5", "10.1.0.5"])], ["10.0.0.5", "10.1.0.5"]),
    ],
)
def test_rank_0_listens_where_the_other_machines_look(
    everyone: list[tuple[str, list[str]]], expected: list[str]
) -> None:
    assert _to_bind(everyone) == expected
