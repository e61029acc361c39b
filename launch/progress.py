"""Prints a run's newest checkpoint, or "the start". Run by launch/slurm_job.sh before it has a job queued again:

python -m launch.progress CONFIG.yaml [section.key=value ...]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rlhf_mc.config.load import load_config

_CHECKPOINT = re.compile(r"global_step_(\d+)")


def newest(folder: Path) -> str:
    """The name of the checkpoint of the latest step that is in the folder."""
    found = (_CHECKPOINT.fullmatch(path.name) for path in folder.glob("global_step_*"))
    steps = [int(match[1]) for match in found if match]
    return f"global_step_{max(steps)}" if steps else "the start"


if __name__ == "__main__":
    print(newest(Path(load_config(sys.argv[1], sys.argv[2:]).trainer.default_local_dir)))
