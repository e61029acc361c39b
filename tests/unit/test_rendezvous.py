"""Rendezvous of the ranks, and the errors when one is missing."""

from __future__ import annotations

import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from rlhf_mc.config.errors import JoinError
from rlhf_mc.topology import rendezvous
from rlhf_mc.topology.rendezvous import _store, _wait_for_all


@pytest.fixture(autouse=True)
def address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        monkeypatch.setenv("MASTER_PORT", str(s.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(rendezvous, "_LONGEST_PAUSE", 0.1)  # rank 0 waits 4 times as long for the others


def join(ranks: list[int], world: int, seconds: float) -> list[JoinError | None]:
    """Return each rank's error. The ranks are threads of this process, each with its own connection."""
    stores = []  # rank 0's is the server, and must outlive the other ranks' checks

    def join_rank(rank: int) -> None:
        store = _store(rank, world, 20.0)
        stores.append(store)
        _wait_for_all(store, rank, world, seconds)

    with ThreadPoolExecutor(len(ranks)) as threads:
        pending: list[Future[None]] = [threads.submit(join_rank, rank) for rank in ranks]
    errors = [future.exception() for future in pending]
    assert all(error is None or isinstance(error, JoinError) for error in errors), errors
    return [error if isinstance(error, JoinError) else None for error in errors]


def test_all_ranks_join() -> None:
    start = time.monotonic()
    assert join([0, 1, 2], world=3, seconds=60.0) == [None] * 3
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("ranks", "world", "words"),
    [
        ([0, 2], 3, "2 of 3 ranks have joined within 0.3 s; missing: rank 1."),
        ([0], 20, "1 of 20 ranks have joined within 0.3 s; missing: rank 1, 2, 3, 4, 5, 6, 7, 8 and 11 more."),
    ],
)
def test_missing_ranks_are_named_once(ranks: list[int], world: int, words: str) -> None:
    errors = join(ranks, world, seconds=0.3)
    assert all(str(error).startswith(words) for error in errors), errors
    assert [error.prints for error in errors if error is not None].count(True) == 1


def test_every_rank_reports_a_missing_rank_0() -> None:
    with pytest.raises(JoinError, match=r"^has not reached rank 0 within 1 s at localhost:\d+ ") as caught:
        _store(1, 2, seconds=1.0)
    assert caught.value.prints
