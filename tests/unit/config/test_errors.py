"""Messages for errors of the operating system, by errno, and the addresses that rank 0 binds."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import subprocess
import sys

import pytest

from rlhf_mc.config.errors import UserError, disk_errors, error_reason
from rlhf_mc.runtime.heartbeat import _addresses_to_bind


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (
            errno.EMFILE,
            f"this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files",
        ),
        (errno.ENFILE, "sysctl fs.file-max"),
        (errno.ENOSPC, "free some space"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EACCES, ""),
        (errno.ENOENT, ""),
        (errno.EIO, ""),
    ],
)
def test_disk_error_message_follows_errno(number: int, words: str) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number), "metrics.jsonl")

    with pytest.raises(UserError) as raised, disk_errors("trainer.default_local_dir"):
        fail()
    message = str(raised.value)
    assert message.startswith(f"trainer.default_local_dir: {os.strerror(number)}")
    assert message.endswith(" (metrics.jsonl)")
    assert words in message
    assert ("space" in message) == (number == errno.ENOSPC)
    assert words or error_reason(OSError(number, "x")) == "x"


@pytest.mark.parametrize("length", [4000, 4001, 1_000_000])
def test_text_of_an_error_is_cut_once(length: int) -> None:
    """Pickle it, as the ranks do, and add to it, as the loop does."""
    text = str(UserError("x" * length))
    assert text == ("x" * length if length <= 4000 else "x" * 3960 + f"... ({length:,} characters)")
    assert str(pickle.loads(pickle.dumps(UserError(text)))) == text
    assert len(str(UserError(f"{text}; saved"))) <= 4000


OUT_OF_FILE_DESCRIPTORS = """
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


@pytest.mark.slow
def test_running_out_of_file_descriptors_is_not_corruption(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "manifest.json")
    with open(path, "w") as file:
        file.write("{}")
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_FILE_DESCRIPTORS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=500,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done
    for line in lines:
        assert line.startswith("UserError ") and "may have 64 files and connections open" in line


@pytest.mark.parametrize(
    ("resolved", "expected"),
    [
        ([("a", ["127.0.0.1"]), ("a", ["127.0.0.1"])], ["127.0.0.1"]),
        ([("a", ["127.0.1.1"]), ("a", ["127.0.1.1"]), ("b", ["10.0.0.5"])], ["10.0.0.5"]),
        ([("a", ["::1", "127.0.0.1"]), ("a", ["::1"])], ["::1", "127.0.0.1"]),
        ([("a", ["10.0.0.5"]), ("b", ["10.0.0.5", "10.1.0.5"])], ["10.0.0.5", "10.1.0.5"]),
    ],
)
def test_rank_0_binds_the_addresses_that_other_hosts_resolve(
    resolved: list[tuple[str, list[str]]], expected: list[str]
) -> None:
    assert _addresses_to_bind(resolved) == expected
