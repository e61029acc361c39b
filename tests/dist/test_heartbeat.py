"""Heartbeats between two ranks: a silent or disconnected rank ends the others, a rank that signs
off does not. All ranks agree on a stop request. Conclusions from heartbeats:
tests/unit/runtime/test_failure_detector.py."""

from __future__ import annotations

from typing import Any

import heartbeat_cases
import pytest

pytestmark = pytest.mark.dist


def test_silent_rank_ends_the_others(pool: Any) -> None:
    first, _ = pool(2).run(heartbeat_cases.exchange_heartbeats, case="silent")
    ((line, is_printed),) = first["exits"]
    assert is_printed and line.startswith("rank 1 (")
    assert (
        ") has sent no heartbeat for 2 s, last in phase gen of step 3; this rank was in phase gen "
        "of step 3"
    ) in line
    assert first["seconds"] > heartbeat_cases.TIMEOUT_SECONDS


def test_disconnected_rank_ends_the_others_before_the_timeout(pool: Any) -> None:
    first, second = pool(2).run(heartbeat_cases.exchange_heartbeats, case="disconnected")
    ((line, is_printed),) = first["exits"]
    assert is_printed and ") is gone: its process has ended; last in phase gen of step 3" in line
    ((line, _),) = second["exits"]  # rank 1 finds rank 0 gone
    assert (
        line.startswith("rank 0 (")
        and ") is gone: its process has ended; this rank was in phase gen" in line
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_writes_a_profile_may_hold_the_lock_of_python(pool: Any, rank: int) -> None:
    for out in pool(2).run(heartbeat_cases.hold_the_lock, rank=rank):
        assert (
            out["exits"] == []
            and out["seconds"] > heartbeat_cases.LOCK_SECONDS > heartbeat_cases.TIMEOUT_SECONDS
        )


@pytest.mark.parametrize("case", ["signed off", "unauthenticated", "flooded"])
def test_sign_off_and_unauthenticated_connections_end_no_rank(pool: Any, case: str) -> None:
    ranks = pool(2).run(heartbeat_cases.exchange_heartbeats, case=case)
    assert [out["exits"] for out in ranks] == [[], []]
    assert ranks[0]["listens_at"] in ("127.0.0.1", "::1")  # MASTER_ADDR is localhost


def test_rank_can_ask_for_the_stragglers(pool: Any) -> None:
    _, second = pool(2).run(heartbeat_cases.exchange_heartbeats, case="diagnosis")
    assert second["diagnosis"].startswith("rank 0 (")
    assert ") is behind: in phase gen of step 3 for " in second["diagnosis"]


def test_stop_request_on_one_rank_stops_all(pool: Any) -> None:
    assert pool(2).run(heartbeat_cases.request_stop_on_rank_1) == ["SIGUSR1", "SIGUSR1"]
