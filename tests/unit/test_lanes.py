"""Tests in several processes: the summary and the exit code are of all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CONFTEST = "from lanes import pytest_addoption, pytest_runtestloop\n"


@pytest.mark.parametrize(
    ("body", "summary", "code"),
    [
        ("pass", "4 passed", 0),
        ("print('shown'); assert 0", "1 failed, 3 passed", 1),
        ("os._exit(0)", "2 tests have not run, unit/test_a.py::test_first first", 1),
        ("pytest.exit('no answer', 3)", "Exit: no answer", 1),
    ],
    ids=["passes", "fails", "ends its process", "ends the session"],
)
def test_result_of_a_process_reaches_the_summary(tmp_path: Path, body: str, summary: str, code: int) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name, first in (("a", body), ("b", "pass")):
        file = tmp_path / "unit" / f"test_{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"import os, pytest\ndef test_first():\n    {first}\ndef test_last(): pass\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env |= {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--lanes", "2", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert summary in done.stdout and done.returncode == code, done.stdout
    assert ("shown" in done.stdout) == ("shown" in body)
