"""The console's table of a run's start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from config_files import load
from hypothesis import example, given
from hypothesis import strategies as st

from rlhf_mc.models.engine import RankShare
from rlhf_mc.trainer.start_table import ModelRow, format_bytes, in_flight, notes, table


def test_table_has_the_largest_of_the_ranks_and_marks_what_is_offloaded() -> None:
    ranks = [
        RankShare(
            10_000_000, 20_000_000, 40_000_000, 999_999_999, frozenset({"grads", "optimizer"})
        ),
        RankShare(8_750_000_000, 17_500_000_000, 1_234, 0, frozenset({"grads", "optimizer"})),
    ]
    found = table(
        [
            ModelRow("actor", ("8", "2", "16x4", "1024", "64"), ranks),
            ModelRow(
                "reward_models.a_very_long_name",
                ("1", "1", "1", "2", "1"),
                [RankShare(620_000, 2_480_000)],
            ),
            ModelRow("rollout", ("1", "1", "1", "2", "-"), [RankShare(620_000, 2_480_000)]),
        ]
    )
    assert found == [
        "a rank holds          tp  cp   pp   dp  ep  params   weights gradients optimizer",
        "actor                  8   2 16x4 1024  64   8.75B   17.5 GB  40.0 MB*  1.00 GB*",
        "..s.a_very_long_name   1   1    1    2   1  620.0k   2.48 MB         -         -",
        "rollout                1   1    1    2   -  620.0k   2.48 MB         -         -",
        "  * on the device in the phases that need it, else offloaded to the host",
    ]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (123_456_789, "123 MB"),
        (1.5e12, "1500 GB"),
    ],
)
def test_size(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(
    numbers=st.lists(st.integers(0, 9 * 10**13), min_size=4, max_size=4),
    role=st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=60),
    offloaded=st.sets(st.sampled_from(["params", "grads", "optimizer"])),
    note=st.text(max_size=400),
)
@example([9_999_950_000_000] * 4, "a", {"params", "grads", "optimizer"}, "")
@pytest.mark.slow
def test_no_line_is_wider_than_80(
    numbers: list[int], role: str, offloaded: set[str], note: str
) -> None:
    rows = [
        ModelRow(
            role, ("999", "999", "99x9", "9999", "999"), [RankShare(*numbers, frozenset(offloaded))]
        )
    ]
    assert all(len(line) <= 80 for line in (*table(rows), *notes([note])))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), None),
        (("partial_rollout=true",), "16 prompts in flight: 64 responses, 2.0 batches; the engines"),
        # two engines of 16 hold one batch of 8 prompts
        (("partial_rollout=true",), "hold 32 at a time, 1.0 batches: above 8, rollout.prompts"),
        (("tail_batching=true", "max_num_seqs=20"), "hold 40 at a time, 1.2 batches"),
    ],
)
def test_responses_in_flight(config_file: Path, overrides: Any, words: str | None) -> None:
    of_rollout = ("n=4", "max_num_seqs=16", *overrides)
    cfg = load(
        config_file,
        "data.train_batch_size=8",
        "algorithm.rollout_correction.rollout_is=token",
        *(f"rollout.{each}" for each in of_rollout),
    )
    run: Any = SimpleNamespace(config=cfg, rollout=SimpleNamespace(groups=[[0], [1]]))
    lines = in_flight(run)
    assert lines == [] if words is None else words in lines[0]
    assert ("above" in "".join(lines)) == (overrides == ("partial_rollout=true",))
