"""The call of the user's code that blocks a worker process, from the stacks that Python's
faulthandler writes without the interpreter's lock. No torch here.
"""

from __future__ import annotations

import asyncio
import os
import re
import selectors
import threading
from concurrent import futures
from typing import NamedTuple

from rlhf_mc.config.masking import one_line

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_LOOP = os.path.dirname(asyncio.__file__)
_WAITING = (_LOOP, os.path.dirname(futures.__file__), threading.__file__, selectors.__file__)
"""Files in which a thread without a call waits."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_MOST_CALLS = 3


class _Frame(NamedTuple):
    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return one_line(f"{os.path.basename(self.file)}:{self.line} in {self.function}")


def describe_blocking_call(stacks: str) -> str:
    """Return the call in which the main thread is, as text, else the calls of other threads, one of
    which may hold the interpreter's lock; "" where there is none."""
    calls: dict[str, None] = {}
    for text in stacks.split("\n\n"):
        stack = [_Frame(*fields) for fields in _FRAME.findall(text)]
        if (call := _call(stack)) is None:
            continue
        if stack[-1].file == "<string>":  # the program that WorkerProcess starts
            return f", at {call}"
        calls[call] = None
    return f", at {', or '.join([*calls][:_MOST_CALLS])}" if calls else ""


def _call(stack: list[_Frame]) -> str | None:
    """Return the user's function that this package or an event loop has called, and the innermost
    frame if that is another one. stack: innermost frame first."""
    ours = (i for i, frame in enumerate(stack) if frame.file.startswith((_PACKAGE, _LOOP)))
    inner = stack[: next(ours, len(stack))]
    users = [frame for frame in inner if not frame.file.startswith((*_WAITING, "<frozen"))]
    if not users:
        return None
    return f"{users[-1]}" + (f" ({inner[0]})" if inner[0] != users[-1] else "")
