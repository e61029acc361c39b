"""Where a step's metrics go: metrics.jsonl, TensorBoard events, the console. What they mean is not decided here.

metrics.jsonl is the run's record: where it cannot be written, the run ends. All else is a view: where it cannot be
written, the run continues without. One rank (0) builds Sinks; the others log nothing.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from torch.utils.tensorboard import SummaryWriter

from rlhf_mc import durable
from rlhf_mc.config.errors import UserError, reason_of
from rlhf_mc.config.schema import TrainerConfig
from rlhf_mc.observability.progress import Progress

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """All of trainer.logger. Files lie in trainer.default_local_dir. A run that resumes after a step keeps what they
    say up to it, and drops what they say of later steps."""

    def __init__(
        self,
        config: TrainerConfig,
        total_steps: int,
        after_step: int | None = None,
        stream: TextIO | None = None,
        run_id: str | None = None,
    ) -> None:
        """after_step: where the run resumes, null: it begins. `stream`: where the progress line goes, null: standard
        output. run_id: what every row of metrics.jsonl names as its run. Raises UserError where a file cannot be
        written."""
        directory = Path(config.default_local_dir)
        self._record: list[Sink] = []
        self._views: dict[str, Sink] = {}
        if "jsonl" in config.logger:
            self._record.append(JsonlSink(directory / METRICS_FILE, after_step, run_id))
        if "tensorboard" in config.logger:
            self._show("TensorBoard", lambda: TensorBoardSink(directory / TENSORBOARD_DIR, after_step))
        if "console" in config.logger:
            self._show("progress line", lambda: ConsoleSink(total_steps, stream))

    def _show(self, name: str, build: Callable[[], Sink]) -> None:
        view(name, lambda: self._views.update({name: build()}))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write all metrics of one step; call it once a step (step 0: validation before the first step). Raises
        UserError where the record cannot be written; a view that cannot be written is given up."""
        for sink in self._record:
            sink.log(step, metrics)
        for name, sink in list(self._views.items()):
            if not view(name, lambda sink=sink: sink.log(step, metrics)):  # type: ignore[misc]
                del self._views[name]

    def close(self) -> None:
        """Flush and close everything."""
        for sink in self._record:
            sink.close()
        for name, sink in self._views.items():
            view(name, sink.close)


def view(what: str, write: Callable[[], object]) -> bool:
    """Write a view of the run: a picture, samples, TensorBoard's events, the progress line. Return whether it was
    written. Whatever is wrong is a warning: a view never fails a run."""
    try:
        write()
        return True
    except Exception as error:
        reason = reason_of(error) if isinstance(error, OSError) else error
        with suppress(OSError, ValueError):
            print(f"rlhf_mc: warning: {what} cannot be written ({reason}); the run continues without", file=sys.stderr)
        return False


class JsonlSink:
    """One JSON object a line and step, `{"step": n, "run_id": id, key: value, ...}`, on the disk itself when `log`
    returns: a checkpoint of the step counts on it."""

    def __init__(self, path: Path, after_step: int | None = None, run_id: str | None = None) -> None:
        self._path = path
        self._head: dict[str, str] = {} if run_id is None else {"run_id": run_id}
        with _disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if after_step is not None and path.exists():
                keep_up_to(path, after_step)
            self._file = path.open("w" if after_step is None else "a", encoding="utf-8")
            durable.sync(path.parent)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step, **self._head, **{key: _json_number(value) for key, value in metrics.items()}}
        with _disk_errors(self._path):
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with _disk_errors(self._path):
            self._file.close()


class TensorBoardSink:
    """TensorBoard scalars under the metrics' own names."""

    def __init__(self, directory: Path, after_step: int | None = None) -> None:
        self._directory = directory
        # purge_step: from there on TensorBoard shows nothing of what the run does again.
        self._writer = SummaryWriter(str(directory), purge_step=0 if after_step is None else after_step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()
        for file in sorted(self._directory.glob("events.*"))[-1:]:  # named by when they were begun
            durable.sync(file)

    def close(self) -> None:
        self._writer.close()


class ConsoleSink:
    """The progress line."""

    def __init__(self, total_steps: int, stream: TextIO | None = None) -> None:
        self._progress = Progress(total_steps, stream)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.update(step, metrics)

    def close(self) -> None:
        self._progress.close()


def check_metrics(path: Path, run_id: str | None, logged: Sequence[Sequence[int]]) -> None:
    """Raise UserError unless the rows of metrics.jsonl up to a checkpoint's step are exactly those that it counts on,
    all of one run. logged: the first and last step of each uninterrupted piece, ascending. Rows before the first of
    them are not compared: an earlier version of the program did not record which rows it had written."""
    wanted = [step for first, last in logged for step in range(first, last + 1)]
    if not wanted:
        return
    rows = list(_rows(path))
    other = next((row["run_id"] for _, row in rows if row.get("run_id", run_id) != run_id), None)
    found = [row["step"] for _, row in rows if wanted[0] <= row["step"] <= wanted[-1]]
    if other is not None:
        fault = f"holds rows of another run, {other}, beside those of {run_id}"
    elif found != wanted:
        missing = sorted(set(wanted) - set(found))
        fault = f"lacks the row of step {missing[0]}" if missing else "holds a step twice, in excess or out of order"
        fault += f" ({len(missing)} of {len(wanted)} rows are missing)" if missing else ""
    else:
        return
    raise UserError(
        f"{path}: {fault}; the checkpoint of step {wanted[-1]} counts on rows {wanted[0]} to {wanted[-1]}. Restore the "
        "file, or begin at that checkpoint in another trainer.default_local_dir: trainer.resume_mode=resume_path"
    )


def steps_logged(path: Path) -> list[int]:
    """Return the steps of metrics.jsonl's rows, in their order."""
    return [row["step"] for _, row in _rows(path)]


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the complete lines that are a step's, each with what it says. A file that is not there has none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines(keepends=True):
        try:
            row = json.loads(line)
            if line.endswith("\n") and isinstance(row["step"], int):
                yield line, row
        except (ValueError, TypeError, KeyError):
            continue


def keep_up_to(path: Path, step: int) -> None:
    """Drop the rows of later steps, and a row that was cut short. The old file stays until the new one is whole."""
    kept = [line for line, row in _rows(path) if row["step"] <= step]
    durable.replace(path, "".join(kept).encode())


def _json_number(value: float) -> float | int | None:
    """The value as strict JSON can hold it: null for NaN and the infinities."""
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"trainer.default_local_dir: cannot write {path}: {reason_of(error)}") from error
