"""A worker process that runs a user's code for a rank, and the rank's handle of it. It is not started by
multiprocessing, which would import the program's main module, torch included, in the worker; this one imports only what
its program needs. No torch here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from rlhf_mc.config.errors import UserError
from rlhf_mc.runtime import guard

IMPORT_SECONDS = 60.0
"""Least time that a worker has to import the user's file: the limit of a call may be shorter."""


class WorkerProcess:
    """The rank's handle of a worker process and of the guard around it (guard.py)."""

    def __init__(self, module: str, *arguments: Any) -> None:
        """Start the program `module`.main(descriptor, parent), and send it the arguments."""
        self.connection, theirs = Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\nfrom {module} import main\nmain({theirs.fileno()}, {os.getpid()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # torchrun kills the rank's group, and with it the guard
        )
        theirs.close()
        self.connection.send(arguments)

    def loaded(self, name: str, limit: float, setting: str) -> Any:
        """Wait for the first message, which the program sends once it has loaded the user's file. Raise UserError if
        loading fails or takes longer than `limit` seconds and IMPORT_SECONDS. name: of the user's code. setting: of the
        limit."""
        limit = max(limit, IMPORT_SECONDS)
        try:
            if not self.wait_for_message(limit):
                raise UserError(f"{name}: not imported after {limit:g} s ({setting})")
            return self.receive()
        except (EOFError, OSError):
            raise UserError(f"{name}: importing it ended the worker process, {self.describe_end()}") from None

    def wait_for_message(self, seconds: float) -> bool:
        """Return whether a message arrives within that time. Raise EOFError if the process has ended.

        The pipe alone does not show that end: processes that the user's code started may hold its other end open."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self.connection.poll(min(1.0, left)):
                return True
            if self._process.poll() is not None and not self.connection.poll():
                raise EOFError
        return self.connection.poll()

    def receive(self) -> Any:
        """Return a message. Raise a UserError that the worker has sent."""
        message = self.connection.recv()
        if isinstance(message, UserError):
            raise message
        return message

    def describe_end(self) -> str:
        """Wait for the end of the process. Return its exit code or signal as text."""
        code = self._process.wait()
        if code >= 0:
            return f"with exit code {code}"
        why = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"by {signal.Signals(-code).name}{why}"

    def close(self) -> None:
        """End the process and all that it has started."""
        self._process.send_signal(guard.END)
        try:
            self._process.wait(2 * guard.END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.connection.close()


def guarded_connection(descriptor: int, parent: int) -> tuple[Connection, Callable[[object], None]]:
    """Let a guard watch this process, which WorkerProcess has started, and set up its signals. Return the connection to
    the rank, and a function that sends to it, which ends the process once the rank has ended."""
    guard.guarded(parent, (descriptor,))
    with contextlib.suppress(OSError):  # where memory runs out, the kernel ends this process before a rank
        Path("/proc/self/oom_score_adj").write_text("1000")
    connection = Connection(descriptor)
    for number in guard.GROUP_SIGNALS:
        signal.signal(number, lambda number, frame: None)
    # Processes that the user's code starts must have the default handling, since it may want to end them. So the
    # signals that the rank blocks are unblocked here, and a forked child restores the default handlers (a new program
    # has them anyway).
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.register_at_fork(after_in_child=lambda: _restore_signals(connection))

    def send(message: object) -> None:
        try:
            connection.send(message)
        except OSError:  # the rank has ended
            os._exit(0)

    return connection, send


def _restore_signals(connection: Connection) -> None:
    """Restore the default signal handlers in a forked child, and close its copy of the pipe."""
    for number in guard.GROUP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    connection.close()
