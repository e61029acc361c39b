"""Helpers of tests of whole runs: the outcome that faults must not change, the processes that a run
has left, and waiting for a condition. Whatever another process does may end, or be half written, at
any moment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

VARIES = ("run_id", "timing_", "perf/", "health/num_active")
"""Starts of the keys of metrics.jsonl that differ between equal runs: the id of the run, and what
depends on a clock or on the memory of the machine, as two of the health rules do."""


def outcome(run: Path, last_step: int, ignored: tuple[str, ...] = ()) -> dict[str, object]:
    """Return what faults during a run must not change: its metrics without VARIES and those that
    begin as `ignored`, the exported model, and the checksums of the last checkpoint's tensors
    (weights and optimizers)."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    files = json.loads((run / f"global_step_{last_step}" / "manifest.json").read_text())["files"]
    return {
        "steps": [row["step"] for row in rows],
        "metrics": [
            {key: value for key, value in row.items() if not key.startswith(VARIES + ignored)}
            for row in rows
        ],
        "model": (run / "hf" / "model.safetensors").read_bytes(),
        "tensors": {
            name: file["sha256"] for name, file in files.items() if name.endswith(".distcp")
        },
    }


DEADLINE_SECONDS = 300.0
"""Time for what takes seconds at most, on a machine with other work to do."""


def wait_until(ready: Callable[[], object], seconds: float = DEADLINE_SECONDS) -> bool:
    """Wait until the condition holds. Return False if it does not within the time."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def read_of(pid: int, file: str) -> bytes:
    """Return the content of a process's file in /proc; nothing if the process has ended."""
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except OSError:
        return b""


def is_running(pid: int) -> bool:
    """Return whether the process has not ended; a zombie has."""
    return read_of(pid, "stat").rpartition(b")")[2][1:2] not in (b"", b"Z", b"X")


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send the signal, unless the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def ends(pid: int) -> bool:
    """Return whether the process ends. One that does not is killed."""
    if wait_until(lambda: not is_running(pid)):
        return True
    kill(pid)
    return False


def last_step(run: Path) -> int:
    """Return the last step that a run, perhaps a running one, has logged; 0: none. A line without
    its end is being written."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    steps = [int(json.loads(line)["step"]) for line in lines if line.endswith("\n")]
    return steps[-1] if steps else 0


def members(session: int) -> list[int]:
    """Return the live processes of a session; zombies do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            stat = read_of(int(entry.name), "stat").rpartition(b")")[2].split()
            if stat and int(stat[3]) == session and stat[0] not in (b"Z", b"X"):
                found.append(int(entry.name))
    return found


def gone(session: int) -> bool:
    """Return whether all processes of the session end. Python's resource tracker ends only after
    its parent."""
    if wait_until(lambda: not members(session), seconds=60):
        return True
    for pid in members(session):
        print("still running:", read_of(pid, "cmdline").replace(b"\0", b" ").decode())
    return False
