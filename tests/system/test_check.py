"""`python -m rlhf_mc --check` on this machine, and with stand-ins for nvidia-smi."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_mc.machine.check import PARTS, WIDTH
from rlhf_mc.machine.facts import gpu_device_files

pytestmark = pytest.mark.system

without_gpus = pytest.mark.skipif(
    bool(gpu_device_files()), reason="the stand-ins are for machines without GPUs"
)
EIGHT_H100 = """\
#!/bin/sh
case "$1" in
--query-gpu=*) for i in 1 2 3 4 5 6 7 8; do echo "NVIDIA H100 80GB HBM3, 81559, 4, 9.0, 580.95.05"; done ;;
*) echo "| NVIDIA-SMI 580.95.05     Driver Version: 580.95.05     CUDA Version: 13.0     |" ;;
esac
"""  # noqa: E501
NO_ANSWER = """\
#!/bin/sh
echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver." >&2
exit 9
"""


def check(folder: Path, nvidia_smi: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the program, with a stand-in for nvidia-smi."""
    if nvidia_smi is not None:
        command = folder / "nvidia-smi"
        command.write_text(nvidia_smi)
        command.chmod(0o755)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    command_line = [sys.executable, "-m", "rlhf_mc", "--check"]
    return subprocess.run(command_line, env=env, capture_output=True, text=True, timeout=300)


def statuses(stdout: str) -> dict[str, str]:
    """Return the status of each part."""
    found = re.findall(
        rf"^(ok|note|error) +({'|'.join(map(re.escape, PARTS))}) ", stdout, re.MULTILINE
    )
    return {name: status for status, name in found}


def test_report_on_this_machine(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(statuses(done.stdout)) == list(PARTS)
    assert "error" not in statuses(done.stdout).values()
    assert max(len(line) for line in done.stdout.splitlines()) <= WIDTH
    assert done.stdout.endswith("\nA run can start here.\n")
    assert done.stderr == ""


@without_gpus
def test_torch_for_cpus_on_a_machine_with_gpus(tmp_path: Path) -> None:
    done = check(tmp_path, EIGHT_H100)
    assert done.returncode == 1 and done.stderr == ""
    errors = {name for name, status in statuses(done.stdout).items() if status == "error"}
    assert errors == {"torch", "vLLM"}
    assert "8 x NVIDIA H100 80GB HBM3, 80 GiB, compute capability 9.0" in done.stdout
    assert done.stdout.endswith("\nA run cannot start here: see torch, vLLM.\n")


@without_gpus
def test_a_driver_that_does_not_answer_hides_nothing_else(tmp_path: Path) -> None:
    done = check(tmp_path, NO_ANSWER)
    assert done.returncode == 0 and done.stderr == ""
    assert list(statuses(done.stdout)) == list(PARTS)
    assert statuses(done.stdout)["driver"] == "note"
    assert "couldn't communicate with the NVIDIA driver" in " ".join(done.stdout.split())
