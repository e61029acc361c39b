"""The status of a rank: its phases, and the line of code that it is at."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.runtime.rank_status import RankStatus, describe_error, make_heartbeat


def test_phase_timer_updates_the_status_and_keeps_the_failed_phase() -> None:
    status = RankStatus()
    timer = PhaseTimer(status=status)
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
        here = pool.submit(make_heartbeat, RankStatus(), 0, threading.get_ident()).result()
    assert here.collective == "" and here.code_line.startswith("test_rank_status.py:")
    assert "in phase start for 0 s, at test_rank_status.py" in here.position()
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


def test_a_phase_change_is_reported_at_the_line_of_its_caller() -> None:
    # The heartbeat of a phase change is sent from within PhaseTimer and rlhf_mc/runtime.
    status = RankStatus()
    names = {
        "heartbeat_of": make_heartbeat,
        "status": status,
        "found": [],
        "thread": threading.get_ident(),
    }
    source = "def on_move():\n    found.append(heartbeat_of(status, 0, thread))"
    exec(compile(source, "rlhf_mc/runtime/heartbeat_thread.py", "exec"), names)
    status.on_move = names["on_move"]  # type: ignore[assignment]
    with PhaseTimer(status=status).phase("gen"):
        pass
    assert len(names["found"]) == 2  # type: ignore[arg-type]
    assert all("(test_a_phase_change" in heartbeat.code_line for heartbeat in names["found"])  # type: ignore[attr-defined]


def test_status_counts_the_seconds_since_its_last_change() -> None:
    status = RankStatus()
    status.since = time.monotonic() - 7.0
    assert round(make_heartbeat(status, 0, 0).seconds) == 7
