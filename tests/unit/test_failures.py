"""A rank that must end does, whatever stands in its way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")


def ended(code: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """The outcome of a line of Python whose output goes to a full disk."""
    with open("/dev/full", "wb") as disk:
        command = [
            sys.executable,
            "-c",
            f"from rlhf_mc.observability.failures import *; import sys\n{code}\nprint('still here')",
        ]
        return subprocess.run(command, env={**os.environ, **env}, stdout=disk, stderr=disk, timeout=60)


@full
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("end_from_a_thread('rank 1 is gone')", 1),
        ("leave(75)", 75),
        ("leave(exit_code('rlhf_mc', lambda: 1 / 0))", 1),
        ("leave(exit_code('rlhf_mc', lambda: sys.exit(0)))", 1),
        ("def f(): raise KeyboardInterrupt\nleave(exit_code('rlhf_mc', f))", 130),
        ("from rlhf_mc.config.errors import UserError\ndef f(): raise UserError('no')\nleave(exit_code('x', f))", 2),
    ],
    ids=["from a thread", "leave", "an error", "sys.exit(0)", "Ctrl-C", "a mistake"],
)
def test_a_full_disk_keeps_nobody_alive(code: str, expected: int) -> None:
    done = ended(code, TORCHELASTIC_ERROR_FILE="/dev/full", RLHF_MC_EXIT_CODE_FILE="/dev/full")
    assert done.returncode == expected


def test_the_launcher_is_told_the_code_by_rank_0_alone(tmp_path: Path) -> None:
    for rank in ("0", "1"):
        file = tmp_path / rank
        command = [sys.executable, "-c", "from rlhf_mc.observability.failures import leave; leave(75)"]
        env = {**os.environ, "RLHF_MC_EXIT_CODE_FILE": str(file), "RANK": rank}
        assert subprocess.run(command, env=env, timeout=60).returncode == 75
        assert (file.read_text() if file.exists() else None) == ("75\n" if rank == "0" else None)
