"""The heartbeat client of every rank but 0: it reports to rank 0, and ends this process if rank 0
is lost or says that another rank is.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from dataclasses import asdict

from rlhf_mc import json_files
from rlhf_mc.runtime.exit_codes import exit_from_thread
from rlhf_mc.runtime.heartbeat_thread import HeartbeatThread
from rlhf_mc.runtime.rank_status import SILENT_PHASES, RankStatus

DIAGNOSIS_SECONDS = 2.0
"""Time that rank 0 has for the answer to `diagnosis`."""


class HeartbeatClient(HeartbeatThread):
    """The connection to rank 0, made again if it is lost."""

    def __init__(
        self,
        status: RankStatus,
        rank: int,
        token: str,
        timeout: float,
        host: str,
        address: tuple[str, int],
        connection: socket.socket,
    ) -> None:
        """host: rank 0's name, for messages. connection: an open one to the address of rank 0's
        server."""
        super().__init__(status, rank, token, timeout)
        self._rank_0 = f"rank 0 ({host})"
        self._address = address
        self._connection: socket.socket | None = connection
        self._received = b""
        """Received start of an incomplete line."""
        self._asks = False
        self._stragglers = ""
        self._answered = threading.Event()
        self._last_answer = time.monotonic()
        self._disconnected_at: float | None = None
        self._thread.start()

    def diagnosis(self) -> str:
        self._asks = True
        self._wake_up()
        if self._answered.wait(DIAGNOSIS_SECONDS) or self._ended.is_set():
            return self._stragglers
        return f"{self._rank_0} has not answered for {time.monotonic() - self._last_answer:.0f} s"

    def _run(self) -> None:
        while not self._ended.is_set():
            now = time.monotonic()
            self._excuse_silence(now)
            try:
                if self._connection is None:
                    self._connection = socket.create_connection(
                        self._address, timeout=self._interval
                    )
                    self._received = b""
                self._connection.sendall(self._line())
                self._read_for_one_interval(self._connection)
            except OSError:
                if self._connection is not None:
                    self._connection.close()
                self._connection = None
                self._disconnected_at = self._disconnected_at or now
                self._ended.wait(min(self._interval, 1.0))
            self._check_rank_0()
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.sendall(self._line(signs_off=True))

    def _read_for_one_interval(self, connection: socket.socket) -> None:
        """Read rank 0's answers for one interval, or until this thread is woken. Raise OSError if
        disconnected."""
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            deadline = time.monotonic() + self._interval
            while (left := deadline - time.monotonic()) > 0:
                ready = [key.fileobj for key, _ in selector.select(left)]
                if connection in ready:
                    part = connection.recv(4096)
                    if not part:
                        raise ConnectionResetError
                    *lines, self._received = (self._received + part).split(b"\n")
                    for line in lines:
                        self._handle(json_files.parse(line))
                if self._woken in ready:
                    self._woken.recv(4096)
                    return

    def _handle(self, answer: dict[str, str]) -> None:
        """Act on one answer of rank 0."""
        if "lost" in answer:
            exit_from_thread(answer["lost"], is_printed=False)  # rank 0 prints it
        if "server_failed" in answer:
            self._ended.set()
        self._last_answer = time.monotonic()
        self._disconnected_at = None
        if "stragglers" in answer:
            self._stragglers = answer["stragglers"]
            self._answered.set()

    def _excuse_silence(self, now: float) -> None:
        """Count rank 0's silence from now on, if this process was not running, or if rank 0 may be
        silent."""
        if self._was_frozen(now):
            self._last_answer = now
            self._disconnected_at = None
        if self._status.phases[-1] in SILENT_PHASES:  # all ranks enter them together, rank 0 too
            self._last_answer = now

    def _check_rank_0(self) -> None:
        """End this process if rank 0 is lost."""
        now = time.monotonic()
        self._excuse_silence(now)
        problem = ""
        if (
            self._disconnected_at is not None
            and now - self._disconnected_at > self._reconnect_seconds
        ):
            problem = "is gone: its process has ended"
        elif now - self._last_answer > self._timeout:
            problem = f"has sent no heartbeat for {now - self._last_answer:.0f} s"
        if problem and not self._ended.is_set():
            # Every rank prints it: without rank 0 they cannot agree on one.
            exit_from_thread(
                f"{self._rank_0} {problem}; this rank was {self._heartbeat().position()}"
            )

    def _line(self, signs_off: bool = False) -> bytes:
        """Return one message to rank 0."""
        heartbeat = asdict(self._heartbeat())
        message = {
            "token": self._token,
            "signs_off": signs_off,
            "asks": self._asks,
            "heartbeat": heartbeat,
        }
        return json.dumps(message).encode() + b"\n"
