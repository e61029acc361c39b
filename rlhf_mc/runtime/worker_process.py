"""A worker process that runs a user's code for a rank, and the rank's handle of it. It is not
started by multiprocessing, which would import the program's main module, torch included, in the
worker; this one imports only what its program needs. No torch here.

The worker writes MessagePack, which the rank decodes to the types that it expects, so that no
object of the user's code enters the rank. The rank pickles what it sends, since a row of a parquet
file may have dates and decimals. No worker has touched that.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from rlhf_mc.config.errors import LostProcessError, UserError
from rlhf_mc.runtime import guard
from rlhf_mc.runtime.blocking_call import describe_blocking_call

IMPORT_SECONDS = 60.0
"""Least time that a worker has to import the user's file: the limit of a call may be shorter."""
MOST_BYTES = 1 << 30
"""Size of a message of a worker."""
_STACKS_SECONDS = 1.0
"""Time for a blocked process to write its stacks."""


class WorkerEndedError(Exception):
    """The worker process has ended, or was ended because its message cannot be read."""

    def __init__(self, how: str, is_killed: bool = False) -> None:
        """is_killed: by SIGKILL, as the kernel does where memory runs out."""
        super().__init__(how)
        self.is_killed = is_killed


class MessageError(ValueError):
    """A message cannot be sent."""


