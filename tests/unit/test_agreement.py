"""What ranks derive from what all say of themselves; that they agree is tested on several ranks."""

from __future__ import annotations

import pytest

from rlhf_mc.topology import agreement


@pytest.mark.parametrize(
    ("hosts", "count"),
    [
        (["a"], 1),
        (["a", "a", "b", "b"], 2),
        (["a", "a", "a", "a"], 4),
        (["a", "b", "a", "b"], 1),  # not neighbours
        (["a", "a", "b"], 1),  # not even
        (["a", "a", "b", "c"], 1),
    ],
)
def test_ranks_per_node(hosts: list[str], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "gather_objects", lambda value: hosts)
    assert agreement.ranks_per_node() == count
