"""The end of a process whose parent has ended, however that was: the kernel kills it. No torch is
imported here, since this is the first thing that a rank and a reward worker do.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def exit_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends, at once if the parent has ended already.

    On a system without prctl nothing happens, so the caller needs another way to notice the
    parent's end."""
    signal_with_parent(parent, signal.SIGKILL)


def signal_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the signal sent to this process when its parent, or the parent's thread that has started
    it, ends. Exit at once if the parent has ended already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(option, value, 0, 0, 0)


def exit_with_launcher() -> None:
    """Have this rank killed when torchrun's agent or Slurm's step daemon ends, if one of them has
    started it.

    A rank that was started from a shell (`python -m rlhf_mc &`, nohup) outlives the shell."""
    parent = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if parent == 1 and not _may_be_torchrun(parent):
            os._exit(1)  # the agent had ended before this line
        exit_with_parent(parent)
    elif _read(parent, "comm").startswith(b"slurmstepd"):
        exit_with_parent(parent)


def _may_be_torchrun(pid: int) -> bool:
    """Return whether process 1 may be the agent, as in a container, and not an init process that
    adopts orphans."""
    command = _read(pid, "cmdline")
    return not command or b"python" in command or b"torch" in command


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
