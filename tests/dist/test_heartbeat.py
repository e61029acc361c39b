"""The watchdog between two ranks: who is silent or gone ends the others, who says goodbye does not; and that a wish to
stop is agreed on. What is concluded from what was heard is tested in tests/unit/test_rank_status.py."""

from __future__ import annotations

from typing import Any

import heartbeat_cases
import pytest

pytestmark = pytest.mark.dist


def test_a_silent_rank_ends_the_others(pool: Any) -> None:
    first, _ = pool(2).run(heartbeat_cases.watched, what="silent")
    ((line, say),) = first["said"]
    assert say and line.startswith("rank 1 (")
    assert ") has not been heard of for 2 s, last in phase gen of step 3; this rank was in phase gen of step 3" in line
    assert heartbeat_cases.TIMEOUT_SECONDS < first["seconds"] < 3 * heartbeat_cases.TIMEOUT_SECONDS


def test_a_rank_that_is_gone_ends_the_others_before_its_silence_would(pool: Any) -> None:
    first, second = pool(2).run(heartbeat_cases.watched, what="gone")
    ((line, say),) = first["said"]
    assert say and ") is gone: its process has ended; last in phase gen of step 3" in line
    ((line, _),) = second["said"]  # it sees rank 0 as gone
    assert line.startswith("rank 0 (") and ") is gone: its process has ended; this rank was in phase gen" in line


@pytest.mark.parametrize("what", ["goodbye", "stranger", "crowd"])
def test_no_rank_ends(pool: Any, what: str) -> None:
    ranks = pool(2).run(heartbeat_cases.watched, what=what)
    assert [out["said"] for out in ranks] == [[], []]
    assert ranks[0]["listens_at"] in ("127.0.0.1", "::1")  # MASTER_ADDR is localhost


def test_a_rank_that_asks_is_told_who_is_behind(pool: Any) -> None:
    _, second = pool(2).run(heartbeat_cases.watched, what="asks")
    assert second["behind"].startswith("rank 0 (") and ") is behind: in phase gen of step 3 for " in second["behind"]


def test_all_ranks_stop_where_one_is_asked_to(pool: Any) -> None:
    assert pool(2).run(heartbeat_cases.stops) == ["SIGUSR1", "SIGUSR1"]
