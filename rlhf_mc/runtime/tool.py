"""Interrupts, mistakes and numbers on the command line, the same for the planner and all tools.
`end_on_interrupt` is called before other modules are imported, which takes seconds.
"""

from __future__ import annotations

import argparse
import atexit
import math
import os
import select
import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

EXIT_INTERRUPTED = 130
"""The program was interrupted and has saved nothing (128 + SIGINT)."""
EXIT_UNREAD = 141
"""The reader of a tool's output has gone (128 + SIGPIPE)."""


def end_on_interrupt() -> None:
    """Let Ctrl-C end this process with one line and code 130, also within an import; and let the
    end of the process that reads its output, as in `| head`, end it without a line."""
    # else the shell has it ignored
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    sys.excepthook = _report
    atexit.register(_flush)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"rlhf_mc: interrupted\n")
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            # an extension module makes another error of an exception in its import
            os._exit(EXIT_INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        raise SystemExit(EXIT_INTERRUPTED)
    if is_unread(error):
        raise SystemExit(EXIT_UNREAD)
    sys.__excepthook__(kind, error, trace)


def is_unread(error: BaseException) -> bool:
    """Return whether the error is that the reader of a tool's standard output has gone."""
    if not isinstance(error, BrokenPipeError) or sys.excepthook is not _report:
        return False
    poll = select.poll()  # another pipe may be broken
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _flush() -> None:
    """Write what Python would write at the end, where it prints an error if the reader has gone."""
    try:
        if sys.stdout is not None:  # it was closed before the start
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class Parser(argparse.ArgumentParser):
    """A parser of a tool's command line whose errors are one line."""

    def __init__(self, description: str | None, program: str | None = None) -> None:
        """description: printed as it is. program: the command; None: the file's name."""
        super().__init__(
            program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        """Print the line on rank 0, and end this process with code 2."""
        if os.environ.get("RANK", "0") == "0":
            print(f"rlhf_mc: error: {message} (--help lists the arguments)", file=sys.stderr)
        sys.exit(2)


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Return the argparse type of the whole numbers of this range."""

    def read(text: str) -> int:
        is_number = text.isascii() and text.removeprefix("-").isdigit() and len(text) < 20
        if not is_number or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is no whole number from {least} to {most}"
            )
        return int(text)

    return read


NODES = whole_number(1, 10_000)
GPUS_PER_NODE = whole_number(1, 128)
"""argparse types of a machine's size."""


def finite_number(least: float, what: str) -> Callable[[str], float]:
    """Return the argparse type of the finite numbers from `least` on. what: the unit, and an
    example."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number of {what}")
        return value

    return read
