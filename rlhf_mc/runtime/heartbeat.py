"""Start-up of the heartbeats: each rank reports its status to rank 0 when it enters or leaves a
phase, and every few seconds. A rank that falls silent or whose process has ended ends all others,
with a line that names it.

The connections are TCP connections of their own, since collectives and torch's store may be what is
stuck.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import time
from collections.abc import Iterator

import torch.distributed as dist

from rlhf_mc.config.errors import UserError, error_reason
from rlhf_mc.runtime.console import print_line
from rlhf_mc.runtime.heartbeat_client import HeartbeatClient
from rlhf_mc.runtime.heartbeat_server import HeartbeatServer
from rlhf_mc.runtime.namespaces import namespace_id
from rlhf_mc.runtime.rank_status import RankStatus, describe_error
from rlhf_mc.runtime.work import WAITING, working
from rlhf_mc.topology.consensus import gather_objects

CONNECT_SECONDS = 20.0
_MET = "rlhf_mc/met"
_meetings = itertools.count()


@contextlib.contextmanager
def heartbeats(
    status: RankStatus, rank: int, timeout_seconds: float, straggler_seconds: float
) -> Iterator[None]:
    """Exchange heartbeats while the body runs, and add a diagnosis of all ranks to an error that
    leaves it.

    timeout_seconds: a rank that is silent for longer ends the run. straggler_seconds: a rank that
    the others have waited for this long is named in a warning. Every rank must enter it, after
    init_process_group."""
    thread = _start(status, rank, timeout_seconds, straggler_seconds)
    if thread is None:
        yield
        return
    try:
        yield
    except UserError:  # every rank raises the same one, so no rank waits for another
        raise
    except Exception as error:  # raised again, with a note
        collective, code_line = describe_error(error)
        error.add_note(
            f"in {collective}, called from {code_line}" if collective else f"at {code_line}"
        )
        error.add_note(thread.diagnosis())
        raise
    thread.end()


def _start(
    status: RankStatus, rank: int, timeout_seconds: float, straggler_seconds: float
) -> HeartbeatServer | HeartbeatClient | None:
    """Start rank 0's server and the other ranks' clients. Return None with one rank, or if a rank
    cannot connect."""
    host = socket.gethostname()
    ranks = gather_objects((host, namespace_id("net") or host, _addresses_of_rank_0()))
    hosts = [host for host, _, _ in ranks]
    if len(hosts) == 1:
        return None
    listener: socket.socket | None = None
    connection: socket.socket | None = None
    failure = ""
    if rank == 0:
        try:
            listener = _listen(
                _addresses_to_bind([(machine, addresses) for _, machine, addresses in ranks])
            )
        except OSError as error:
            failure = error_reason(error)
    # The token keeps other programs' connections, and other runs' ranks, from being taken for a
    # rank of this run.
    address = listener.getsockname()[:2] if listener else ("", 0)
    (host, port), token = gather_objects((address, secrets.token_hex(16)))[0]
    if host and rank != 0:
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        except OSError as error:
            failure = error_reason(error)
    failures = {r: reason for r, reason in enumerate(gather_objects(failure)) if reason}
    if failures:
        first, reason = next(iter(failures.items()))
        problem = (
            f"does not reach rank 0 at {host}:{port}" if first else "cannot listen at MASTER_ADDR"
        )
        print_line(
            f"warning: rank {first} {problem} ({reason}); the run continues without heartbeats",
            rank_0_only=True,
        )
        for opened in (listener, connection):
            if opened is not None:
                opened.close()
        return None
    if listener is not None:
        return HeartbeatServer(status, token, timeout_seconds, listener, hosts, straggler_seconds)
    assert connection is not None
    return HeartbeatClient(status, rank, token, timeout_seconds, hosts[0], (host, port), connection)


def _addresses_of_rank_0() -> list[str]:
    """Return the addresses that MASTER_ADDR resolves to on this machine."""
    try:
        addresses = socket.getaddrinfo(
            os.environ.get("MASTER_ADDR", "localhost"), None, type=socket.SOCK_STREAM
        )
    except OSError:
        return []
    return list(dict.fromkeys(str(address[4][0]) for address in addresses))


def _addresses_to_bind(ranks: list[tuple[str, list[str]]]) -> list[str]:
    """Return the addresses for rank 0 to try, from each rank's machine and the addresses it sees
    for rank 0.

    If there are other machines, their addresses are used: rank 0's own may be a loopback address,
    which they cannot reach."""
    here = ranks[0][0]
    elsewhere = [
        address for machine, addresses in ranks if machine != here for address in addresses
    ]
    return list(dict.fromkeys(elsewhere or ranks[0][1]))


def _listen(addresses: list[str]) -> socket.socket:
    """Return a socket that listens at the first address that is this machine's. Raise OSError if
    none is."""
    failure = OSError("MASTER_ADDR has no address")
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, 0), family=family, backlog=4096)
        except OSError as error:
            failure = error
    raise failure


def await_all_ranks() -> None:
    """Wait until every rank has called this as often as this rank has. Unlike a collective, it has
    no time limit: heartbeats end the run if the ranks that are awaited make no progress. Every rank
    must call it."""
    store = dist.distributed_c10d._get_default_store()
    key = f"{_MET}/{next(_meetings)}"
    arrived = store.add(key, 1)
    start = time.monotonic()
    with working(WAITING):
        while arrived < dist.get_world_size():
            # not store.wait: it would keep NCCL's watchdog from the store
            time.sleep(min(0.2, 0.001 + 0.01 * (time.monotonic() - start)))
            arrived = store.add(key, 0)
