"""Exit codes of ranks: a full disk prevents no exit, and one rank reports the code or the error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest

PRELUDE = "from rlhf_mc.runtime.exit_codes import *; import sys"
needs_dev_full = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs a device that is always full"
)


def run_with_full_disk(code: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run Python code with stdout and stderr on a full disk. Return the ended process."""
    with open("/dev/full", "wb") as disk:
        command = [
            sys.executable,
            "-c",
            f"{PRELUDE}\n{code}\nprint('still here')",
        ]
        return subprocess.run(
            command, env={**os.environ, **env}, stdout=disk, stderr=disk, timeout=500
        )


@pytest.mark.slow
@needs_dev_full
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("exit_from_thread('rank 1 is gone')", 1),
        ("exit_now(75)", 75),
        ("exit_now(exit_code('rlhf_mc', lambda: 1 / 0))", 1),
        ("exit_now(exit_code('rlhf_mc', lambda: sys.exit(0)))", 1),
        ("def f(): raise KeyboardInterrupt\nexit_now(exit_code('rlhf_mc', f))", 130),
        (
            (
                "from rlhf_mc.config.errors import UserError\ndef f(): raise "
                "UserError('no')\nexit_now(exit_code('x', f))"
            ),
            2,
        ),
        ("def f(): raise LostProcessError('no')\nexit_now(exit_code('x', f))", 1),
    ],
    ids=[
        "from a thread",
        "exit_now",
        "exception",
        "sys.exit(0)",
        "Ctrl-C",
        "UserError",
        "LostProcessError",
    ],
)
def test_full_disk_does_not_prevent_exit(code: str, expected: int) -> None:
    done = run_with_full_disk(
        code, TORCHELASTIC_ERROR_FILE="/dev/full", RLHF_MC_EXIT_CODE_FILE="/dev/full"
    )
    assert done.returncode == expected


def test_only_rank_0_writes_the_exit_code_file(tmp_path: Path) -> None:
    for rank in ("0", "1"):
        file = tmp_path / rank
        command = [
            sys.executable,
            "-c",
            "from rlhf_mc.runtime.exit_codes import exit_now; exit_now(75)",
        ]
        env = {**os.environ, "RLHF_MC_EXIT_CODE_FILE": str(file), "RANK": rank}
        assert subprocess.run(command, env=env, timeout=500).returncode == 75
        assert (file.read_text() if file.exists() else None) == ("75\n" if rank == "0" else None)


@pytest.mark.parametrize("seconds", [0.1, 1000.0])
def test_libraries_that_do_not_end_are_cut_off_with_the_exit_code(seconds: float) -> None:
    code = (
        f"{PRELUDE}; import time; exit_after({seconds}, 75); "
        f"time.sleep({30 if seconds < 1 else 0}); exit_now(3)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=500)
    assert done.returncode == (75 if seconds < 1 else 3)


ERROR_ON_ALL_RANKS = """
import time
from torch import distributed as dist
from rlhf_mc.config.errors import UserError
from rlhf_mc.runtime import error_report
error_report.REPORT_SECONDS = 300.0
dist.init_process_group("gloo")
def f():
    time.sleep(1.5 * dist.get_rank())
    raise {error}
exit_now(exit_code("x", f))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "line", "most"),
    [
        ("UserError('no')", "x: error: no\n", 20),
        ("UserError(12_345 * 'é')", f"x: error: {3960 * 'é'}... (12,345 characters)\n", 8_100),
        ("UserError('in \\ud800')", "x: error: in \\ud800\n", 20),
    ],
    ids=["short", "long", "lone surrogate"],
)
def test_error_of_all_ranks_is_reported_once(
    tmp_path: Path, error: str, line: str, most: int
) -> None:
    """Run without torchrun's agent: the store that decides which rank reports ends with rank 0."""
    output = tmp_path / "output"
    program = tmp_path / "program.py"
    program.write_text(PRELUDE + ERROR_ON_ALL_RANKS.format(error=error))
    processes = [
        forked.start([str(program)], output, output, variables)
        for variables in forked.rank_variables(2)
    ]
    for process in processes:
        process.join(500)
    assert [process.exitcode for process in processes] == [2, 2], output.read_text()
    text = output.read_text()
    assert (
        text.count(line) == 1 and "Exception raised" not in text and len(text.encode()) <= most
    ), text


@pytest.mark.slow
def test_endless_text_of_a_librarys_error_is_cut() -> None:
    command = [
        sys.executable,
        "-c",
        f"{PRELUDE}\ndef f(): raise OSError('y' * 1_000_000)\nexit_now(exit_code('x', f))",
    ]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    lines = done.stderr.splitlines()
    assert (
        done.returncode == 1
        and len(done.stderr) < 50_000
        and lines[0] == "Traceback (most recent call last):"
    )
    assert lines[-1] == f"x: error on rank 0: OSError: {'y' * 3951}... (1,000,009 characters)"
