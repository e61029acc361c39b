"""Every metric that a run logs, declared once: docs/metrics.md is made of it
(tests/checks/metrics_page.py), and a key that is not declared fails the tests. Each file here has
the sections of one subject. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from rlhf_mc.observability.catalog.generation import AGREEMENT, LENGTHS, OFF_POLICY
from rlhf_mc.observability.catalog.metric import Metric, Section
from rlhf_mc.observability.catalog.rewards import GROUPS, PROGRESS, REWARDS
from rlhf_mc.observability.catalog.time import MEMORY, SPEED, TIME
from rlhf_mc.observability.catalog.updates import ACTOR, CRITIC

SECTIONS: tuple[Section, ...] = (
    PROGRESS,
    REWARDS,
    GROUPS,
    ACTOR,
    CRITIC,
    LENGTHS,
    OFF_POLICY,
    AGREEMENT,
    TIME,
    SPEED,
    MEMORY,
)
"""In the order of the page."""


@lru_cache(maxsize=4096)
def find(key: str) -> Metric | None:
    """Return the declaration of a logged key, the most specific one; None if there is none."""
    rows = (row for section in SECTIONS for row in section.metrics)
    fitting = [row for row in rows if not row.is_users_own and row.matches(key)]
    return max(fitting, key=lambda row: row.num_literal, default=None)


def undeclared(keys: Iterable[str]) -> list[str]:
    """Return the keys without a declaration, in order."""
    return sorted(key for key in keys if find(key) is None)
