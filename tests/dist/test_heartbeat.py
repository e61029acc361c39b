"""Heartbeats between two ranks: a rank that is silent or has ended ends the others, a rank that signs off does
not; and that all ranks agree on a request to stop. The conclusions from heartbeats are tested in
tests/unit/test_failure_detector.py."""

from __future__ import annotations

from typing import Any

import heartbeat_cases
import pytest

pytestmark = pytest.mark.dist


def test_a_silent_rank_ends_the_others(pool: Any) -> None:
    first, _ = pool(2).run(heartbeat_cases.exchanged, case="silent")
    ((line, is_printed),) = first["exits"]
    assert is_printed and line.startswith("rank 1 (")
    assert ") has sent no heartbeat for 2 s, last in phase gen of step 3; this rank was in phase gen of step 3" in line
    assert heartbeat_cases.TIMEOUT_SECONDS < first["seconds"] < 3 * heartbeat_cases.TIMEOUT_SECONDS


def test_a_rank_that_has_ended_ends_the_others_before_its_silence_would(pool: Any) -> None:
    first, second = pool(2).run(heartbeat_cases.exchanged, case="disconnected")
    ((line, is_printed),) = first["exits"]
    assert is_printed and ") is gone: its process has ended; last in phase gen of step 3" in line
    ((line, _),) = second["exits"]  # to rank 1, rank 0 has ended
    assert line.startswith("rank 0 (") and ") is gone: its process has ended; this rank was in phase gen" in line


@pytest.mark.parametrize("case", ["signed off", "unauthenticated", "flooded"])
def test_no_rank_ends(pool: Any, case: str) -> None:
    ranks = pool(2).run(heartbeat_cases.exchanged, case=case)
    assert [out["exits"] for out in ranks] == [[], []]
    assert ranks[0]["listens_at"] in ("127.0.0.1", "::1")  # MASTER_ADDR is localhost


def test_a_rank_that_asks_gets_the_stragglers(pool: Any) -> None:
    _, second = pool(2).run(heartbeat_cases.exchanged, case="diagnosis")
    assert second["diagnosis"].startswith("rank 0 (")
    assert ") is behind: in phase gen of step 3 for " in second["diagnosis"]


def test_a_request_to_one_rank_stops_all(pool: Any) -> None:
    assert pool(2).run(heartbeat_cases.stops) == ["SIGUSR1", "SIGUSR1"]
