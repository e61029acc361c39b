"""The parts that the heartbeat client and server share: the times, and a thread that can be woken
and ended."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from rlhf_mc.runtime.rank_status import Heartbeat, RankStatus, make_heartbeat

MAX_INTERVAL_SECONDS = 5.0
MAX_RECONNECT_SECONDS = 10.0
"""A closed connection counts as a lost rank after this time. It is long enough for the failed
rank's own report, and for the errors of the ranks that were connected to it, to come first."""


class HeartbeatThread:
    """The thread of a heartbeat client or server. The subclass starts `_thread` and defines
    `_run`."""

    def __init__(self, status: RankStatus, rank: int, token: str, timeout: float) -> None:
        """status: this rank's, written by the calling thread. token: the secret of this run.
        timeout: seconds; a rank that is silent for longer is lost."""
        self._status = status
        self._rank = rank
        self._token = token
        self._timeout = timeout
        self._interval = min(MAX_INTERVAL_SECONDS, timeout / 4)
        """Seconds between two heartbeats."""
        self._reconnect_seconds = min(MAX_RECONNECT_SECONDS, timeout)
        """Time after which a rank is lost that has been disconnected and has not connected
        again."""
        self._loop_thread = threading.get_ident()
        self._ended = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        status.on_move = self._wake_up
        self._last_turn = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="rlhf_mc heartbeat", daemon=True)

    def end(self) -> None:
        """End the thread; a client signs off first. Call it when the run is over on all ranks."""
        self._ended.set()
        self._wake_up()
        self._thread.join(2 * self._interval)

    def diagnosis(self) -> str:
        """Return one line that names the ranks that the others wait for, or an empty text if no
        rank stands out."""
        raise NotImplementedError

    def _run(self) -> None:
        raise NotImplementedError

    def _wake_up(self) -> None:
        """Let the thread take its next turn now."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full of earlier calls
            self._wake.send(b"x")

    def _was_frozen(self, now: float) -> bool:
        """Return whether this process has not run since the last turn: other ranks' silence then
        means nothing."""
        gap = now - self._last_turn
        self._last_turn = now
        return gap > 2 * self._interval + 1

    def _heartbeat(self) -> Heartbeat:
        """Return this rank's heartbeat."""
        return make_heartbeat(self._status, self._rank, self._loop_thread)
