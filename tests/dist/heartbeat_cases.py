"""What a rank does in test_heartbeat.py: real threads and connections, with an end that is only noted."""

from __future__ import annotations

import json
import socket
import time
from typing import Any, NoReturn
from unittest import mock

import torch.distributed as dist

from rlhf_mc.config.schema import TrainerConfig
from rlhf_mc.runtime import heartbeat
from rlhf_mc.runtime.preemption import StopRequested, StopRequests
from rlhf_mc.runtime.rank_status import RankStatus

TIMEOUT_SECONDS = 2.0


def watched(what: str) -> dict[str, Any]:
    """Let rank 1 do `what`: "silent", "gone", "goodbye", "stranger", "crowd" or "asks".

    Returns how this rank would have ended."""
    rank = dist.get_rank()
    said = []

    def end(line: str, code: int = 1, say: bool = True) -> NoReturn:
        said.append((line, say))
        raise SystemExit  # of the thread

    place = RankStatus(step=3)
    place.enter("gen")
    out: dict[str, Any] = {}
    with (
        mock.patch.object(heartbeat, "end_from_a_thread", end),
        mock.patch.object(heartbeat, "GONE_AFTER_SECONDS", 1.0),
        mock.patch.object(heartbeat, "TOKEN_SECONDS", 3.0),
    ):
        part = heartbeat._start(place, rank, TIMEOUT_SECONDS, slow_seconds=100.0)
        assert part is not None
        start = time.monotonic()
        if rank == 1:
            assert isinstance(part, heartbeat.Teller)
            out["behind"] = _act(part, what)
        if isinstance(part, heartbeat.Listener):
            out["listens_at"] = part._server.getsockname()[0]
        if what in ("goodbye", "stranger", "crowd", "asks"):
            if what == "goodbye" and rank == 0:
                time.sleep(2 * TIMEOUT_SECONDS)  # rank 1 is away by now
            elif what != "goodbye":
                dist.barrier()
            part.end()
        else:
            part._thread.join(10)
        out |= {"said": said, "seconds": time.monotonic() - start}
        dist.barrier()
    return out


def _act(part: heartbeat.Teller, what: str) -> str:
    time.sleep(0.2)  # its first report is made
    if what == "silent":
        line = part._line
        part._line = lambda goodbye=False: time.sleep(4 * TIMEOUT_SECONDS) or line()  # type: ignore[method-assign]
    elif what == "gone":
        part._address = ("localhost", 1)  # nobody is there
        assert part._connection is not None
        part._connection.shutdown(socket.SHUT_RDWR)
    elif what == "stranger":
        mine = json.loads(part._line())
        for text in (b"GET / HTTP/1.0\r\n\r\n", json.dumps({**mine, "token": "no"}).encode() + b"\n"):
            with socket.create_connection(part._address, timeout=5) as connection:
                connection.sendall(text)
                assert connection.recv(100) == b""  # hung up without a word
    elif what == "crowd":
        _come_in_crowds(part._address)
    elif what == "asks":
        part._place.leave()  # two moves ahead of rank 0, so that rank 0 is behind
        part._place.enter("reward")
        time.sleep(0.2)
        return part.diagnosis()
    return ""


def _come_in_crowds(address: tuple[str, int]) -> None:
    """Open more connections than are kept, and send nothing: they are closed, the first ones before their time."""
    crowd = [socket.create_connection(address, timeout=10) for _ in range(2 * heartbeat.MOST_STRANGERS + 2)]
    start = time.monotonic()
    for connection in crowd[: heartbeat.MOST_STRANGERS // 2]:
        assert connection.recv(1) == b""
    assert time.monotonic() - start < 2.5
    for connection in crowd:
        assert connection.recv(1) == b""
        connection.close()


def stops() -> str:
    """Rank 1 is asked to stop."""
    stop = StopRequests(TrainerConfig("runs/x", preemption_grace_seconds=10**6))
    stop.check()
    if dist.get_rank() == 1:
        stop.request("SIGUSR1")
    try:
        stop.check()
    except StopRequested as request:
        return str(request)
    return ""
