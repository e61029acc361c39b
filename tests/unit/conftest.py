"""Fixtures of the tests in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import MINIMAL


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path
