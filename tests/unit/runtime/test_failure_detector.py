"""The conclusions that rank 0 draws from heartbeats, with a clock of the test's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlhf_mc.runtime.failure_detector import FailureDetector
from rlhf_mc.runtime.rank_status import WRITE_PROFILE, Heartbeat


def heartbeat(
    rank: int, moves: int = 5, phase: str = "gen", seconds: float = 1.0, collective: str = ""
) -> Heartbeat:
    return Heartbeat(rank, 3, phase, moves, seconds, collective, "engine.py:7 (generate)")


def pool_heartbeat(rank: int, progress: float, **others: Any) -> Heartbeat:
    """Return the heartbeat of a rank of two pools: ranks 0 and 1 train, rank 2 generates."""
    return replace(heartbeat(rank), **{"trains": rank < 2, "progress": progress, **others})


def failure_detector(world: int = 3, now: float = 100.0) -> FailureDetector:
    """Build one that has received a heartbeat of every rank at `now`."""
    detector = FailureDetector([f"node{rank}" for rank in range(world)], interval=5.0, now=now)
    for rank in range(world):
        detector.received(heartbeat(rank), now)
    return detector


def test_silent_rank_is_named_with_host_and_last_phase() -> None:
    detector = failure_detector()
    for now in (105.0, 110.0, 131.0):
        detector.received(heartbeat(0), now)
        detector.received(heartbeat(2), now)
    assert detector.lost(130.0, timeout=30.0, reconnect=10.0) == ""
    line = detector.lost(131.0, timeout=30.0, reconnect=10.0)
    assert line == "rank 1 (node1) has sent no heartbeat for 31 s, last in phase gen of step 3"


def test_rank_that_has_signed_off_may_be_silent() -> None:
    detector = failure_detector(world=2)
    detector.signed_off(1)
    detector.disconnected(1, 101.0)
    detector.received(heartbeat(0), 1000.0)
    assert detector.lost(1000.0, timeout=30.0, reconnect=10.0) == ""


def test_rank_that_writes_a_profile_may_be_silent() -> None:
    detector = failure_detector(world=2)
    detector.received(heartbeat(1, phase=WRITE_PROFILE), 101.0)
    detector.received(heartbeat(0), 1000.0)
    assert detector.lost(1000.0, timeout=30.0, reconnect=10.0) == ""
    detector.received(heartbeat(1, moves=6), 1001.0)
    detector.received(heartbeat(0), 1040.0)
    assert "rank 1" in detector.lost(1040.0, timeout=30.0, reconnect=10.0)


def test_closed_connection_counts_only_if_not_restored() -> None:
    detector = failure_detector()
    detector.disconnected(1, 101.0)
    detector.disconnected(2, 101.0)
    detector.received(heartbeat(1), 104.0)
    assert detector.lost(110.0, timeout=30.0, reconnect=10.0) == ""
    line = detector.lost(112.0, timeout=30.0, reconnect=10.0)
    assert line == "rank 2 (node2) is gone: its process has ended; last in phase gen of step 3"


def test_silence_while_rank_0_was_suspended_is_ignored() -> None:
    detector = failure_detector()
    detector.restart_timeouts(1000.0)
    assert detector.lost(1020.0, timeout=30.0, reconnect=10.0) == ""
    assert "rank 0" in detector.lost(1031.0, timeout=30.0, reconnect=10.0)


def test_stragglers_are_silent_else_behind_else_in_no_collective() -> None:
    detector = failure_detector()
    for rank in range(3):
        detector.received(heartbeat(rank, collective="all_reduce"), 101.0)
    assert detector.stragglers(101.0) == ""
    detector.received(heartbeat(1), 102.0)
    assert detector.stragglers(102.0).startswith(
        "rank 1 (node1) is behind: in phase gen of step 3 for 1 s, at engine.py:7"
    )
    detector.received(heartbeat(0, moves=6, phase="ref"), 103.0)
    detector.received(heartbeat(1, moves=6, phase="ref"), 103.0)
    assert detector.stragglers(103.0).startswith("rank 2 (node2) is behind: in phase gen")
    assert (
        detector.stragglers(112.0)
        == "rank 2 (node2) has sent no heartbeat for 11 s, last in phase gen of step 3"
    )


def test_further_silent_ranks_are_counted() -> None:
    detector = failure_detector(world=9)
    detector.received(heartbeat(0), 150.0)
    line = detector.lost(150.0, timeout=30.0, reconnect=10.0)
    assert line.count("has sent no heartbeat") == 4 and line.endswith("; and 4 more")


def test_straggler_is_warned_about_once_and_only_if_others_wait() -> None:
    detector = failure_detector(world=2)
    detector.received(
        heartbeat(0, moves=6, phase="ref", seconds=70.0, collective="all_reduce"), 170.0
    )
    detector.received(heartbeat(1, seconds=50.0), 170.0)
    # rank 1 has been in its phase for less than a minute
    assert detector.straggler_warning(170.0, 60.0) == ""
    detector.received(heartbeat(1, seconds=65.0), 171.0)
    line = detector.straggler_warning(171.0, 60.0)
    assert "rank 1 (node1) is behind: in phase gen of step 3 for 65 s" in line
    assert line.endswith(
        "rank 0 waits in phase ref of step 3 for 70 s, in all_reduce, called from engine.py:7 "
        "(generate)"
    )
    assert detector.straggler_warning(172.0, 60.0) == ""
    detector.received(heartbeat(0, moves=5, seconds=900.0), 172.0)
    assert detector.straggler_warning(172.0, 60.0) == ""  # all ranks are in the same long phase


def test_a_pool_that_makes_progress_may_take_long() -> None:
    """Check too that ranks of two pools go through phases of their own: none is behind."""
    detector = failure_detector()
    for now in range(200, 2000, 100):
        detector.received(pool_heartbeat(0, 1, moves=9, seconds=now - 100.0, waits=True), now)
        detector.received(pool_heartbeat(1, 1, moves=9, seconds=now - 100.0, waits=True), now)
        detector.received(pool_heartbeat(2, now, seconds=now - 100.0), now)
        assert detector.straggler_warning(now, 300.0) == detector.stuck(now, 600.0) == ""
    for rank in range(3):
        detector.received(pool_heartbeat(rank, rank, moves=9 - rank // 2, seconds=400.0), 2000.0)
    assert detector.straggler_warning(2000.0, 300.0) == ""


def test_a_pool_without_progress_ends_the_run() -> None:
    detector = failure_detector()
    for now in (200.0, 500.0, 799.0, 800.0):
        for rank in (0, 1):
            detector.received(pool_heartbeat(rank, 1, seconds=now - 200.0, waits=True), now)
        detector.received(pool_heartbeat(2, 7, seconds=now - 200.0), now)
        if now == 500.0:
            assert detector.straggler_warning(now, 300.0).startswith("rank 2 (node2) is behind")
        assert (detector.stuck(now, 600.0) != "") == (now == 800.0)
    assert detector.stuck(800.0, 600.0).startswith(
        "rank 2 (node2) has made no progress for 600 s: in phase gen of step 3 for 600 s"
    )
    detector.restart_timeouts(900.0)
    assert detector.stuck(900.0, 600.0) == ""
