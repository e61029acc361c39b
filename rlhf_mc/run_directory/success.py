"""The success marker of a run: a file in trainer.default_local_dir, written last. A run without it has not finished,
whatever the exit codes of its processes.
"""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_mc import durable
from rlhf_mc.run_files import SUCCESS_FILE


def clear(root: Path) -> None:
    """Remove the success marker of a run that resumes, before anything else is written. (The marker of an earlier run
    is moved with that run's files.)"""
    (root / SUCCESS_FILE).unlink(missing_ok=True)


def write(root: Path, run_id: str, step: int) -> None:
    """Write the success marker atomically and durably. step: the last step of the run. Only rank 0 calls it, after
    every other file of the run is written."""
    durable.replace(root / SUCCESS_FILE, (json.dumps({"run_id": run_id, "step": step}) + "\n").encode())
