"""The program as a rank runs it, with its phases and writes reported through a pipe, so that a test
can kill it at any of them. Started by test_kill_anywhere.py. EVENTS names the pipe."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlhf_mc.checkpoint import directory, training_tensors
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.run_files import OBSERVATIONS

_pipe = os.open(os.environ["EVENTS"], os.O_WRONLY)
_rank = os.environ["RANK"]


def report(event: str) -> None:
    os.write(_pipe, f"{_rank} {event}\n".encode())  # short lines of several writers stay whole


def reporting(function: Callable[..., Any], event: str) -> Callable[..., Any]:
    def report_and_call(*args: Any, **kwargs: Any) -> Any:
        report(event)
        return function(*args, **kwargs)

    return report_and_call


def open_to_halves(path: Path, mode: str = "r", **kwargs: Any) -> Any:
    """Open a file. What is appended to the journal of observations is written in halves, with an
    event between them."""
    file = open(path, mode, **kwargs)  # noqa: SIM115
    write = file.write

    def write_halves(text: str) -> None:
        write(text[: len(text) // 2])
        file.flush()
        report(OBSERVATIONS)
        time.sleep(0.005)
        write(text[len(text) // 2 :])

    if path.parent.name == OBSERVATIONS and mode == "a":
        file.write = write_halves  # type: ignore[method-assign]
    return file


def main() -> None:
    original = PhaseTimer.phase

    @contextlib.contextmanager
    def phase(self: PhaseTimer, name: str) -> Iterator[None]:
        report(name)
        with original(self, name):
            yield

    PhaseTimer.phase = phase  # type: ignore[method-assign]
    training_tensors.TensorWriter._write = reporting(
        training_tensors.TensorWriter._write, "writing"
    )  # type: ignore[method-assign]
    directory.commit = reporting(directory.commit, "commit")
    directory.remove = reporting(directory.remove, "remove")
    directory.verify = reporting(directory.verify, "verify")
    Path.open = open_to_halves  # type: ignore[method-assign, assignment]
    sys.argv = ["rlhf_mc", *sys.argv[1:]]
    runpy.run_module("rlhf_mc", run_name="__main__")


if __name__ == "__main__":
    main()
