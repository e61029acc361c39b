"""Each rank tells rank 0 where it is, in every phase and every few seconds, over a connection of its own: collectives
and torch's store may be what is stuck. A rank that falls silent or is gone ends all others, with a line that names it.
What follows from what was heard is decided in rank_status.py; what else a failing rank says is in exit_codes.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rlhf_mc.config.errors import UserError, reason_of
from rlhf_mc.runtime.console import say
from rlhf_mc.runtime.exit_codes import end_from_a_thread
from rlhf_mc.runtime.rank_status import Heartbeat, RankStatus, Register, describe_error, heartbeat_of
from rlhf_mc.topology.consensus import gather_objects

LONGEST_INTERVAL_SECONDS = 5.0
GONE_AFTER_SECONDS = 10.0
"""A connection that was cut is made again within this time, or its other end is gone. The report of a rank that failed,
and the errors of those that it was connected to, come first."""
CONNECT_SECONDS = 20.0
LONGEST_LINE = 1 << 16
TOKEN_SECONDS = 5.0
"""A connection that has not shown the run's token by then is closed. A rank shows it with its first line, at once."""
MOST_STRANGERS = 64
"""Connections without the token, beyond one of each rank: with more, the one that has waited longest is closed."""


@contextlib.contextmanager
def watching(place: RankStatus, rank: int, timeout_seconds: float, slow_seconds: float) -> Iterator[None]:
    """Watches over the ranks while the body runs, and tells an error that leaves it what is known of the other ranks.

    timeout_seconds: a rank that is not heard of for so long ends the run. slow_seconds: a rank that the others have
    waited for so long is named in a warning. Every rank must enter it, once the world is connected."""
    watchdog = _start(place, rank, timeout_seconds, slow_seconds)
    if watchdog is None:
        yield
        return
    try:
        yield
    except UserError:  # the same on every rank: nobody waits for another
        raise
    except Exception as error:
        collective, at = describe_error(error)
        error.add_note(f"in {collective}, called from {at}" if collective else f"at {at}")
        error.add_note(watchdog.diagnosis())
        raise
    watchdog.end()


def _start(place: RankStatus, rank: int, timeout_seconds: float, slow_seconds: float) -> Listener | Teller | None:
    """This rank's part; None where it is alone, or where the ranks do not reach rank 0 over TCP."""
    everyone = gather_objects((socket.gethostname(), _machine(), _addresses_of_rank_0()))
    hosts = [host for host, _, _ in everyone]
    if len(hosts) == 1:
        return None
    server, failure = None, ""
    if rank == 0:
        try:
            server = _listen(_to_bind([(machine, found) for _, machine, found in everyone]))
        except OSError as error:
            failure = reason_of(error)
    # A stranger's line carries another token, and is not read.
    mine = (server.getsockname()[:2] if server else ("", 0), secrets.token_hex(16))
    (host, port), token = gather_objects(mine)[0]
    connection: socket.socket | None = None
    if host and rank != 0:
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        except OSError as error:
            failure = reason_of(error)
    failures = {r: text for r, text in enumerate(gather_objects(failure)) if text}
    if failures:
        first, text = next(iter(failures.items()))
        what = f"does not reach rank 0 at {host}:{port}" if first else "cannot listen at MASTER_ADDR"
        if rank == 0:
            say(f"warning: rank {first} {what} ({text}); no watch is kept")
        for opened in (server, connection):
            if opened is not None:
                opened.close()
        return None
    interval = min(LONGEST_INTERVAL_SECONDS, timeout_seconds / 4)
    if server is not None:
        register = Register(hosts, interval, time.monotonic())
        return Listener(place, token, interval, timeout_seconds, server, register, slow_seconds)
    assert connection is not None
    return Teller(place, token, interval, timeout_seconds, rank, hosts[0], (host, port), connection)


def _machine() -> str:
    """Return a text that is equal for processes which reach each other over the loopback interface."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def _addresses_of_rank_0() -> list[str]:
    """Return the addresses that MASTER_ADDR has here."""
    try:
        found = socket.getaddrinfo(os.environ.get("MASTER_ADDR", "localhost"), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(at[4][0]) for at in found))


def _to_bind(everyone: list[tuple[str, list[str]]]) -> list[str]:
    """Return the addresses to try, from each rank's machine and what MASTER_ADDR is there, rank 0 first.

    Where there are other machines, theirs: rank 0's own may be a loopback address, which they cannot reach."""
    here = everyone[0][0]
    elsewhere = [address for machine, addresses in everyone if machine != here for address in addresses]
    return list(dict.fromkeys(elsewhere or everyone[0][1]))


