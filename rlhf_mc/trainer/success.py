"""The success mark of a run: a file in trainer.default_local_dir, written last. A directory without it holds a run that
has not finished, whatever its processes ended with.
"""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_mc import durable

NAME = "success.json"


def clear(root: Path) -> None:
    """Remove the mark of a run that resumes, before anything else is written. (With an earlier run's files its mark is
    moved away.)"""
    (root / NAME).unlink(missing_ok=True)


def write(root: Path, run_id: str, step: int) -> None:
    """Write the mark in one piece, to the disk itself. `step` is the last one of the run. Rank 0 calls it, after every
    other file of the run is written."""
    durable.replace(root / NAME, (json.dumps({"run_id": run_id, "step": step}) + "\n").encode())
