"""The table of steps on the console."""

from __future__ import annotations

import io
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_mc.observability.step_table import (
    COLUMNS,
    HEADER_ROWS,
    LEGEND,
    StepTable,
    format_number,
    short_time,
)

KEYS = [key for column in COLUMNS for key in column.keys] + [
    "val-core/a/acc/mean@1",
    "val-core/b/c/acc/mean@4",
]
VALUES = st.floats(-1e300, 1e300) | st.sampled_from([float("nan"), float("inf"), float("-inf")])
TYPICAL = {
    "critic/score/mean": -12.3456,
    "actor/reward_kl_penalty": 0.0312,
    "actor/ppo_kl": -0.00002,
    "actor/entropy": 1.25,
    "response_length/mean": 32768.0,
    "actor/pg_clipfrac": 0.0123,
    "timing_s/step": 1234.5,
    "val-core/a/acc/mean@1": 0.875,
    "train/num_gen_batches": 12,
}


class Clock:
    """Clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def rows_of(stream: io.StringIO) -> list[str]:
    """Return the lines after the legend."""
    return stream.getvalue().removeprefix(LEGEND + "\n").splitlines()


def cells(header: str, row: str) -> dict[str, str]:
    """Return the row's cells by title."""
    assert len(header) == len(row)
    return dict(zip(header.split(), row.split(), strict=True))


def test_long_run_fits_80_columns_with_every_metric() -> None:
    stream = io.StringIO()
    clock = Clock()
    table = StepTable(20000, stream, clock)
    clock.now += 1234.5
    table.log(12345, TYPICAL)
    header, row = rows_of(stream)
    assert (
        header == "       step  reward  kl_ref  kl_old entropy length  clip s/step   left   val gen"
    )
    assert row == "12345/20000 -12.346  0.0312  -2e-05   1.250  32768 0.012 1234.5   109d 0.875  12"
    assert len(row) == 80


@given(
    total=st.integers(1, 10**7),
    part=st.floats(0, 1),
    seconds=st.floats(0, 1e9),
    steps=st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES), min_size=1, max_size=4),
)
def test_no_line_is_wider_than_80_and_none_lacks_reward_or_kl(
    total: int, part: float, seconds: float, steps: list[dict[str, float]]
) -> None:
    stream = io.StringIO()
    clock = Clock()
    table = StepTable(total, stream, clock)
    for metrics in steps:
        clock.now += seconds
        table.log(max(1, int(part * total)), metrics)
    assert all(len(line) <= 80 for line in stream.getvalue().splitlines())
    header = ""
    shown = []
    for line in rows_of(stream):
        if "reward" in line:
            header = line
        else:
            shown.append(cells(header, line))
    assert len(shown) == len(steps)
    for row, metrics in zip(shown, steps, strict=True):
        assert list(row)[1] == "reward"
        keys = {
            "reward": ["critic/score/mean"],
            "kl_ref": list(COLUMNS[1].keys),
            "kl_old": ["actor/ppo_kl"],
        }
        for title, names in keys.items():
            value = next((metrics[name] for name in names if name in metrics), None)
            if value is not None:
                assert float(row[title]) == pytest.approx(value, rel=0.5, abs=5e-4, nan_ok=True)


@given(value=st.floats(), width=st.integers(3, 9), decimals=st.integers(0, 6))
def test_number_fits_and_is_zero_only_for_zero(value: float, width: int, decimals: int) -> None:
    text = format_number(value, width, decimals)
    assert len(text) <= width
    if width >= 7 and decimals > 0 and abs(value) < float("inf"):
        assert (float(text) == 0) == (value == 0)


@given(st.floats(0, 1e12))
def test_short_time_has_six_characters_at_most(seconds: float) -> None:
    assert len(short_time(seconds)) <= 6


def test_short_time() -> None:
    times = (0, 59.6, 3599, 3600, 359999, 360000, 86400 * 123)
    assert [short_time(s) for s in times] == [
        "0:00",
        "1:00",
        "59:59",
        "1h00m",
        "99h59m",
        "4d04h",
        "123d",
    ]


def test_time_left_is_the_median_of_recent_steps() -> None:
    clock = Clock()
    table = StepTable(40, io.StringIO(), clock)
    clock.now += 30  # validation before the first step
    table.log(0, {"val-core/a/acc/mean@1": 0.25, "val-core/b/acc/mean@1": 0.75})
    for step, seconds in enumerate((60, 10, 12, 11), start=1):  # the first step is slow
        clock.now += seconds
        table.log(step, {})
    assert table.seconds_left(4) == 36 * 11.5


def test_header_is_repeated_and_changes_with_the_metrics() -> None:
    stream = io.StringIO()
    table = StepTable(100, stream, Clock())
    table.log(0, {"val-core/a/acc/mean@1": 0.25, "val-core/b/acc/mean@1": 0.75})
    for step in range(1, 2 * HEADER_ROWS):
        table.log(step, {"critic/score/mean": 0.5, "train/num_gen_batches": 2})
    lines = rows_of(stream)
    headers = [i for i, line in enumerate(lines) if "reward" in line]
    assert headers == [0, 2, 2 + 1 + HEADER_ROWS]
    assert cells(lines[0], lines[1])["val"] == "0.500"
    assert "gen" not in lines[0] and "gen" in lines[2]
    assert cells(lines[2], lines[3])["val"] == "-"
    assert stream.getvalue().count(LEGEND) == 1


def test_wide_terminal_shows_more_and_a_narrow_one_keeps_reward_and_kl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metrics = {**TYPICAL, "actor/grad_norm": 0.75, "perf/throughput": 1234.0}
    for columns, titles in ((120, 15), (36, 4)):
        monkeypatch.setenv("COLUMNS", str(columns))
        header, row = StepTable(99, Terminal(), Clock()).lines(1, metrics)
        assert len(header) == len(row) <= columns
        assert header.split()[:4] == ["step", "reward", "kl_ref", "kl_old"]
        assert len(header.split()) == titles
    assert os.environ["COLUMNS"] == "36"