def _listen(addresses: list[str]) -> socket.socket:
    """Listen at the first of the addresses that is this machine's. OSError where none is."""
    failure = OSError("MASTER_ADDR has no address")
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, 0), family=family, backlog=4096)
        except OSError as error:
            failure = error
    raise failure


class _Thread:
    """What both ends have in common: a thread that can be woken and ended."""

    def __init__(self, place: RankStatus, token: str, interval: float, timeout: float) -> None:
        self._place, self._token, self._interval, self._timeout = place, token, interval, timeout
        self._loop_thread = threading.get_ident()
        self._ended = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        place.on_move = self._wake_up
        self._last_turn = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="rlhf_mc watchdog", daemon=True)

    def end(self) -> None:
        """From here on this rank's silence means nothing. Call it when the run is over on all ranks."""
        self._ended.set()
        self._wake_up()
        self._thread.join(2 * self._interval)

    def _wake_up(self) -> None:
        """Has the thread take its next turn now."""
        with contextlib.suppress(BlockingIOError):  # it has been woken often enough
            self._wake.send(b"x")

    def _run(self) -> None:
        raise NotImplementedError

    def _was_frozen(self, now: float) -> bool:
        """Whether this very process did not run since the last turn: the time then says nothing of the others."""
        gap, self._last_turn = now - self._last_turn, now
        return gap > 2 * self._interval + 1

    def _beat(self, rank: int) -> Heartbeat:
        return heartbeat_of(self._place, rank, self._loop_thread)


class Teller(_Thread):
    """Every rank but the first: reports, and watches over rank 0."""

    def __init__(
        self,
        place: RankStatus,
        token: str,
        interval: float,
        timeout: float,
        rank: int,
        host: str,
        address: tuple[str, int],
        connection: socket.socket,
    ) -> None:
        super().__init__(place, token, interval, timeout)
        self._rank, self._first, self._address = rank, f"rank 0 ({host})", address
        self._connection: socket.socket | None = connection
        self._received = b""
        self._asks, self._behind = False, ""
        self._last_answer = time.monotonic()
        self._cut_since: float | None = None
        self._answered = threading.Event()
        self._thread.start()

    def diagnosis(self) -> str:
        """Who keeps the others waiting, as far as is known; empty where nobody stands out."""
        self._asks = True
        self._wake_up()
        if self._answered.wait(2.0) or self._ended.is_set():
            return self._behind
        return f"{self._first} has not answered for {time.monotonic() - self._last_answer:.0f} s"

    def _run(self) -> None:
        while not self._ended.is_set():
            now = time.monotonic()
            if self._was_frozen(now):
                self._last_answer, self._cut_since = now, None
            try:
                if self._connection is None:
                    self._connection = socket.create_connection(self._address, timeout=self._interval)
                    self._received = b""
                self._connection.sendall(self._line())
                self._read_for_an_interval(self._connection)
            except OSError:
                if self._connection is not None:
                    self._connection.close()
                self._connection = None
                self._cut_since = self._cut_since or now
                self._ended.wait(min(self._interval, 1.0))
            self._check_rank_0()
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.sendall(self._line(goodbye=True))

    def _read_for_an_interval(self, connection: socket.socket) -> None:
        """Or until woken."""
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
                        self._read(json.loads(line))
                if self._woken in ready:
                    self._woken.recv(4096)
                    return

    def _read(self, answer: dict[str, str]) -> None:
        if "verdict" in answer:
            end_from_a_thread(answer["verdict"], say=False)  # rank 0 says it
        if "unwatched" in answer:
            self._ended.set()
        self._last_answer, self._cut_since = time.monotonic(), None
        if "behind" in answer:
            self._behind = answer["behind"]
            self._answered.set()

    def _check_rank_0(self) -> None:
        now = time.monotonic()
        problem = ""
        if self._cut_since is not None and now - self._cut_since > min(GONE_AFTER_SECONDS, self._timeout):
            problem = "is gone: its process has ended"
        elif now - self._last_answer > self._timeout:
            problem = f"has not been heard of for {now - self._last_answer:.0f} s"
        if problem and not self._ended.is_set():
            # Nobody is left to choose one speaker.
            end_from_a_thread(f"{self._first} {problem}; this rank was {self._beat(self._rank).where()}")

    def _line(self, goodbye: bool = False) -> bytes:
        beat = asdict(self._beat(self._rank))
        line = {"token": self._token, "goodbye": goodbye, "asks": self._asks, "beat": beat}
        return json.dumps(line).encode() + b"\n"