class WorkerProcess:
    """The rank's handle of a worker process and of the guard around it (guard.py)."""

    def __init__(self, module: str, limit: float, messages: Any, *arguments: Any) -> None:
        """Start the program `module`.main, and send it the arguments. limit: largest number of
        seconds of a call of the user's code. messages: type of the messages after the first one."""
        self._limit = max(limit, IMPORT_SECONDS)
        self._messages = msgspec.msgpack.Decoder(messages)
        self._socket, theirs = socket.socketpair()
        # A process that stops within a message must not stop the rank's thread.
        seconds = struct.pack("ll", math.ceil(self._limit + IMPORT_SECONDS), 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, seconds)
        self.connection = Connection(os.dup(self._socket.fileno()))
        self._stacks = open(os.memfd_create("stacks"), "rb", buffering=0)  # noqa: SIM115
        descriptors = (theirs.fileno(), self._stacks.fileno())
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\nfrom {module} import "
            f"main\nmain({os.getpid()}, {descriptors})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # torchrun kills the rank's group, and with it the guard
        )
        theirs.close()
        with contextlib.suppress(OSError):  # `loaded` notes the end
            self.connection.send(arguments)

    def loaded(self, name: str, setting: str, type: Any) -> Any:
        """Wait for the first message, which the program sends once it has loaded the user's file.
        Raise UserError if loading fails or takes longer than the limit or IMPORT_SECONDS. name: of
        the user's code. setting: of the limit. type: of the message."""
        try:
            if not self.wait_for_message(self._limit):
                place = self.blocking_call()
                raise UserError(f"{name}: not imported after {self._limit:g} s ({setting}){place}")
            return self._received(msgspec.msgpack.Decoder(type))
        except WorkerEndedError as end:
            error = LostProcessError if end.is_killed else UserError
            raise error(f"{name}: importing it failed: {end}") from None

    def wait_for_message(self, seconds: float) -> bool:
        """Return whether a message arrives within that time. Raise WorkerEndedError if the process
        has ended.

        The pipe alone does not show that end: processes that the user's code started may hold its
        other end open."""
        deadline = time.monotonic() + seconds
        try:
            while (left := deadline - time.monotonic()) > 0:
                if self.connection.poll(min(1.0, left)):
                    return True
                if self._process.poll() is not None and not self.connection.poll():
                    raise self._end()
            return self.connection.poll()
        except OSError:
            raise self._end() from None

    def send(self, message: Any) -> None:
        """Send a message. Raise WorkerEndedError if the process has ended."""
        try:
            self.connection.send(message)
        except OSError:
            raise self._end() from None

    def receive(self) -> Any:
        """Return a message. Raise a UserError that the worker has sent, or WorkerEndedError."""
        return self._received(self._messages)

    def _received(self, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
        try:
            is_error, message = _ENVELOPE.decode(self.connection.recv_bytes(MOST_BYTES))
            if not is_error:
                return decoder.decode(message)
            text = msgspec.msgpack.decode(message, type=str)
        except (EOFError, ConnectionError):
            raise self._end() from None
        except (OSError, msgspec.MsgspecError, RecursionError) as error:
            self._process.send_signal(guard.END)
            raise WorkerEndedError(
                f"its worker process has sent no message that can be read ({error})"
            ) from None
        raise UserError(text)

    def _end(self) -> WorkerEndedError:
        """Wait for the end of the process. Return its exit code or signal as an error. End a
        process that has closed the pipe, or does not read from it, and still runs."""
        try:
            code = self._process.wait(guard.END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.send_signal(guard.END)
            return WorkerEndedError(
                "its worker process has closed the pipe to the rank, or does not read from it"
            )
        if code >= 0:
            return WorkerEndedError(f"its worker process ended, with exit code {code}")
        name = f"signal {-code}"  # a real-time signal has no other name
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
        is_killed = -code == signal.SIGKILL
        return WorkerEndedError(
            f"its worker process ended, by {name}{' (out of memory?)' * is_killed}", is_killed
        )

    def blocking_call(self) -> str:
        """Return where the process is in the user's code, ", at <file>:<line> in <function>", or ""
        where that is not known."""
        self._process.send_signal(guard.STACKS)
        deadline = time.monotonic() + _STACKS_SECONDS
        size = 0
        stacks = self._stacks.fileno()
        while time.monotonic() < deadline and (size == 0 or size < os.fstat(stacks).st_size):
            size = os.fstat(stacks).st_size
            time.sleep(0.02)
        return describe_blocking_call(os.pread(stacks, size, 0).decode(errors="replace"))

    def end(self) -> None:
        """End the process and all that it has started, and what threads receive or send."""
        self._process.send_signal(guard.END)
        try:
            self._process.wait(2 * guard.END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):  # the other end is closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the process, and free what the handle has. No thread may use it any more."""
        self.end()
        self._socket.close()
        self.connection.close()
        self._stacks.close()


_ENVELOPE = msgspec.msgpack.Decoder(tuple[bool, msgspec.Raw])
"""Decoder of (the message is a UserError's text, the message)."""


def guarded_connection(
    parent: int, descriptors: tuple[int, int]
) -> tuple[Connection, Callable[..., None]]:
    """Let a guard watch this process, which WorkerProcess has started, and set up its signals.
    Return the connection to the rank, and send(message, most=MOST_BYTES), which ends the process
    once the rank has ended, and raises MessageError for a message that cannot be sent."""
    guard.guarded(parent, descriptors)
    # where memory runs out, the kernel ends this process before a rank
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    connection = Connection(descriptors[0])
    for number in guard.GROUP_SIGNALS:
        signal.signal(number, lambda number, frame: None)
    faulthandler.register(guard.STACKS, descriptors[1], all_threads=True)
    # Processes that the user's code starts must have the default handling, since it may want to end
    # them. So the signals that the rank blocks are unblocked here, and a forked child restores the
    # default handlers (a new program has them anyway).
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.register_at_fork(after_in_child=lambda: _restore_signals(connection))

    def send(message: object, most: int = MOST_BYTES) -> None:
        encoded = _encoded(message, most)
        try:
            connection.send_bytes(encoded)
        except OSError:  # the rank has ended
            os._exit(0)

    return connection, send


def _encoded(message: object, most: int) -> bytes:
    is_error = isinstance(message, UserError)
    if is_error:
        message = str(message).encode(errors="replace").decode()
    try:
        encoded = msgspec.msgpack.encode((is_error, message))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"cannot be sent ({error})") from error
    if len(encoded) > most:
        raise MessageError(f"has {len(encoded):,} bytes; at most {most:,} are allowed")
    return encoded


def _restore_signals(connection: Connection) -> None:
    """Restore the default signal handlers in a forked child, and close its copy of the pipe."""
    for number in guard.GROUP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    connection.close()
