"""A rank ends with the launcher that started it, and with no other parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RANK = """
import time
from rlhf_mc.runtime.parent_death import exit_with_launcher
exit_with_launcher()
print("ready", flush=True)
time.sleep(120)
"""
AGENT = """
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(rank.pid, flush=True)
time.sleep(120)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("by_torchrun", [True, False], ids=["torchrun", "shell"])
def test_rank_ends_with_torchruns_agent_but_outlives_a_shell(by_torchrun: bool) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    env |= {"TORCHELASTIC_RUN_ID": "x"} if by_torchrun else {}
    agent = subprocess.Popen([sys.executable, "-c", AGENT, RANK], env=env, stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    rank = int(agent.stdout.readline())
    try:
        assert agent.stdout.readline() == "ready\n"
        agent.kill()
        agent.wait()
        deadline = time.monotonic() + (30 if by_torchrun else 1)
        while is_running(rank) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert is_running(rank) != by_torchrun
    finally:
        if is_running(rank):
            os.kill(rank, signal.SIGKILL)


def test_process_ends_if_its_parent_is_already_gone() -> None:
    program = "from rlhf_mc.runtime.parent_death import exit_with_parent; exit_with_parent(0); print('still here')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
