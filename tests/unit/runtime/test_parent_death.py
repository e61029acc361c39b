"""A rank ends with the launcher that started it, and with no other parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from runs import DEADLINE_SECONDS, is_running, wait_until

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("by_torchrun", [True, False], ids=["torchrun", "shell"])
def test_rank_ends_with_torchruns_agent_but_outlives_a_shell(by_torchrun: bool) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    env |= {"TORCHELASTIC_RUN_ID": "x"} if by_torchrun else {}
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, RANK], env=env, stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    rank = int(agent.stdout.readline())
    try:
        assert agent.stdout.readline() == "ready\n"
        agent.kill()
        agent.wait()
        assert (
            wait_until(lambda: not is_running(rank), DEADLINE_SECONDS if by_torchrun else 1.0)
            == by_torchrun
        )
    finally:
        if is_running(rank):
            os.kill(rank, signal.SIGKILL)


def test_process_ends_if_its_parent_is_already_gone() -> None:
    program = (
        "from rlhf_mc.runtime.parent_death import exit_with_parent; exit_with_parent(0); "
        "print('still here')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=500
    )
    assert (done.returncode, done.stdout) == (1, "")
