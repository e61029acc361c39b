"""Tests in several processes: the summary and the exit code are of all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import kill

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[2]
CONFTEST = "from lanes import pytest_addoption, pytest_runtestloop\n"


def run(directory: Path, file: str) -> tuple[str, int]:
    """Run the tests of a directory, `file` and one with two tests that pass, in two processes.
    Return the output and the exit code."""
    (directory / "unit").mkdir()
    (directory / "unit" / "test_a.py").write_text(file)
    (directory / "unit" / "test_b.py").write_text("def test_first(): pass\ndef test_last(): pass\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env |= {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--lanes",
        "2",
        "-p",
        "no:cacheprovider",
        str(directory),
    ]
    # processes that tests leave would hold a pipe open
    with (directory / "output").open("w") as output:
        code = subprocess.run(
            command, cwd=directory, env=env, stdout=output, stderr=output, timeout=500
        ).returncode
    return (directory / "output").read_text(), code


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
def test_result_of_a_process_reaches_the_summary(
    tmp_path: Path, body: str, summary: str, code: int
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    output, found = run(
        tmp_path, f"import os, pytest\ndef test_first():\n    {body}\ndef test_last(): pass\n"
    )
    assert summary in output and found == code, output
    assert ("shown" in output) == ("shown" in body)


@pytest.mark.parametrize(
    ("arguments", "body", "summary", "code"),
    [
        (
            "",
            "pid = os.fork()\n    if not pid: time.sleep(6000); os._exit(0)\n    {left}",
            "3 passed",
            0,
        ),
        (
            "broken",
            "child = multiprocessing.get_context('spawn').Process(target=time.sleep, "
            "args=(6000,)); child.start()\n"
            "    pid = child.pid\n    {left}\n    pytest.exit('hangs')",
            "Exit: hangs",
            1,
        ),
    ],
    ids=["forked", "and a teardown fails"],
)
def test_run_does_not_wait_for_a_process_that_a_test_leaves(
    tmp_path: Path, arguments: str, body: str, summary: str, code: int
) -> None:
    (tmp_path / "conftest.py").write_text(
        f"{CONFTEST}import pytest\n@pytest.fixture(scope='session')\ndef broken():\n    yield\n    "
        "raise ValueError\n"
    )
    body = body.format(left=f"pathlib.Path({str(tmp_path / 'left')!r}).write_text(str(pid))")
    output, found = run(
        tmp_path,
        f"import multiprocessing, os, pathlib, pytest, time\ndef test_first({arguments}):\n    "
        f"{body}\n",
    )
    kill(int((tmp_path / "left").read_text()))
    assert summary in output and found == code, output
