"""The sinks of a step's metrics: metrics.jsonl, TensorBoard events, experiment trackers, the table
of steps on the console.

metrics.jsonl is the run's record: the run ends if it cannot be written. All else is best effort:
the run continues without a sink that cannot be written. Rank 0 writes; the other ranks have a
NullSink.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO

from torch.utils.tensorboard import SummaryWriter

from rlhf_mc import durable
from rlhf_mc.config.errors import disk_errors, error_reason
from rlhf_mc.config.printing import recorded
from rlhf_mc.config.schema import Config, TrainerConfig
from rlhf_mc.observability.step_table import StepTable
from rlhf_mc.observability.trackers import TRACKERS, TrackedRun, TrackerSink
from rlhf_mc.run_files import METRICS_FILE, keep_up_to
from rlhf_mc.runtime.console import print_line
from rlhf_mc.runtime.work import count

TENSORBOARD_DIR = "tensorboard"


class Sink(Protocol):
    """A destination of metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write all metrics of one step. Call it once per step (step 0: validation before the first
        step). Raise UserError if the record cannot be written."""

    def close(self) -> None:
        """Flush and close."""


class NullSink:
    """The sink of the ranks that do not log."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


def build_sinks(
    rank: int, config: Config, total_steps: int, after_step: int | None, run_id: str
) -> Sink:
    """Return the Sinks of rank 0, or the NullSink of another rank; arguments as of Sinks."""
    if rank != 0:
        return NullSink()
    return Sinks(config.trainer, total_steps, after_step, run_id=run_id, settings=recorded(config))


class Sinks:
    """All sinks of trainer.logger. Files are in trainer.default_local_dir. A run that resumes after
    a step keeps the rows up to that step and drops the rows of later steps."""

    def __init__(
        self,
        config: TrainerConfig,
        total_steps: int,
        after_step: int | None = None,
        stream: TextIO | None = None,
        run_id: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the sinks. Raise UserError if metrics.jsonl cannot be written.

        after_step: the step that the run resumes after, None for a new run. stream: of the table of
        steps, by default standard output. run_id: the run that every row of metrics.jsonl names.
        settings: the resolved config, which trackers show."""
        directory = Path(config.default_local_dir)
        self._record: Sink = NullSink()
        if "jsonl" in config.logger:
            self._record = JsonlSink(directory / METRICS_FILE, after_step, run_id)
        self._others: dict[str, Sink] = {}
        if "tensorboard" in config.logger:
            self._add(
                "TensorBoard", lambda: TensorBoardSink(directory / TENSORBOARD_DIR, after_step)
            )
        name = config.experiment_name or directory.resolve().name
        tracked = TrackedRun(directory, run_id or name, config.project_name, name, settings or {})
        for tracker in TRACKERS:
            if tracker in config.logger:
                self._add(tracker, partial(TrackerSink, tracker, tracked))
        if "console" in config.logger:
            self._add("table of steps", lambda: StepTable(total_steps, stream))

    def _add(self, name: str, build: Callable[[], Sink]) -> None:
        best_effort(name, lambda: self._others.update({name: build()}))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write all metrics of one step, see Sink. A best-effort sink that cannot be written is
        dropped."""
        self._record.log(step, metrics)
        for name, sink in list(self._others.items()):
            if not best_effort(name, lambda sink=sink: sink.log(step, metrics)):  # type: ignore[misc]
                del self._others[name]

    def close(self) -> None:
        """Flush and close all sinks. Another call does nothing."""
        self._record.close()
        for name, sink in self._others.items():
            best_effort(name, sink.close)
        self._others.clear()


def best_effort(name: str, write: Callable[[], object]) -> bool:
    """Write an output that a run can do without: the report, samples, TensorBoard's events, the
    table of steps. Return True if it was written. Any error becomes a warning. name: the output's
    name in the warning."""
    start = time.perf_counter()
    try:
        write()
        count(file_seconds=time.perf_counter() - start)
        return True
    except Exception as error:
        # what only looks at a run does not end it, whatever a library raises
        text = error_reason(error) if isinstance(error, OSError) else str(error)
        reason = next(iter(text.splitlines()), type(error).__name__)
        print_line(f"warning: {name} cannot be written ({reason}); the run continues without")
        return False


def append_line(path: Path, line: str) -> None:
    """Append a line to a file that a run can do without. Any error becomes a warning."""

    def append() -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)

    best_effort(path.name, append)


class JsonlSink:
    """One JSON object per line and step, `{"step": n, "run_id": id, key: value, ...}`. `log`
    returns once the line is on disk, since the step's checkpoint relies on it."""

    def __init__(
        self, path: Path, after_step: int | None = None, run_id: str | None = None
    ) -> None:
        self._subject = f"trainer.default_local_dir: cannot write {path}"
        self._head: dict[str, str] = {} if run_id is None else {"run_id": run_id}
        with disk_errors(self._subject):
            path.parent.mkdir(parents=True, exist_ok=True)
            if after_step is not None and path.exists():
                keep_up_to(path, after_step)
            self._file = path.open("w" if after_step is None else "a", encoding="utf-8")
            durable.sync(path.parent)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {
            "step": step,
            **self._head,
            **{key: _json_number(value) for key, value in metrics.items()},
        }
        with disk_errors(self._subject):
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with disk_errors(self._subject):
            self._file.close()


class TensorBoardSink:
    """TensorBoard scalars under the metrics' own names."""

    def __init__(self, directory: Path, after_step: int | None = None) -> None:
        self._directory = directory
        # purge_step: TensorBoard hides earlier events of this and later steps, which the run
        # repeats.
        self._writer = SummaryWriter(
            str(directory), purge_step=0 if after_step is None else after_step + 1
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()
        # names begin with the time of creation
        for file in sorted(self._directory.glob("events.*"))[-1:]:
            durable.sync(file)

    def close(self) -> None:
        self._writer.close()


def _json_number(value: float) -> float | int | None:
    """Return the value as strict JSON can hold it: None (null) for NaN and the infinities."""
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
