"""consensus.py in one process: errors of any rank, ranks per node. Agreement of several ranks:
tests/dist."""

from __future__ import annotations

import pytest

from rlhf_mc.config.errors import UserError
from rlhf_mc.topology import consensus


def test_error_of_one_rank_is_raised_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert consensus.on_every_rank(lambda: 7) == 7

    def fail() -> None:
        raise UserError("mine")

    with pytest.raises(UserError, match="mine"):
        consensus.on_every_rank(fail, "not in the message of a UserError")
    with pytest.raises(UserError, match="mine"):
        consensus.on_rank_0(fail)
    assert consensus.gather_results(lambda: 7) == [7]
    with pytest.raises(UserError, match="mine"):
        consensus.gather_results(fail)
    assert consensus.all_ranks(True) and not consensus.all_ranks(False)
    monkeypatch.setattr(consensus, "all_ranks", lambda flag, group=None: False)
    monkeypatch.setattr(
        consensus, "gather_objects", lambda value, group=None: [value, UserError("of rank 1")]
    )
    with pytest.raises(UserError, match="of rank 1"):
        consensus.on_every_rank(lambda: 7)


def test_disk_error_becomes_a_user_error() -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device", "metrics.jsonl")

    message = r"^trainer\.default_local_dir: No space left on device; .* \(metrics\.jsonl\)$"
    for run in (consensus.on_every_rank, consensus.on_rank_0, consensus.gather_results):
        assert run(lambda: 7) in (7, [7])
        with pytest.raises(UserError, match=message):
            run(fail, "trainer.default_local_dir")


@pytest.mark.parametrize(
    ("hosts", "count"),
    [
        (["a"], 1),
        (["a", "a", "b", "b"], 2),
        (["a", "a", "a", "a"], 4),
        (["a", "b", "a", "b"], 1),  # interleaved
        (["a", "a", "b"], 1),  # uneven
        (["a", "a", "b", "c"], 1),
    ],
)
def test_ranks_per_node(hosts: list[str], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consensus, "gather_objects", lambda value: hosts)
    assert consensus.ranks_per_node() == count
