"""A process that scores rows for a rank, and the rank's end of it. Not multiprocessing's: that imports the program's
main module, torch included, in each process it starts; this one takes what scoring.py needs and no more.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import CustomRewardFunctionConfig
from rlhf_mc.rewards.scoring import Row, Scorer, error_at, name_of

_READY = -1
"""Sent in place of a row's number once the user's function is loaded."""
_ERROR = -2
"""Sent in place of a row's number, with the line of a UserError."""
_PR_SET_PDEATHSIG = 1


class Worker:
    """The rank's end. One thread at a time may use it; it must be made in a thread that lives as long as the rank
    (Linux ends the process with the thread that started it)."""

    def __init__(self, cfg: CustomRewardFunctionConfig, timeout_seconds: float) -> None:
        self._cfg, self._timeout = cfg, timeout_seconds
        self._connection, theirs = Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from rlhf_mc.rewards.worker import main\nmain({theirs.fileno()}, {os.getpid()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._loading = True
        self._connection.send(cfg)

    def load(self) -> None:
        """Waits until the reward function is loaded. UserError where it cannot be."""
        if not self._loading:
            return
        name = name_of(self._cfg)
        try:
            if not self._connection.poll(self._timeout):
                raise UserError(f"{name}: not imported after {self._timeout:g} s (reward.timeout_seconds)")
            self._receive()
        except (EOFError, OSError):
            raise UserError(f"{name}: importing it ended the worker process, {self._ended()}") from None
        self._loading = False

    def score(self, rows: Sequence[Row]) -> list[dict[str, float]]:
        """Each row's scores. UserError, after which the worker is of no more use, where a row cannot be scored, where
        none has been for timeout_seconds, and where the process is gone."""
        self.load()
        scores: dict[int, dict[str, float]] = {}

        def unscored(what: str) -> UserError:
            return error_at(self._cfg, next(row for i, row in enumerate(rows) if i not in scores), what)

        try:
            self._connection.send(list(rows))
            while len(scores) < len(rows):
                if not self._connection.poll(self._timeout):
                    raise unscored(f"no score after {self._timeout:g} s (reward.timeout_seconds)")
                i, score = self._receive()
                scores[i] = score
        except (EOFError, OSError):
            raise unscored(f"its worker process ended, {self._ended()}") from None
        return [scores[i] for i in range(len(rows))]

    def close(self) -> None:
        """Ends the process, whatever it is at."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _receive(self) -> tuple[int, dict[str, float]]:
        what, content = self._connection.recv()
        if what == _ERROR:
            raise UserError(content)
        return what, content

    def _ended(self) -> str:
        code = self._process.wait()
        if code >= 0:
            return f"with exit code {code}"
        why = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"by {signal.Signals(-code).name}{why}"


def main(descriptor: int, parent: int) -> None:
    """The worker: scores what comes until the rank is gone."""
    _end_with(parent)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        # Schedulers and shells signal whole process groups. What a signal means is for the rank to decide. A handler,
        # not SIG_IGN, which the processes that a reward function starts would inherit.
        signal.signal(getattr(signal, name), lambda number, frame: None)
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):  # the rank is gone
        try:
            scorer = Scorer(connection.recv())
            connection.send((_READY, None))
            while True:
                scorer.score(connection.recv(), lambda i, score: connection.send((i, score)))
        except UserError as error:
            connection.send((_ERROR, str(error)))


def _end_with(parent: int) -> None:
    """Lets the kernel kill this process as soon as the rank is gone, however the rank ends. Where the system knows
    no such thing, the next message that cannot be sent or received ends it."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before that
        os._exit(0)
