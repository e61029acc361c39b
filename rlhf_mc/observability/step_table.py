"""The table of steps on the console: one row a step, with the few metrics that show whether the run
learns. All metrics go to the files of sinks.py; phase_progress.py shows what happens during a step.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TextIO

from rlhf_mc.runtime import console

HEADER_ROWS = 20
"""Rows after which the header is repeated: it stays in view on a terminal of 24 lines."""
NUM_RECENT_STEPS = 20
"""Steps from which the time left is estimated."""
LEGEND = (
    "kl_ref: KL to the reference policy, kl_old: to the policy that sampled the step;\n"
    "clip: share of tokens that the ratio clip holds back; val: validation accuracy"
)


@dataclass(frozen=True)
class Column:
    """A column of metrics. The first key that a step has is shown."""

    title: str
    keys: tuple[str, ...]
    width: int
    decimals: int
    always: bool = True
    """False: the column is there from the first row that has the metric."""


COLUMNS = (
    Column("reward", ("critic/score/mean",), 7, 3),
    Column("kl_ref", ("actor/reward_kl_penalty", "actor/controlled_kl", "actor/kl_loss"), 7, 4),
    Column("kl_old", ("actor/ppo_kl",), 7, 4),
    Column("entropy", ("actor/entropy",), 7, 3),
    Column("length", ("response_length/mean",), 6, 1),
    Column("clip", ("actor/pg_clipfrac",), 5, 3),
    Column("s/step", ("timing_s/step",), 6, 1),
    Column("left", (), 6, 0),
    Column("val", (), 5, 3),
    Column("gen", ("train/num_gen_batches",), 3, 0, always=False),
    Column("idle_t", ("perf/idle_share/train",), 6, 3, always=False),
    Column("idle_r", ("perf/idle_share/rollout",), 6, 3, always=False),
    Column("grad", ("actor/grad_norm",), 7, 3),
    Column("trunc", ("response_length/clip_ratio",), 5, 3),
    Column("tok/s", ("perf/throughput",), 7, 0),
    Column("GiB", ("perf/peak_memory_gb",), 6, 1),
)
"""From left to right, and from those that are never left out to those that only a wide terminal
shows."""


class StepTable:
    """The table, a sink. A file and a terminal get the same lines; a terminal may be wider."""

    def __init__(
        self,
        total_steps: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: returns seconds; the time of the first step counts from this call."""
        self._total_steps = total_steps
        self._stream = stream or sys.stdout
        self._clock = clock
        self._last = clock()
        self._step_seconds: deque[float] = deque(maxlen=NUM_RECENT_STEPS)
        self._titles: set[str] = set()
        """Columns of the metrics that any step so far had."""
        self._header = ""
        self._num_rows = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the row of `step` (0: the validation before the first step), after the header where
        it has changed or is out of view."""
        now = self._clock()
        if step > 0:
            self._step_seconds.append(now - self._last)
        self._last = now
        header, row = self.lines(step, metrics)
        if not self._header:
            console.write(LEGEND, self._stream)
        if header != self._header or self._num_rows % HEADER_ROWS == 0:
            self._num_rows = 0
            console.write(header, self._stream)
        self._header = header
        self._num_rows += 1
        console.write(row, self._stream)

    def close(self) -> None:
        pass

    def lines(self, step: int, metrics: Mapping[str, float]) -> tuple[str, str]:
        """Return the header and the row of `step`, of the same width."""
        values = {column.title: _first(metrics, column.keys) for column in COLUMNS}
        accuracies = [
            value for value in validation_accuracies(metrics).values() if math.isfinite(value)
        ]
        values["val"] = statistics.fmean(accuracies) if accuracies else None
        values["left"] = self.seconds_left(step)
        self._titles |= {title for title, value in values.items() if value is not None}
        first = f"{step}/{self._total_steps}"
        width = max(2 * len(str(self._total_steps)) + 1, len(first), 5)
        columns = self._fitting(width)
        return (
            " ".join(
                ["step".rjust(width), *(column.title.rjust(column.width) for column in columns)]
            ),
            " ".join(
                [first.rjust(width), *(_cell(column, values[column.title]) for column in columns)]
            ),
        )

    def seconds_left(self, step: int) -> float | None:
        """Return the median of the recent step times, times the steps left, or None before the
        first step is done.

        The median ignores the longer times of the first step and of steps with a validation or a
        checkpoint."""
        if not self._step_seconds:
            return None
        return statistics.median(self._step_seconds) * max(self._total_steps - step, 0)

    def _fitting(self, width: int) -> list[Column]:
        """Return the columns that fit beside a first one of `width`: reward and KL always, the
        others in their order until one does not fit."""
        columns = console.terminal_columns() if self._stream.isatty() else console.COLUMNS
        parts = []
        for column in COLUMNS:
            if not (column.always or column.title in self._titles):
                continue
            width += 1 + column.width
            if width > columns and column.title not in ("reward", "kl_ref", "kl_old"):
                break
            parts.append(column)
        return parts


def _first(metrics: Mapping[str, float], keys: tuple[str, ...]) -> float | None:
    return next((float(metrics[key]) for key in keys if key in metrics), None)


def _cell(column: Column, value: float | None) -> str:
    if value is None:
        text = "-"
    elif column.title == "left":
        text = short_time(value)
    else:
        text = format_number(value, column.width, column.decimals)
    return text.rjust(column.width)


def format_number(value: float, width: int, decimals: int) -> str:
    """Return the value with at most `decimals` decimals in at most `width` characters. A value that
    would read as zero and is not, or that is too large, is written with an exponent; "*" where no
    number fits."""
    if not math.isfinite(value):
        return str(value) if len(str(value)) <= width else "*" * width
    for digits in range(decimals, -1, -1):
        text = f"{value:.{digits}f}"
        if len(text) <= width and (value == 0 or float(text) != 0 or decimals == 0):
            return text
    for text in (f"{value:.1e}", f"{value:.0e}"):
        if len(text) <= width:
            return text
    return "0" if abs(value) < 1 else "*" * width


def short_time(seconds: float) -> str:
    """Return a time in at most 6 characters: 59:59, 23h59m, 12d03h, 99999d."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours_of_day = divmod(hours, 24)
    if hours == 0:
        return f"{minutes}:{whole_seconds:02d}"
    if hours < 100:
        return f"{hours}h{minutes:02d}m"
    return f"{days}d{hours_of_day:02d}h" if days < 100 else f"{min(days, 99999)}d"


def validation_accuracies(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the accuracy by data source, from the keys val-core/<data_source>/acc/mean@N. A data
    source may contain slashes."""
    accuracies = {}
    for key, value in metrics.items():
        source, separator, _ = key.removeprefix("val-core/").rpartition("/acc/mean@")
        if key.startswith("val-core/") and separator:
            accuracies[source] = value
    return accuracies
