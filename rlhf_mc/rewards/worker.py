"""A process that scores rows for a rank, and the rank's end of it. Not multiprocessing's: that imports the program's
main module, torch included, in each process it starts; this one takes what scoring.py needs and no more.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import CustomRewardFunctionConfig
from rlhf_mc.rewards.custom import describe_error
from rlhf_mc.rewards.scoring import Row, Scorer, error_at, name_of
from rlhf_mc.runtime.parent_death import exit_with_parent

_READY = -1
"""Sent in place of a row's number once the user's function is loaded."""
_ERROR = -2
"""Sent in place of a row's number, with the line of a UserError."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


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
            [sys.executable, "-u", "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
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
            if not self._has_spoken():
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
                if not self._has_spoken():
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

    def _has_spoken(self) -> bool:
        """Waits for a message; False once the time is over. EOFError where the process is gone, which its end of the
        pipe alone does not tell: processes that the reward function started may hold that too."""
        deadline = time.monotonic() + self._timeout
        while (left := deadline - time.monotonic()) > 0:
            if self._connection.poll(min(1.0, left)):
                return True
            if self._process.poll() is not None and not self._connection.poll():
                raise EOFError
        return self._connection.poll()

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
    exit_with_parent(parent)
    connection = Connection(descriptor)
    # Schedulers and shells signal whole process groups. What a signal means is for the rank to decide.
    for number in _SIGNALS:
        signal.signal(number, lambda number, frame: None)
    # Not so for the processes that a reward function starts, which it may want to end after a time: nothing of this is
    # theirs, nor what the rank blocks since it waits for it itself. (A program starts without handlers anyway.)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.register_at_fork(after_in_child=lambda: _release(connection))

    def send(what: int, content: object) -> None:
        try:
            connection.send((what, content))
        except OSError:  # the rank is gone
            os._exit(0)

    cfg: CustomRewardFunctionConfig | None = None
    try:
        cfg = connection.recv()
        scorer = Scorer(cfg)
        send(_READY, None)
        while True:
            scorer.score(connection.recv(), send)
    except EOFError:  # the rank is gone
        return
    except UserError as error:
        send(_ERROR, str(error))
    except BaseException as error:  # the user's code beside the call: a number of its own, a task that it left
        if cfg is not None:
            send(_ERROR, f"{name_of(cfg)}: raised {describe_error(error)}")


def _release(connection: Connection) -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    connection.close()
