"""The heartbeat server of rank 0: it receives the heartbeats of all ranks, answers who the
stragglers are, and ends the run if a rank is lost. The conclusions are drawn in
failure_detector.py.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time

from rlhf_mc import json_files
from rlhf_mc.runtime.console import print_line
from rlhf_mc.runtime.exit_codes import exit_from_thread
from rlhf_mc.runtime.failure_detector import FailureDetector
from rlhf_mc.runtime.heartbeat_thread import HeartbeatThread
from rlhf_mc.runtime.rank_status import Heartbeat, RankStatus

MAX_LINE_BYTES = 1 << 16
CHECK_SECONDS = 0.5
"""Time between two checks for lost ranks: not at each heartbeat, since there may be thousands of
ranks."""
TOKEN_SECONDS = 5.0
"""A connection that has not sent the run's token by then is closed. A rank sends it at once, with
its first line."""
MAX_UNAUTHENTICATED = 64
"""Connections without the token, beyond one for each rank: with more, the oldest is closed."""


class HeartbeatServer(HeartbeatThread):
    """The connections of all other ranks."""

    def __init__(
        self,
        status: RankStatus,
        token: str,
        timeout: float,
        listener: socket.socket,
        hosts: list[str],
        straggler_seconds: float,
    ) -> None:
        """hosts: the host name of each rank. straggler_seconds: a rank that the others have waited
        for this long is named in a warning; after twice as long without progress of the ranks that
        another pool waits for the run ends."""
        super().__init__(status, 0, token, timeout)
        self._listener = listener
        self._detector = FailureDetector(hosts, self._interval, time.monotonic())
        self._straggler_seconds = straggler_seconds
        self._received: dict[socket.socket, bytes] = {}
        """Received start of an incomplete line, by open connection."""
        self._ranks: dict[socket.socket, int] = {}
        self._unauthenticated: dict[socket.socket, float] = {}
        """Connections that have not sent the token, with the time when they were accepted; the
        oldest first."""
        self._selector = selectors.DefaultSelector()
        self._thread.start()

    def diagnosis(self) -> str:
        time.sleep(min(1.0, self._interval))  # other ranks may have failed at this very moment
        return self._detector.stragglers(time.monotonic())

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # a failure of this thread must not end a run that works
            print_line(
                f"warning: the heartbeat server has failed ({type(error).__name__}: {error}); "
                "the run continues without heartbeats"
            )
            self._send_to_all({"server_failed": "yes"})

    def _serve(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        next_check = 0.0
        while not self._ended.is_set():
            events = self._selector.select(min(CHECK_SECONDS, self._interval))
            now = time.monotonic()
            if self._was_frozen(now):
                self._detector.restart_timeouts(now)
            self._detector.received(self._heartbeat(), now)
            for key, _ in events:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                elif isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj, now)
            self._close_unauthenticated(now)
            if now >= next_check:
                self._check_ranks(now)
                next_check = now + min(CHECK_SECONDS, self._interval)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # the client has closed it, or no file descriptor is left: a rank connects again
            time.sleep(0.1)
            return
        connection.setblocking(False)
        self._received[connection] = b""
        self._unauthenticated[connection] = time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ)

    def _close_unauthenticated(self, now: float) -> None:
        """Close the connections that have not sent the token in time, and the oldest where there
        are too many."""
        limit = MAX_UNAUTHENTICATED + self._detector.num_ranks
        for connection, accepted in list(self._unauthenticated.items()):
            if now - accepted > TOKEN_SECONDS or len(self._unauthenticated) > limit:
                self._close(connection, now)

    def _read(self, connection: socket.socket, now: float) -> None:
        """Read what has arrived and answer each line. Close the connection if a line is not a
        rank's."""
        try:
            part = connection.recv(MAX_LINE_BYTES)
            *lines, rest = (self._received[connection] + part).split(b"\n")
            if not part or len(rest) > MAX_LINE_BYTES:
                raise ConnectionResetError
            self._received[connection] = rest
            for line in lines:
                message = json_files.parse(line)
                if message["token"] != self._token:
                    raise ConnectionResetError
                self._unauthenticated.pop(connection, None)
                heartbeat = Heartbeat(**message["heartbeat"])
                self._ranks[connection] = heartbeat.rank
                self._detector.received(heartbeat, now)
                if message["signs_off"]:
                    self._detector.signed_off(heartbeat.rank)
                answer = {"stragglers": self._detector.stragglers(now)} if message["asks"] else {}
                connection.sendall(json.dumps(answer).encode() + b"\n")
        except Exception:  # an unauthenticated client may send anything
            self._close(connection, now)

    def _close(self, connection: socket.socket, now: float) -> None:
        self._selector.unregister(connection)
        del self._received[connection]
        self._unauthenticated.pop(connection, None)
        connection.close()
        if (
            rank := self._ranks.pop(connection, None)
        ) is not None and rank not in self._ranks.values():
            self._detector.disconnected(rank, now)

    def _check_ranks(self, now: float) -> None:
        """Warn of stragglers, and end the run if a rank is lost."""
        if warning := self._detector.straggler_warning(now, self._straggler_seconds):
            print_line(f"warning: {warning}")
        lost = self._detector.lost(now, self._timeout, self._reconnect_seconds)
        lost = lost or self._detector.stuck(now, 2 * self._straggler_seconds)
        if not lost or self._ended.is_set():
            return
        self._send_to_all({"lost": lost})
        # the others end for this reason, not because rank 0 has ended
        time.sleep(min(1.0, self._interval))
        exit_from_thread(f"{lost}; this rank was {self._heartbeat().position()}")

    def _send_to_all(self, message: dict[str, str]) -> None:
        for connection in self._received:
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(message).encode() + b"\n")
