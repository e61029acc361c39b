"""Prints a run's newest checkpoint, or "the start". Run by launch/slurm_job.sh before it has a job queued again:

python -m launch.progress CONFIG.yaml [section.key=value ...]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from rlhf_mc.config.load import load_config

_CHECKPOINT = re.compile(r"global_step_(0|[1-9]\d*)")


def newest(folder: Path) -> str:
    """Return the name of the checkpoint of the latest step that is in the folder. A copy under another step's name is
    none."""
    found = ((path, _CHECKPOINT.fullmatch(path.name)) for path in folder.glob("global_step_*"))
    steps = [int(match[1]) for path, match in found if match and _step_of(path) == int(match[1])]
    return f"global_step_{max(steps)}" if steps else "the start"


def _step_of(path: Path) -> int | None:
    """Return the step that a checkpoint's manifest says, without importing torch."""
    try:
        return int(json.loads((path / "manifest.json").read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


if __name__ == "__main__":
    print(newest(Path(load_config(sys.argv[1], sys.argv[2:]).trainer.default_local_dir)))
