"""Print a run's newest checkpoint, or "the start". Run by launch/slurm_job.sh before it requeues a
job:

python -m launch.progress CONFIG.yaml [section.key=value ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlhf_mc.checkpoint.directory import final_path, steps_with_checkpoint
from rlhf_mc.command_line import config_from_argv


def newest(folder: Path) -> str:
    """Return the name of the checkpoint of the latest step in the folder, or "the start"."""
    steps = steps_with_checkpoint(folder)
    return final_path(folder, steps[-1]).name if steps else "the start"


if __name__ == "__main__":
    print(newest(Path(config_from_argv(sys.argv[1:]).trainer.default_local_dir)))
