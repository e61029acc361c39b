"""A worker process that scores rows for a rank, and the rank's handle of it. It is not started by multiprocessing,
which would import the program's main module, torch included, in the worker; this one imports only what scoring.py
needs.
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
from rlhf_mc.rewards.scoring import Row, Scorer, name_of, row_error
from rlhf_mc.runtime.parent_death import exit_with_parent

_READY = -1
"""Message that the user's function is loaded, in place of a row's index."""
_ERROR = -2
"""Message of a UserError, in place of a row's index."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Worker:
    """The rank's handle of a worker process. One thread at a time may use it. Create it in a thread that lives as long
    as the rank: Linux ends the process with the thread that started it (runtime/parent_death.py)."""

    def __init__(self, cfg: CustomRewardFunctionConfig, timeout_seconds: float) -> None:
        self._cfg = cfg
        self._timeout = timeout_seconds
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
        """Wait until the reward function is loaded. Raise UserError if that fails."""
        if not self._loading:
            return
        name = name_of(self._cfg)
        try:
            if not self._wait_for_message():
                raise UserError(f"{name}: not imported after {self._timeout:g} s (reward.timeout_seconds)")
            self._receive()
        except (EOFError, OSError):
            raise UserError(f"{name}: importing it ended the worker process, {self._describe_end()}") from None
        self._loading = False

    def score(self, rows: Sequence[Row]) -> list[dict[str, float]]:
        """Return each row's scores. Raise UserError if a row cannot be scored, if none has been for timeout_seconds, or
        if the process has ended; the worker cannot be used after that."""
        self.load()
        scores: dict[int, dict[str, float]] = {}

        def unscored(problem: str) -> UserError:
            return row_error(self._cfg, next(row for i, row in enumerate(rows) if i not in scores), problem)

        try:
            self._connection.send(list(rows))
            while len(scores) < len(rows):
                if not self._wait_for_message():
                    raise unscored(f"no score after {self._timeout:g} s (reward.timeout_seconds)")
                i, score = self._receive()
                scores[i] = score
        except (EOFError, OSError):
            raise unscored(f"its worker process ended, {self._describe_end()}") from None
        return [scores[i] for i in range(len(rows))]

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _wait_for_message(self) -> bool:
        """Return whether a message arrives within the timeout. Raise EOFError if the process has ended.

        The pipe alone does not show that end: processes that the reward function started may hold its other end
        open."""
        deadline = time.monotonic() + self._timeout
        while (left := deadline - time.monotonic()) > 0:
            if self._connection.poll(min(1.0, left)):
                return True
            if self._process.poll() is not None and not self._connection.poll():
                raise EOFError
        return self._connection.poll()

    def _receive(self) -> tuple[int, dict[str, float]]:
        """Return a row's index, or _READY, and its scores. Raise UserError if the worker has sent one."""
        kind, content = self._connection.recv()
        if kind == _ERROR:
            raise UserError(content)
        return kind, content

    def _describe_end(self) -> str:
        """Wait for the end of the process. Return its exit code or signal as text."""
        code = self._process.wait()
        if code >= 0:
            return f"with exit code {code}"
        why = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"by {signal.Signals(-code).name}{why}"


def main(descriptor: int, parent: int) -> None:
    """Score the rows that the rank sends, until it ends. This is the worker process's program."""
    exit_with_parent(parent)
    connection = Connection(descriptor)
    # Schedulers and shells signal whole process groups; the rank alone acts on a signal.
    for number in _SIGNALS:
        signal.signal(number, lambda number, frame: None)
    # Processes that a reward function starts must have the default handling, since the function may want to end them.
    # So the signals that the rank blocks are unblocked here, and a forked child restores the default handlers (a new
    # program has them anyway).
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.register_at_fork(after_in_child=lambda: _restore_signals(connection))

    def send(kind: int, content: object) -> None:
        try:
            connection.send((kind, content))
        except OSError:  # the rank has ended
            os._exit(0)

    cfg: CustomRewardFunctionConfig | None = None
    try:
        cfg = connection.recv()
        scorer = Scorer(cfg)
        send(_READY, None)
        while True:
            scorer.score(connection.recv(), send)
    except EOFError:  # the rank has ended
        return
    except UserError as error:
        send(_ERROR, str(error))
    except BaseException as error:  # user code outside of the call: its own number class, a task not awaited
        if cfg is not None:
            send(_ERROR, f"{name_of(cfg)}: raised {describe_error(error)}")


def _restore_signals(connection: Connection) -> None:
    """Restore the default signal handlers in a forked child, and close its copy of the pipe."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    connection.close()
