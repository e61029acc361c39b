"""Ends a process with the one that started it: the kernel kills it as soon as its parent is gone, however that ended.
No torch here: it is the first thing that a rank and a reward worker do.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """End this process with its parent, at once where that is gone already. Where the system knows no such signal,
    nothing happens; so the caller needs another way to notice."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def end_with_launcher() -> None:
    """End this rank with torchrun's agent or with Slurm's step daemon, where one of them started it. A rank that was
    started from a shell (`python -m rlhf_mc &`, nohup) outlives the shell."""
    parent = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if parent == 1 and not _may_be_torchrun(parent):
            os._exit(1)  # the agent was gone before this line
        end_with(parent)
    elif _read(parent, "comm").startswith(b"slurmstepd"):
        end_with(parent)


def _may_be_torchrun(pid: int) -> bool:
    """Return whether process 1 may be the agent, as in a container, rather than who takes orphans in."""
    command = _read(pid, "cmdline")
    return not command or b"python" in command or b"torch" in command


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
