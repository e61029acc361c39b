"""Rendezvous of the ranks, and the errors when one is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import forked
import pytest
import torch

from rlhf_mc.config.errors import JoinError
from rlhf_mc.topology import rendezvous
from rlhf_mc.topology.rendezvous import _check_device, _store, _wait_for_all


@pytest.fixture(autouse=True)
def address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(forked.free_port()))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    # rank 0 waits 4 times as long for the others
    monkeypatch.setattr(rendezvous, "_LONGEST_PAUSE", 0.1)


def join(ranks: list[int], world: int, seconds: float) -> list[JoinError | None]:
    """Return each rank's error. The ranks are threads of this process, each with its own
    connection."""
    stores = []  # rank 0's is the server, and must outlive the other ranks' checks
    all_connected = threading.Barrier(len(ranks))

    def join_rank(rank: int) -> None:
        store = _store(rank, world, 20.0)
        stores.append(store)
        all_connected.wait()
        _wait_for_all(store, rank, world, seconds)

    with ThreadPoolExecutor(len(ranks)) as threads:
        pending: list[Future[None]] = [threads.submit(join_rank, rank) for rank in ranks]
    errors = [future.exception() for future in pending]
    assert all(error is None or isinstance(error, JoinError) for error in errors), errors
    return [error if isinstance(error, JoinError) else None for error in errors]


def test_all_ranks_join() -> None:
    assert join([0, 1, 2], world=3, seconds=3000.0) == [None] * 3


@pytest.mark.parametrize(
    ("ranks", "world", "words"),
    [
        ([0, 2], 3, "2 of 3 ranks have joined within 1 s; missing: rank 1."),
        (
            [0],
            20,
            (
                "1 of 20 ranks have joined within 1 s; missing: rank 1, 2, 3, 4, 5, 6, 7, 8 and 11 "
                "more."
            ),
        ),
    ],
)
def test_missing_ranks_are_named_once(ranks: list[int], world: int, words: str) -> None:
    errors = join(ranks, world, seconds=1.0)
    assert all(str(error).startswith(words) for error in errors), errors
    assert [error.prints for error in errors if error is not None].count(True) == 1


@pytest.mark.slow
def test_every_rank_reports_a_missing_rank_0() -> None:
    with pytest.raises(
        JoinError, match=r"^has not reached rank 0 within 1 s at localhost:\d+ "
    ) as caught:
        _store(1, 2, seconds=1.0)
    assert caught.value.prints


def with_limits(soft: int, hard: int, world: int, rank: int) -> subprocess.CompletedProcess[str]:
    """Raise the limit on open files in a process with these limits. Return what it prints: its soft
    limit, or the error."""
    program = f"""
import resource, sys
from rlhf_mc.runtime.exit_codes import exit_code
from rlhf_mc.topology.open_files import raise_limit
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
code = exit_code("rlhf_mc", lambda: raise_limit({world}, {rank}))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
sys.exit(code)"""
    env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": "0"}
    return subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=500
    )


def test_the_soft_limit_on_open_files_is_raised() -> None:
    done = with_limits(100, 4000, world=512, rank=0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "4000\n", "")


@pytest.mark.parametrize(("rank", "least"), [(0, 3322), (8, 2298)])
def test_too_low_a_limit_on_open_files_is_one_line(rank: int, least: int) -> None:
    done = with_limits(100, least - 1, world=512, rank=rank)
    message = (
        f"rank {rank} of 512 needs about {least} open files and connections, and a process "
        f"may have {least - 1} here"
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and message in done.stderr
    assert with_limits(100, least, world=512, rank=rank).returncode == 0


@pytest.mark.parametrize(
    ("local_rank", "num_gpus", "share", "prints"),
    [
        (0, 1, 1, None),
        (1, 1, 1, True),
        (2, 1, 1, False),
        (7, 8, 1, None),
        (8, 8, 1, True),
        (1, 1, 2, None),
        (2, 1, 2, True),
        (3, 1, 2, False),
        (5, 2, 3, None),
    ],
)
def test_each_rank_must_see_its_gpu(
    local_rank: int, num_gpus: int, share: int, prints: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("RLHF_MC_RANKS_PER_GPU", str(share))
    if prints is None:
        _check_device()
        return
    with pytest.raises(
        JoinError, match=f"^LOCAL_RANK is {local_rank}, and this process sees {num_gpus} GPU"
    ) as caught:
        _check_device()
    assert caught.value.prints == prints  # one line for each node
