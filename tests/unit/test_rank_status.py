"""What rank 0 concludes from what it hears, with a clock of the test's own."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.runtime.rank_status import Heartbeat, RankStatus, Register, describe_error, heartbeat_of


def beat(rank: int, moves: int = 5, phase: str = "gen", seconds: float = 1.0, collective: str = "") -> Heartbeat:
    return Heartbeat(rank, 3, phase, moves, seconds, collective, "engine.py:7 (generate)")


def register(world: int = 3, now: float = 100.0) -> Register:
    """All ranks heard at `now`."""
    out = Register([f"node{rank}" for rank in range(world)], interval=5.0, now=now)
    for rank in range(world):
        out.heard(beat(rank), now)
    return out


def test_a_silent_rank_is_named_with_its_host_and_last_phase() -> None:
    ranks = register()
    for now in (105.0, 110.0, 131.0):
        ranks.heard(beat(0), now)
        ranks.heard(beat(2), now)
    assert ranks.verdict(130.0, timeout=30.0, gone_after=10.0) == ""
    line = ranks.verdict(131.0, timeout=30.0, gone_after=10.0)
    assert line == "rank 1 (node1) has not been heard of for 31 s, last in phase gen of step 3"


def test_who_said_goodbye_may_be_silent() -> None:
    ranks = register(world=2)
    ranks.said_goodbye(1)
    ranks.cut_off(1, 101.0)
    ranks.heard(beat(0), 1000.0)
    assert ranks.verdict(1000.0, timeout=30.0, gone_after=10.0) == ""


def test_a_cut_connection_counts_only_if_it_is_not_made_again() -> None:
    ranks = register()
    ranks.cut_off(1, 101.0)
    ranks.cut_off(2, 101.0)
    ranks.heard(beat(1), 104.0)
    assert ranks.verdict(110.0, timeout=30.0, gone_after=10.0) == ""
    line = ranks.verdict(112.0, timeout=30.0, gone_after=10.0)
    assert line == "rank 2 (node2) is gone: its process has ended; last in phase gen of step 3"


def test_silence_while_rank_0_itself_was_frozen_is_forgiven() -> None:
    ranks = register()
    ranks.forgive(1000.0)
    assert ranks.verdict(1020.0, timeout=30.0, gone_after=10.0) == ""
    assert "rank 0" in ranks.verdict(1031.0, timeout=30.0, gone_after=10.0)


def test_behind_names_who_is_silent_then_who_is_late_then_who_is_in_no_collective() -> None:
    ranks = register()
    for rank in range(3):
        ranks.heard(beat(rank, collective="all_reduce"), 101.0)
    assert ranks.behind(101.0) == ""
    ranks.heard(beat(1), 102.0)
    assert ranks.behind(102.0).startswith("rank 1 (node1) is behind: in phase gen of step 3 for 1 s, at engine.py:7")
    ranks.heard(beat(0, moves=6, phase="ref"), 103.0)
    ranks.heard(beat(1, moves=6, phase="ref"), 103.0)
    assert ranks.behind(103.0).startswith("rank 2 (node2) is behind: in phase gen")
    assert ranks.behind(112.0) == "rank 2 (node2) has not been heard of for 11 s, last in phase gen of step 3"


def test_many_are_counted() -> None:
    ranks = register(world=9)
    ranks.heard(beat(0), 150.0)
    line = ranks.verdict(150.0, timeout=30.0, gone_after=10.0)
    assert line.count("has not been heard of") == 4 and line.endswith("; and 4 more")


def test_a_warning_comes_once_for_each_place_and_only_where_others_wait() -> None:
    ranks = register(world=2)
    ranks.heard(beat(0, moves=6, phase="ref", seconds=70.0, collective="all_reduce"), 170.0)
    ranks.heard(beat(1, seconds=50.0), 170.0)
    assert ranks.slow(170.0, 60.0) == ""  # rank 1 is at it for less than a minute
    ranks.heard(beat(1, seconds=65.0), 171.0)
    line = ranks.slow(171.0, 60.0)
    assert "rank 1 (node1) is behind: in phase gen of step 3 for 65 s" in line
    assert line.endswith(
        "rank 0 waits in phase ref of step 3 for 70 s, in all_reduce, called from engine.py:7 (generate)"
    )
    assert ranks.slow(172.0, 60.0) == ""
    ranks.heard(beat(0, moves=5, seconds=900.0), 172.0)
    assert ranks.slow(172.0, 60.0) == ""  # a long phase of all


def test_the_timer_moves_the_place_and_a_failure_stays_where_it_was() -> None:
    place = RankStatus()
    timer = PhaseTimer(place=place)
    with timer.phase("step"), timer.phase("gen"):
        assert place.phases[-1] == "gen"
    assert (place.phases, place.moves) == (["start"], 4)
    try:
        with timer.phase("step"), timer.phase("ref"):
            raise ValueError
    except ValueError:
        assert place.phases[-1] == "ref"


def test_a_stack_tells_the_collective_and_our_line() -> None:
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
        raise AssertionError("gloo has learnt it: take another error")
    finally:
        dist.destroy_process_group()


def test_a_place_counts_the_seconds_since_its_last_move() -> None:
    place = RankStatus()
    place.since = time.monotonic() - 7.0
    assert round(heartbeat_of(place, 0, 0).seconds) == 7