class Listener(_Thread):
    """Rank 0: hears the others, tells them who is behind, and decides when one of them is lost."""

    def __init__(
        self,
        place: RankStatus,
        token: str,
        interval: float,
        timeout: float,
        server: socket.socket,
        register: Register,
        slow_seconds: float,
    ) -> None:
        super().__init__(place, token, interval, timeout)
        self._server, self._register, self._slow_seconds = server, register, slow_seconds
        self._received: dict[socket.socket, bytes] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._strangers: dict[socket.socket, float] = {}
        """Connections without the token yet, and when they came; the oldest first."""
        self._selector = selectors.DefaultSelector()
        self._thread.start()

    def diagnosis(self) -> str:
        """Who keeps the others waiting, as far as is known; empty where nobody stands out."""
        time.sleep(min(1.0, self._interval))  # the others may have failed this very moment
        return self._register.behind(time.monotonic())

    def _run(self) -> None:
        try:
            self._listen()
        except Exception as error:  # whatever it is: silence of this thread must not end a run that is well
            say(f"warning: the watchdog has failed ({type(error).__name__}: {error}); no watch is kept")
            self._tell_all({"unwatched": "yes"})

    def _listen(self) -> None:
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        next_judgement = 0.0
        while not self._ended.is_set():
            events = self._selector.select(min(0.5, self._interval))
            now = time.monotonic()
            if self._was_frozen(now):
                self._register.forgive(now)
            self._register.heard(self._beat(0), now)
            for key, _ in events:
                if key.fileobj is self._server:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj, now)
            self._close_strangers(now)
            if now >= next_judgement:  # not at each line: there may be thousands of ranks
                self._judge(now)
                next_judgement = now + min(0.5, self._interval)

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:  # it has hung up, or there is no descriptor left: it will call again
            time.sleep(0.1)
            return
        connection.setblocking(False)
        self._received[connection] = b""
        self._strangers[connection] = time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ)

    def _close_strangers(self, now: float) -> None:
        most = MOST_STRANGERS + self._register.num_ranks
        for connection, came in list(self._strangers.items()):
            if now - came > TOKEN_SECONDS or len(self._strangers) > most:
                self._close(connection, now)

    def _hear(self, connection: socket.socket, now: float) -> None:
        """Reads what has come and answers each line; anything that is not a rank's line closes the connection."""
        try:
            part = connection.recv(LONGEST_LINE)
            *lines, rest = (self._received[connection] + part).split(b"\n")
            if not part or len(rest) > LONGEST_LINE:
                raise ConnectionResetError
            self._received[connection] = rest
            for line in lines:
                told = json.loads(line)
                if told["token"] != self._token:
                    raise ConnectionResetError
                self._strangers.pop(connection, None)
                beat = Heartbeat(**told["beat"])
                self._ranks[connection] = beat.rank
                self._register.heard(beat, now)
                if told["goodbye"]:
                    self._register.said_goodbye(beat.rank)
                answer = {"behind": self._register.behind(now)} if told["asks"] else {}
                connection.sendall(json.dumps(answer).encode() + b"\n")
        except Exception:  # anybody may have written anything
            self._close(connection, now)

    def _close(self, connection: socket.socket, now: float) -> None:
        self._selector.unregister(connection)
        del self._received[connection]
        self._strangers.pop(connection, None)
        connection.close()
        if (rank := self._ranks.pop(connection, None)) is not None and rank not in self._ranks.values():
            self._register.cut_off(rank, now)

    def _judge(self, now: float) -> None:
        if slow := self._register.slow(now, self._slow_seconds):
            say(f"warning: {slow}")
        verdict = self._register.verdict(now, self._timeout, GONE_AFTER_SECONDS)
        if not verdict or self._ended.is_set():
            return
        self._tell_all({"verdict": verdict})
        time.sleep(min(1.0, self._interval))  # the verdict, not the loss of this rank, is to be their reason
        end_from_a_thread(f"{verdict}; this rank was {self._beat(0).where()}")

    def _tell_all(self, message: dict[str, str]) -> None:
        for connection in self._received:
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(message).encode() + b"\n")
