"""The progress line on the console: steps done, time left, and the few metrics that show whether the run learns. All
metrics go to the files of sinks.py.
"""

from __future__ import annotations

import math
import shutil
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

BAR_WIDTH = 20
NUM_RECENT_STEPS = 20
"""Steps from which the time left is estimated."""


class Progress:
    """A progress line, rewritten in place on a terminal; a file gets one line per step."""

    def __init__(
        self, total_steps: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """clock: returns seconds; the elapsed time counts from this call."""
        self._total_steps = total_steps
        self._stream = stream or sys.stdout
        self._clock = clock
        self._start = self._last = clock()
        self._step_seconds: deque[float] = deque(maxlen=NUM_RECENT_STEPS)
        self._shown: dict[str, str] = {}
        self._rewrites = self._stream.isatty()
        self._line_open = False

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that `step` is done (0: the validation before the first step). A metric that this step lacks keeps its
        last value, so that the accuracy stays between validations."""
        now = self._clock()
        if step > 0:
            self._step_seconds.append(now - self._last)
        self._last = now
        self._shown.update(headline(metrics))
        self._write(self.line(step))

    def line(self, step: int) -> str:
        """Return the text of the line after `step`."""
        done = min(step / self._total_steps, 1.0) if self._total_steps else 1.0
        num_filled = int(done * BAR_WIDTH)
        bar = "#" * num_filled + "." * (BAR_WIDTH - num_filled)
        clock = f"{format_seconds(self._last - self._start)} elapsed"
        seconds_left = self.seconds_left(step)
        if seconds_left is not None:
            clock += f", {format_seconds(seconds_left)} left"
        return " | ".join([f"step {step}/{self._total_steps} [{bar}] {done:4.0%}", clock, *self._shown.values()])

    def seconds_left(self, step: int) -> float | None:
        """Return the median of the recent step times, times the steps left, or None before the first step is done.

        The median ignores the longer times of the first step and of steps with a validation or a checkpoint."""
        if not self._step_seconds:
            return None
        return statistics.median(self._step_seconds) * max(self._total_steps - step, 0)

    def close(self) -> None:
        """End the line, so that later output does not overwrite it."""
        if self._line_open:
            self._stream.write("\n")
            self._stream.flush()
            self._line_open = False

    def _write(self, line: str) -> None:
        if self._rewrites:
            columns = shutil.get_terminal_size().columns  # a line that wraps cannot be rewritten
            self._stream.write(f"\r{line[: columns - 1]}\x1b[K")
            self._line_open = True
        else:
            self._stream.write(line + "\n")
        self._stream.flush()


def headline(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the metrics of the line, formatted, by their label, without those that are missing or not finite."""
    accuracies = [value for _, value in sorted(validation_accuracies(metrics).items()) if math.isfinite(value)]
    candidates = {
        "reward": (metrics.get("critic/score/mean"), "reward {:.3f}"),
        "accuracy": (statistics.fmean(accuracies) if accuracies else None, "val acc {:.3f}"),
        "kl": (metrics.get("actor/reward_kl_penalty", metrics.get("actor/ppo_kl")), "KL {:.4f}"),
        "batches": (metrics.get("train/num_gen_batches"), "{:.0f} batches"),
        "throughput": (metrics.get("perf/throughput"), "{:,.0f} tokens/s per rank"),
    }
    return {
        label: template.format(value)
        for label, (value, template) in candidates.items()
        if value is not None and math.isfinite(value)
    }


def validation_accuracies(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the accuracy by data source, from the keys val-core/<data_source>/acc/mean@N. A data source may contain
    slashes."""
    found = {}
    for key, value in metrics.items():
        source, separator, _ = key.removeprefix("val-core/").rpartition("/acc/mean@")
        if key.startswith("val-core/") and separator:
            found[source] = value
    return found


def format_seconds(seconds: float) -> str:
    """Return m:ss, or h:mm:ss from one hour on."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole_seconds:02d}" if hours else f"{minutes}:{whole_seconds:02d}"
