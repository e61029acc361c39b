"""Lines for the person who runs the program. No torch is imported here."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from rlhf_mc.config.masking import masked

COLUMNS = 80
"""Width of a text in a file, which is read in a terminal."""
lock = threading.RLock()
"""Held while a line is printed to a terminal that has a bottom line."""
_clear_bottom_line: Callable[[], None] | None = None
_last_line = time.monotonic()


def terminal_columns() -> int:
    """Return the width of this process's terminal."""
    return shutil.get_terminal_size((COLUMNS, 24)).columns


def set_bottom_line(clear: Callable[[], None] | None) -> None:
    """Print all further lines above a line at the bottom of the terminal. clear: erases that line,
    which appears again when it is next shown; None: there is none. There is one terminal, so this
    is a state of the process."""
    global _clear_bottom_line
    _clear_bottom_line = clear


def write(text: str, stream: TextIO) -> None:
    """Print the lines to the stream, without secrets, above the bottom line, and flush. Raise
    OSError or ValueError if the stream is full or closed."""
    global _last_line
    with lock if _clear_bottom_line is not None else contextlib.nullcontext():
        if _clear_bottom_line is not None:
            _clear_bottom_line()
        stream.write(masked(text) + "\n")  # one call, so that the lines of two threads do not mix
        stream.flush()
        _last_line = time.monotonic()


def last_line() -> float:
    """Return the time (time.monotonic) of the last `write`, or of the start."""
    return _last_line


def print_line(line: str, stream: TextIO | None = None, rank_0_only: bool = False) -> None:
    """Print "rlhf_mc: " and the line to the stream (default: standard error).

    rank_0_only: print on rank 0 alone. An error of the stream is ignored, see write_line."""
    if not rank_0_only or global_rank() == 0:
        write_line(f"rlhf_mc: {line}", stream)


def write_line(text: str, stream: TextIO | None = None) -> None:
    """Print the text to the stream (default: standard error) and flush it.

    An error is ignored: the stream may be full or closed, and the rank has to continue or end all
    the same."""
    with contextlib.suppress(OSError, ValueError):
        write(text, stream or sys.stderr)


def global_rank() -> int:
    """Return this process's rank: the process group's, or RANK's where there is none yet, or 0."""
    if "torch" in sys.modules:
        from torch import distributed as dist

        if dist.is_available() and dist.is_initialized():
            return dist.get_rank()
    return int(os.environ.get("RANK", "0"))
