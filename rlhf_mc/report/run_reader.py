"""A run as its directory records it: finished, running, or dead, and of any version. Nothing is
written there, and what is missing or cut is left out and named. No torch here."""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf_mc import json_files, run_files
from rlhf_mc.config.errors import UserError, error_reason
from rlhf_mc.run_files import Row, json_objects_and_bad_lines
from rlhf_mc.runtime.namespaces import namespace_id

State = Literal["finished", "running", "stopped", "failed", "died"]
MAX_SAMPLE_STEPS = 12
"""Steps of a run whose generations are read; of more, some between the first and the last."""


@dataclass(frozen=True)
class Sample:
    """One recorded generation."""

    prompt: str
    turns: Sequence[tuple[str, str]]
    """Kind ("response"; "observation" or "context" of an environment) and text. A response of one
    turn has one."""
    ground_truth: str
    score: float | None
    length: float | None = None
    """In tokens."""
    tokens: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Columns of one length, as samples.token_columns has them; empty: not recorded."""


@dataclass(frozen=True)
class RunRecord:
    """The content of the directory of one run."""

    root: Path
    state: State
    state_text: str
    """A sentence about the state."""
    run_id: str
    rows: Sequence[Row]
    """Rows of metrics.jsonl, one for each step, ascending."""
    starts: Sequence[Row]
    """Rows of starts.jsonl; none in a run of an earlier version."""
    health: Sequence[Row]
    histograms: Sequence[Row]
    adjustments: Sequence[Row]
    nonfinite_steps: Sequence[int]
    """Steps with a file of the samples whose loss or gradient was not finite."""
    validation: Mapping[int, Sequence[Sample]]
    """Recorded generations of some steps' validations."""
    training: Mapping[int, Sequence[Sample]]
    """Recorded generations of some training steps."""
    phases: Mapping[int, Row]
    """Times of each profiled step, by phase and rank."""
    problems: Sequence[str] = field(default_factory=list)
    """Sentences about what could not be read."""

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the latest start; empty if they are not recorded."""
        return self.starts[-1].get("config", {}) if self.starts else {}

    @property
    def last_step(self) -> int:
        """The last logged step; 0 before the first one."""
        return self.rows[-1]["step"] if self.rows else 0


def read_run(root: Path, sample_steps: int = MAX_SAMPLE_STEPS) -> RunRecord:
    """Read the directory of a run. Raise UserError if the directory is no run's, or cannot be read.
    sample_steps: steps of a kind whose generations are read."""
    try:
        names = sorted(path.name for path in root.iterdir())
    except OSError as error:
        raise UserError(
            f"{root} cannot be read as the directory of a run: {error_reason(error)}"
        ) from error
    if not names:
        raise UserError(f"{root} is empty: no run has written there")
    expected = (run_files.METRICS_FILE, run_files.STARTS_FILE, run_files.RUN_FILE)
    if not set(expected) & set(names):
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        listed = "{}, {} and {}".format(*expected)
        raise UserError(f"{root} is no directory of a run: it has none of {listed}, but {shown}")
    problems: list[str] = []
    rows = _by_step(_rows(root / run_files.METRICS_FILE, problems, with_step=True))
    if not rows:
        problems.append(f"{run_files.METRICS_FILE} has no rows yet: no step is logged")
    starts = _rows(root / run_files.STARTS_FILE, problems)
    if not starts:
        problems.append(
            f"{run_files.STARTS_FILE} has no start: settings, versions, hosts and resumes are not "
            "known"
        )
    run_id = next((str(row["run_id"]) for row in (*rows, *starts) if row.get("run_id")), "")
    state, text = run_state(root, starts, rows[-1]["step"] if rows else 0)
    return RunRecord(
        root=root,
        state=state,
        state_text=text,
        run_id=run_id,
        rows=rows,
        starts=starts,
        health=_rows(root / run_files.HEALTH_FILE, problems, with_step=True),
        histograms=_by_step(_rows(root / run_files.HISTOGRAMS_FILE, problems, with_step=True)),
        adjustments=_rows(root / run_files.ADJUSTMENTS_FILE, problems),
        nonfinite_steps=sorted(
            _number_in(path.name) for path in root.glob(run_files.NONFINITE_FILE.format("*"))
        ),
        validation=_samples(root / run_files.GENERATIONS, sample_steps, problems),
        training=_samples(root / run_files.TRAIN_GENERATIONS, sample_steps, problems),
        phases=_phases(root / run_files.PROFILE, problems),
        problems=problems,
    )


def run_state(root: Path, starts: Sequence[Row], last_step: int) -> tuple[State, str]:
    """Return the state of a run, and a sentence about it. last_step: the last that is logged.

    A run with a live process is running, even if the last recorded start has ended: the process may
    still be loading, before it records its own start. Only an end recorded by the same process
    counts, and a roll-back is no end."""
    last = starts[-1] if starts else {}
    end = last.get("end", {})
    how = end.get("how")
    owner = live_owner(root / run_files.LOCK_FILE)
    if owner is not None and (
        how in (None, "rolled back") or last.get("process") != owner.get("pid")
    ):
        return "running", f"running; the last logged step is {last_step}"
    if how == "rolled back":
        return (
            "died",
            f"killed after a roll-back: {end.get('text')}; the last logged step is {last_step}",
        )
    if how is not None:
        state: State = (
            "finished" if how == "finished" else "failed" if how == "failed" else "stopped"
        )
        return state, f"{state} after step {end.get('step')}: {end.get('text')}"
    if (root / run_files.SUCCESS_FILE).exists():
        return "finished", f"finished after step {last_step}"
    return (
        "died",
        (
            "killed, or of an earlier version: no end is recorded; the last logged step is "
            f"{last_step}"
        ),
    )


def live_owner(path: Path) -> Row | None:
    """Return the content of run.lock if its owner is alive. For an owner on another machine the
    file's age decides."""
    try:
        touched = path.stat().st_mtime
        owner = json_files.read(path)
    except (OSError, ValueError):
        return None
    if not isinstance(owner, dict):
        return None
    if (owner.get("host"), owner.get("pid_namespace")) == (
        socket.gethostname(),
        namespace_id("pid"),
    ):
        is_alive = os.path.exists(f"/proc/{owner.get('pid')}")
    else:
        is_alive = time.time() - touched <= run_files.STALE_SECONDS
    return owner if is_alive else None


