"""Verdicts of rank 0 from the ranks' heartbeats, with a simulated clock, and the status that heartbeats report."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.runtime.rank_status import Heartbeat, RankStatus, Register, describe_error, heartbeat_of


def heartbeat(rank: int, moves: int = 5, phase: str = "gen", seconds: float = 1.0, collective: str = "") -> Heartbeat:
    return Heartbeat(rank, 3, phase, moves, seconds, collective, "engine.py:7 (generate)")


def make_register(world: int = 3, now: float = 100.0) -> Register:
    """Return a register that has received a heartbeat of every rank at `now`."""
    out = Register([f"node{rank}" for rank in range(world)], interval=5.0, now=now)
    for rank in range(world):
        out.heard(heartbeat(rank), now)
    return out


def test_silent_rank_is_named_with_host_and_last_phase() -> None:
    ranks = make_register()
    for now in (105.0, 110.0, 131.0):
        ranks.heard(heartbeat(0), now)
        ranks.heard(heartbeat(2), now)
    assert ranks.verdict(130.0, timeout=30.0, gone_after=10.0) == ""
    line = ranks.verdict(131.0, timeout=30.0, gone_after=10.0)
    assert line == "rank 1 (node1) has not been heard of for 31 s, last in phase gen of step 3"


def test_rank_that_said_goodbye_may_be_silent() -> None:
    ranks = make_register(world=2)
    ranks.said_goodbye(1)
    ranks.cut_off(1, 101.0)
    ranks.heard(heartbeat(0), 1000.0)
    assert ranks.verdict(1000.0, timeout=30.0, gone_after=10.0) == ""


def test_lost_connection_counts_only_if_not_restored() -> None:
    ranks = make_register()
    ranks.cut_off(1, 101.0)
    ranks.cut_off(2, 101.0)
    ranks.heard(heartbeat(1), 104.0)
    assert ranks.verdict(110.0, timeout=30.0, gone_after=10.0) == ""
    line = ranks.verdict(112.0, timeout=30.0, gone_after=10.0)
    assert line == "rank 2 (node2) is gone: its process has ended; last in phase gen of step 3"


def test_silence_while_rank_0_was_suspended_is_ignored() -> None:
    ranks = make_register()
    ranks.forgive(1000.0)
    assert ranks.verdict(1020.0, timeout=30.0, gone_after=10.0) == ""
    assert "rank 0" in ranks.verdict(1031.0, timeout=30.0, gone_after=10.0)


def test_behind_names_silent_then_late_then_rank_in_no_collective() -> None:
    ranks = make_register()
    for rank in range(3):
        ranks.heard(heartbeat(rank, collective="all_reduce"), 101.0)
    assert ranks.behind(101.0) == ""
    ranks.heard(heartbeat(1), 102.0)
    assert ranks.behind(102.0).startswith("rank 1 (node1) is behind: in phase gen of step 3 for 1 s, at engine.py:7")
    ranks.heard(heartbeat(0, moves=6, phase="ref"), 103.0)
    ranks.heard(heartbeat(1, moves=6, phase="ref"), 103.0)
    assert ranks.behind(103.0).startswith("rank 2 (node2) is behind: in phase gen")
    assert ranks.behind(112.0) == "rank 2 (node2) has not been heard of for 11 s, last in phase gen of step 3"


def test_further_silent_ranks_are_counted() -> None:
    ranks = make_register(world=9)
    ranks.heard(heartbeat(0), 150.0)
    line = ranks.verdict(150.0, timeout=30.0, gone_after=10.0)
    assert line.count("has not been heard of") == 4 and line.endswith("; and 4 more")


def test_slow_rank_is_warned_about_once_and_only_if_others_wait() -> None:
    ranks = make_register(world=2)
    ranks.heard(heartbeat(0, moves=6, phase="ref", seconds=70.0, collective="all_reduce"), 170.0)
    ranks.heard(heartbeat(1, seconds=50.0), 170.0)
    assert ranks.slow(170.0, 60.0) == ""  # rank 1 has been in its phase for less than a minute
    ranks.heard(heartbeat(1, seconds=65.0), 171.0)
    line = ranks.slow(171.0, 60.0)
    assert "rank 1 (node1) is behind: in phase gen of step 3 for 65 s" in line
    assert line.endswith(
        "rank 0 waits in phase ref of step 3 for 70 s, in all_reduce, called from engine.py:7 (generate)"
    )
    assert ranks.slow(172.0, 60.0) == ""
    ranks.heard(heartbeat(0, moves=5, seconds=900.0), 172.0)
    assert ranks.slow(172.0, 60.0) == ""  # a long phase of all ranks


def test_phase_timer_updates_the_status_and_keeps_the_failed_phase() -> None:
    status = RankStatus()
    timer = PhaseTimer(place=status)
    with timer.phase("step"), timer.phase("gen"):
        assert status.phases[-1] == "gen"
    assert (status.phases, status.moves) == (["start"], 4)
    try:
        with timer.phase("step"), timer.phase("ref"):
            raise ValueError
    except ValueError:
        assert status.phases[-1] == "ref"


def test_stack_gives_the_collective_and_the_source_line() -> None:
    with ThreadPoolExecutor(1) as pool:
        here = pool.submit(heartbeat_of, RankStatus(), 0, threading.get_ident()).result()
    assert here.collective == "" and here.at.startswith("test_rank_status.py:")
    assert "in phase start for 0 s, at test_rank_status.py" in here.where()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.PREMUL_SUM)  # gloo has no such operation
    except Exception as error:
        assert describe_error(error)[0] == "all_reduce"
        assert describe_error(error)[1].startswith("test_rank_status.py:")
    else:
        raise AssertionError("gloo supports it now: use another error")
    finally:
        dist.destroy_process_group()


def test_status_counts_the_seconds_since_its_last_change() -> None:
    status = RankStatus()
    status.since = time.monotonic() - 7.0
    assert round(heartbeat_of(status, 0, 0).seconds) == 7
