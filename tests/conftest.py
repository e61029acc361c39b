"""What tests of several folders share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def quickstart_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make quickstart` makes before it starts PPO: model, Megatron checkpoint, prompts. None may write."""
    out = tmp_path_factory.mktemp("quickstart_made")
    for command in (
        ["tools/make_quickstart.py", "--output", str(out)],
        ["tools/convert_hf_to_mcore.py", "--hf-path", f"{out}/model_hf", "--output", f"{out}/model_mcore"],
    ):
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=550
        )
        assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return out


@pytest.fixture(scope="session")
def quickstart_overrides(quickstart_made: Path) -> list[str]:
    """For configs/quickstart.yaml, to read what is there."""
    return [
        f"model.path={quickstart_made}/model_hf",
        f"model.dist_checkpointing_path={quickstart_made}/model_mcore",
        f"data.train_files={quickstart_made}/train.parquet",
        f"data.val_files={quickstart_made}/val.parquet",
    ]
