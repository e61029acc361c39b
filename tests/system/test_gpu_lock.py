"""requirements/gpu.txt is what `make lock` resolves from setup.py and requirements/gpu.in against
the package index. Metadata alone is downloaded (about 50 MB, 8 s). Skipped where no index can be
reached."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
ENV = os.environ | {"UV_HTTP_RETRIES": "1", "UV_NO_PROGRESS": "1"}


@pytest.fixture(scope="module")
def index() -> None:
    """Skip the test where uv reaches no package index."""
    command = [
        BIN / "uv",
        "pip",
        "compile",
        "--quiet",
        "--no-config",
        "--no-deps",
        "--no-cache",
        "-",
    ]
    reached = subprocess.run(
        command, input="packaging", env=ENV, capture_output=True, text=True, timeout=500
    )
    if reached.returncode:
        pytest.skip(
            "no package index (UV_DEFAULT_INDEX names another than PyPI): "
            f"{reached.stderr.strip()[-200:]}"
        )


def resolve(folder: Path, edited: str, old: str, new: str) -> subprocess.CompletedProcess[str]:
    """Copy the repository's requirements to `folder`, replace a text in one of them, and run
    `make lock` there."""
    for name in ("Makefile", "setup.py"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    text = (folder / edited).read_text()
    assert old in text
    (folder / edited).write_text(text.replace(old, new))
    command = ["make", "--silent", "--old-file=.venv/.installed", "lock", f"BIN={BIN}"]
    return subprocess.run(command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=300)


def test_another_torch_than_vllms_does_not_stay_in_the_lock(tmp_path: Path, index: None) -> None:
    done = resolve(tmp_path, "requirements/gpu.txt", "torch==2.13.0", "torch==2.12.0")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "requirements/gpu.txt").read_text() == (
        ROOT / "requirements/gpu.txt"
    ).read_text()


def test_requirements_that_disagree_are_named(tmp_path: Path, index: None) -> None:
    done = resolve(tmp_path, "setup.py", "torch==2.13.0", "torch==2.12.0")
    assert done.returncode != 0
    assert "vllm==0.32.0 depends on torch==2.13.0" in " ".join(done.stderr.split())
