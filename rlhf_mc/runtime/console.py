"""Lines for the person who runs the program. No torch is imported here."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def say(line: str, stream: TextIO | None = None, rank_0_only: bool = False) -> None:
    """Print "rlhf_mc: " and the line to the stream (default: standard error).

    rank_0_only: print on rank 0 alone. An error of the stream is ignored, see write_line."""
    if not rank_0_only or global_rank() == 0:
        write_line(f"rlhf_mc: {line}", stream)


def write_line(text: str, stream: TextIO | None = None) -> None:
    """Print the text to the stream (default: standard error) and flush it.

    An error is ignored: the stream may be full or closed, and the rank has to continue or end all the same."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=stream or sys.stderr, flush=True)


def global_rank() -> int:
    """Return this process's rank: the process group's, or RANK's where there is none yet, or 0."""
    if "torch" in sys.modules:
        from torch import distributed as dist

        if dist.is_available() and dist.is_initialized():
            return dist.get_rank()
    return int(os.environ.get("RANK", "0"))