def finite_or_none(value: Any) -> float | None:
    """Return a finite number, None for anything else."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _rows(path: Path, problems: list[str], with_step: bool = False, name: str = "") -> list[Row]:
    """Return the objects of a file of JSON lines, and add a sentence to `problems` for other lines.
    name: of the file in the sentence."""
    name = name or path.name
    try:
        rows, bad = json_objects_and_bad_lines(path)
    except OSError as error:
        problems.append(f"{name} cannot be read: {error_reason(error)}")
        return []
    complete = [row for row in rows if isinstance(row.get("step"), int)] if with_step else rows
    if bad or len(complete) < len(rows):
        lines = (
            f": line {', '.join(map(str, bad[:5]))}{', ...' if len(bad) > 5 else ''}" if bad else ""
        )
        num = len(bad) + len(rows) - len(complete)
        problems.append(
            f"{name}: {num} of {len(rows) + len(bad)} lines cannot be read and are left out{lines}"
        )
    return complete


def _by_step(rows: Sequence[Row]) -> list[Row]:
    """Return the rows in the order of their steps; of several of one step the last."""
    return [row for _, row in sorted({row["step"]: row for row in rows}.items())]


def _samples(folder: Path, most: int, problems: list[str]) -> dict[int, list[Sample]]:
    """Return the samples of at most `most` steps, by the number in the name of their file, which
    samples.write_samples has written."""
    samples_by_step = {}
    paths = sorted(folder.glob("*.jsonl"), key=lambda path: _number_in(path.name))
    for path in evenly_spaced(paths, most):
        rows = _rows(path, problems, name=f"{folder.name}/{path.name}")
        if rows:
            samples_by_step[_number_in(path.name)] = [_sample(row) for row in rows]
    return samples_by_step


def evenly_spaced(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` of the items, evenly spaced from the first to the last; of one it is
    the last."""
    if len(items) <= most:
        return list(items)
    distance = (len(items) - 1) / max(most - 1, 1)
    return [items[round(i * distance)] for i in range(most)] if most > 1 else list(items[-1:])


def _sample(row: Row) -> Sample:
    texts = (str(row.get("input", "")), _turns(row), str(row.get("gts", "")))
    score, length = (finite_or_none(row.get(key)) for key in ("score", "length"))
    return Sample(*texts, score, length, row.get("tokens") or {})


def _turns(row: Row) -> list[tuple[str, str]]:
    turns = row.get("turns") or [("response", row.get("output", ""))]
    return [(str(kind), str(text)) for kind, text in turns]


def _phases(folder: Path, problems: list[str]) -> dict[int, Row]:
    """Return the content of profile/step_<n>/phases.json by step."""
    phases = {}
    for path in folder.glob("step_*/phases.json"):
        try:
            phases[_number_in(path.parent.name)] = json_files.read(path)
        except (OSError, ValueError) as error:
            problems.append(f"profile/{path.parent.name}/{path.name} cannot be read: {error}")
    return dict(sorted(phases.items()))


def _number_in(name: str) -> int:
    """Return the number in the name of a file; 0 without one."""
    digits = re.search(r"\d+", name)
    return int(digits[0]) if digits else 0
