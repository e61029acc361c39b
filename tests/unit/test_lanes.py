"""Tests in several processes: the summary and the exit code are of all of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CONFTEST = "from lanes import pytest_addoption, pytest_runtestloop\n"


def run(directory: Path, file: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of a directory, `file` and one with two tests that pass, in two processes."""
    (directory / "unit").mkdir()
    (directory / "unit" / "test_a.py").write_text(file)
    (directory / "unit" / "test_b.py").write_text("def test_first(): pass\ndef test_last(): pass\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env |= {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--lanes", "2", "-p", "no:cacheprovider", str(directory)]
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=120)


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
    done = run(tmp_path, f"import os, pytest\ndef test_first():\n    {body}\ndef test_last(): pass\n")
    assert summary in done.stdout and done.returncode == code, done.stdout
    assert ("shown" in done.stdout) == ("shown" in body)


def test_run_ends_although_a_test_leaves_a_process_and_a_fixture_fails(tmp_path: Path) -> None:
    """Call pytest.exit, as tests do whose ranks hang."""
    (tmp_path / "conftest.py").write_text(
        f"{CONFTEST}import pytest\n@pytest.fixture(scope='session')\ndef broken():\n    yield\n    raise ValueError\n"
    )
    body = (
        "    multiprocessing.get_context('spawn').Process(target=time.sleep, args=(60,)).start()\n"
        "    pytest.exit('no answer', 3)\n"
    )
    start = time.monotonic()
    done = run(tmp_path, f"import multiprocessing, time, pytest\ndef test_first(broken):\n{body}")
    assert "Exit: no answer" in done.stdout and done.returncode == 1, done.stdout
    assert time.monotonic() - start < 50, "the run has waited for the process"
