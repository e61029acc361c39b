"""Helpers of tests of whole runs: the outcome that faults must not change, and the processes that a run has left."""

from __future__ import annotations

import json
import time
from pathlib import Path

VARIES = ("run_id", "timing_", "perf/", "health/num_active")
"""Starts of the keys of metrics.jsonl that differ between equal runs: the id of the run, and what depends on a clock or
on the memory of the machine, as two of the health rules do."""


def outcome(run: Path, last_step: int) -> dict[str, object]:
    """Return what faults during a run must not change: its metrics without VARIES, the exported model, and the
    checksums of the last checkpoint's tensors (weights and optimizers)."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    files = json.loads((run / f"global_step_{last_step}" / "manifest.json").read_text())["files"]
    return {
        "steps": [row["step"] for row in rows],
        "metrics": [{key: value for key, value in row.items() if not key.startswith(VARIES)} for row in rows],
        "model": (run / "hf" / "model.safetensors").read_bytes(),
        "tensors": {name: file["sha256"] for name, file in files.items() if name.endswith(".distcp")},
    }


def members(session: int) -> list[int]:
    """Return the live processes of a session; zombies do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # gone in the meantime
                continue
            if int(stat[3]) == session and stat[0] not in "ZX":
                found.append(int(entry.name))
    return found


def gone(session: int, within_seconds: float = 10) -> bool:
    """Return whether all processes of the session end within the given time. The time is for Python's resource tracker,
    which ends only after its parent."""
    deadline = time.monotonic() + within_seconds
    while (left := members(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        print("still running:", Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
    return not left
