"""Functions that the ranks run in test_heartbeat.py: real threads and connections, but exits are
only recorded."""

from __future__ import annotations

import ctypes
import json
import socket
import time
from typing import Any, NoReturn
from unittest import mock

import torch.distributed as dist
from runs import wait_until

from rlhf_mc.config.schema import TrainerConfig
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.runtime import heartbeat, heartbeat_client, heartbeat_server, heartbeat_thread
from rlhf_mc.runtime.heartbeat_client import HeartbeatClient
from rlhf_mc.runtime.heartbeat_server import MAX_UNAUTHENTICATED, HeartbeatServer
from rlhf_mc.runtime.preemption import StopRequested, StopRequests
from rlhf_mc.runtime.rank_status import WRITE_PROFILE, RankStatus

TIMEOUT_SECONDS = 2.0
LOCK_SECONDS = 4.0


def exchange_heartbeats(case: str) -> dict[str, Any]:
    """Exchange heartbeats; rank 1 is "silent", "disconnected" or "signed off", opens an
    "unauthenticated" connection or floods rank 0 with them ("flooded"), or asks for the
    "diagnosis".

    Return under "exits" the lines with which this rank would have ended."""
    rank = dist.get_rank()
    exits: list[tuple[str, bool]] = []

    def exit_from_thread(line: str, code: int = 1, is_printed: bool = True) -> NoReturn:
        exits.append((line, is_printed))
        raise SystemExit  # ends the thread only

    status = RankStatus(step=3)
    status.enter("gen")
    out: dict[str, Any] = {}
    with (
        mock.patch.object(heartbeat_client, "exit_from_thread", exit_from_thread),
        mock.patch.object(heartbeat_server, "exit_from_thread", exit_from_thread),
        mock.patch.object(heartbeat_thread, "MAX_RECONNECT_SECONDS", 1.0),
        mock.patch.object(heartbeat_server, "TOKEN_SECONDS", 6.0),
    ):
        thread = heartbeat._start(status, rank, TIMEOUT_SECONDS, straggler_seconds=100.0)
        start = time.monotonic()
        if isinstance(thread, HeartbeatServer):
            out["listens_at"] = thread._listener.getsockname()[0]
        else:
            assert isinstance(thread, HeartbeatClient) and rank == 1
            out["diagnosis"] = _act(thread, case)
        if case in ("silent", "disconnected"):
            thread._thread.join(60)
        else:
            if case != "signed off":
                dist.barrier()
            elif rank == 0:
                time.sleep(2 * TIMEOUT_SECONDS)  # rank 1 has signed off by now
            thread.end()
        out |= {"exits": exits, "seconds": time.monotonic() - start}
        dist.barrier()
    return out


def hold_the_lock(rank: int) -> dict[str, Any]:
    """Let a rank hold Python's lock for LOCK_SECONDS in the phase in which profiles are written.
    Return the lines with which this rank would have ended ("exits"), and the seconds that the rank
    was in the phase."""
    exits: list[str] = []

    def exit_from_thread(line: str, code: int = 1, is_printed: bool = True) -> NoReturn:
        exits.append(line)
        raise SystemExit  # ends the thread only

    status = RankStatus(step=3)
    with (
        mock.patch.object(heartbeat_client, "exit_from_thread", exit_from_thread),
        mock.patch.object(heartbeat_server, "exit_from_thread", exit_from_thread),
    ):
        thread = heartbeat._start(status, dist.get_rank(), TIMEOUT_SECONDS, 100.0)
        assert thread is not None
        start = time.monotonic()
        with PhaseTimer(status=status).phase(WRITE_PROFILE):
            dist.barrier()
            time.sleep(0.1)
            if dist.get_rank() == rank:
                ctypes.PyDLL(None).usleep(int(LOCK_SECONDS * 1e6))  # PyDLL keeps the lock
            dist.barrier()
        seconds = time.monotonic() - start
        time.sleep(1.0)  # the next heartbeats
        thread.end()
        dist.barrier()
    return {"exits": exits, "seconds": seconds}


def _act(client: HeartbeatClient, case: str) -> str:
    assert wait_until(lambda: client._connection is not None)
    time.sleep(0.2)  # its first heartbeat is sent
    if case == "silent":
        line = client._line
        client._line = lambda signs_off=False: time.sleep(4 * TIMEOUT_SECONDS) or line()  # type: ignore[method-assign]
    elif case == "disconnected":
        client._address = ("localhost", 1)  # nothing listens there
        assert client._connection is not None
        client._connection.shutdown(socket.SHUT_RDWR)
    elif case == "unauthenticated":
        mine = json.loads(client._line())
        for text in (
            b"GET / HTTP/1.0\r\n\r\n",
            json.dumps({**mine, "token": "no"}).encode() + b"\n",
        ):
            with socket.create_connection(client._address, timeout=60) as connection:
                connection.sendall(text)
                assert connection.recv(100) == b""  # closed without an answer
    elif case == "flooded":
        _open_too_many(client._address)
    elif case == "diagnosis":
        client._status.leave()  # two moves ahead of rank 0
        client._status.enter("reward")
        wait_until(lambda: " is behind" in client.diagnosis())
        return client.diagnosis()
    return ""


def _open_too_many(address: tuple[str, int]) -> None:
    """Open more connections than are kept, and send nothing: the oldest are closed at once, the
    others in time."""
    opened = [
        socket.create_connection(address, timeout=60) for _ in range(2 * MAX_UNAUTHENTICATED + 2)
    ]
    start = time.monotonic()
    for connection in opened[: MAX_UNAUTHENTICATED // 2]:
        assert connection.recv(1) == b""
    assert time.monotonic() - start < 5.5
    for connection in opened:
        assert connection.recv(1) == b""
        connection.close()


def request_stop_on_rank_1() -> str:
    """Ask rank 1 to stop. Return the reason that this rank gets."""
    stop = StopRequests(TrainerConfig("runs/x", preemption_grace_seconds=10**6))
    stop.check()
    if dist.get_rank() == 1:
        stop.request("SIGUSR1")
    try:
        stop.check()
    except StopRequested as request:
        return str(request)
    return ""
