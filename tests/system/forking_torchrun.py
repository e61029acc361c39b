"""torchrun, with ranks that are forked from its agent and so need not import the libraries. Started
by test_cli.py in a process of forked.py."""

from __future__ import annotations

import multiprocessing as mp
import signal
import subprocess
from pathlib import Path

from forked import _become
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.run import main

HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals for which the agent has handlers, besides SIGINT."""


class Rank:
    """The part of Popen's interface that torchrun uses."""

    def __init__(self, arguments: tuple[str, ...], env: dict[str, str]) -> None:
        self._process = mp.get_context("fork").Process(target=_run, args=(arguments, env))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)


def _run(arguments: tuple[str, ...], env: dict[str, str]) -> None:
    """Run the module of the command `python ... -m MODULE ...`, with the signals' handlers of a new
    process."""
    for number in HANDLED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stdout, stderr = (Path(f"/proc/self/fd/{descriptor}") for descriptor in (1, 2))
    _become(list(arguments[arguments.index("-m") :]), stdout, stderr, env, None)


if __name__ == "__main__":
    SubprocessHandler._popen = lambda self, args, env: Rank(args, env)
    main()
