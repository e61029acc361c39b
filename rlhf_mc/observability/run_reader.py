"""A run as its directory records it: finished, running, or dead, and of any version. Nothing is written there, and
what is missing or cut is left out and named. No torch here.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf_mc.config.errors import UserError, reason_of
from rlhf_mc.observability.run_files import (
    ADJUSTMENTS_FILE,
    GENERATIONS,
    HEALTH_FILE,
    HISTOGRAMS_FILE,
    LOCK_FILE,
    METRICS_FILE,
    PROFILE,
    RUN_FILE,
    STARTS_FILE,
    SUCCESS_FILE,
    TRAIN_GENERATIONS,
    Row,
    json_objects_and_faults,
)
from rlhf_mc.runtime.namespaces import namespace_id

State = Literal["finished", "running", "stopped", "failed", "died"]
STALE_SECONDS = 60.0
"""Age of run.lock from which a run on another machine counts as dead; the run touches it every 10 s."""
_SAMPLE = re.compile(r"\[prompt\] (.*?)\n\[response\] (.*?)\n\[ground truth\] (.*?)\n\[score\] (\S+)\n", re.DOTALL)


@dataclass(frozen=True)
class Sample:
    """One kept generation."""

    prompt: str
    response: str
    ground_truth: str
    score: float | None


@dataclass(frozen=True)
class RunRecord:
    """The content of the directory of one run."""

    root: Path
    state: State
    state_text: str
    """A sentence about the state."""
    run_id: str
    rows: Sequence[Row]
    """Of metrics.jsonl, one for each step, ascending."""
    starts: Sequence[Row]
    """Of starts.jsonl; none in a run of an earlier version."""
    health: Sequence[Row]
    histograms: Sequence[Row]
    adjustments: Sequence[Row]
    nonfinite_steps: Sequence[int]
    """Steps with a file of the samples whose loss or gradient was not finite."""
    validation: Mapping[int, Sequence[Sample]]
    """Kept generations of the validation after a step."""
    training: Mapping[int, Sequence[Sample]]
    """Kept generations of a training step."""
    phases: Mapping[int, Row]
    """Of each profiled step its times by phase and rank."""
    faults: Sequence[str] = field(default_factory=list)
    """Sentences about what could not be read."""

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the latest start; empty if they are not recorded."""
        found = self.starts[-1].get("config") if self.starts else None
        return found if isinstance(found, dict) else {}

    @property
    def last_step(self) -> int:
        """The last logged step; 0 if there is none."""
        return self.rows[-1]["step"] if self.rows else 0


def read_run(root: Path) -> RunRecord:
    """Read the directory of a run. Raise UserError if it is none, or cannot be read."""
    try:
        names = sorted(path.name for path in root.iterdir())
    except OSError as error:
        raise UserError(f"{root} cannot be read as the directory of a run: {reason_of(error)}") from error
    if not names:
        raise UserError(f"{root} is empty: no run has written there")
    if not {METRICS_FILE, STARTS_FILE, RUN_FILE} & set(names):
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise UserError(
            f"{root} is no directory of a run: it has none of {METRICS_FILE}, {STARTS_FILE} and {RUN_FILE}, but {shown}"
        )
    faults: list[str] = []
    rows = _by_step(_rows(root / METRICS_FILE, faults, with_step=True))
    if not rows:
        faults.append(f"{METRICS_FILE} has no rows yet: no step is logged")
    starts = _rows(root / STARTS_FILE, faults)
    if not starts:
        faults.append(f"{STARTS_FILE} has no start: settings, versions, hosts and resumes are not known")
    run_id = next((str(row["run_id"]) for row in (*rows, *starts) if row.get("run_id")), "")
    state, text = state_of(root, starts, rows[-1]["step"] if rows else 0)
    return RunRecord(
        root=root,
        state=state,
        state_text=text,
        run_id=run_id,
        rows=rows,
        starts=starts,
        health=_rows(root / HEALTH_FILE, faults, with_step=True),
        histograms=_by_step(_rows(root / HISTOGRAMS_FILE, faults, with_step=True)),
        adjustments=_rows(root / ADJUSTMENTS_FILE, faults),
        nonfinite_steps=sorted(_number_in(path.name) for path in root.glob("nonfinite_step_*.json")),
        validation=_samples(root / GENERATIONS, "step_*.txt", faults),
        training=_samples(root / TRAIN_GENERATIONS, "*.jsonl", faults),
        phases=_phases(root / PROFILE, faults),
        faults=faults,
    )


def state_of(root: Path, starts: Sequence[Row], last_step: int) -> tuple[State, str]:
    """Return the state of a run, and a sentence about it. last_step: the last that is logged."""
    end = starts[-1].get("end") if starts else None
    if isinstance(end, dict) and isinstance(how := end.get("how"), str):
        state: State = "finished" if how == "finished" else "failed" if how == "failed" else "stopped"
        return state, f"{state} after step {end.get('step')}: {end.get('text')}"
    if (root / SUCCESS_FILE).exists():
        return "finished", f"finished after step {last_step}"
    if is_locked(root / LOCK_FILE):
        return "running", f"running; the last logged step is {last_step}"
    return "died", f"killed, or of an earlier version: no end is recorded; the last logged step is {last_step}"


def is_locked(path: Path) -> bool:
    """Return whether a live process holds run.lock. Of a process on another machine the file's age decides."""
    try:
        touched = path.stat().st_mtime
        owner = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    if not isinstance(owner, dict):
        return False
    mine = (socket.gethostname(), namespace_id("pid"))
    if (owner.get("host"), owner.get("pid_namespace")) == mine:
        return os.path.exists(f"/proc/{owner.get('pid')}")
    return time.time() - touched <= STALE_SECONDS


def number(value: Any) -> float | None:
    """Return a finite number, None for anything else."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _rows(path: Path, faults: list[str], with_step: bool = False) -> list[Row]:
    """Return the objects of a file of JSON lines, and add a sentence to `faults` for lines that are none."""
    try:
        rows, bad = json_objects_and_faults(path)
    except OSError as error:
        faults.append(f"{path.name} cannot be read: {reason_of(error)}")
        return []
    complete = [row for row in rows if isinstance(row.get("step"), int)] if with_step else rows
    if bad or len(complete) < len(rows):
        lines = f": line {', '.join(map(str, bad[:5]))}{', ...' if len(bad) > 5 else ''}" if bad else ""
        num = len(bad) + len(rows) - len(complete)
        faults.append(f"{path.name}: {num} of {len(rows) + len(bad)} lines cannot be read and are left out{lines}")
    return complete


def _by_step(rows: Sequence[Row]) -> list[Row]:
    """Return the rows in the order of their steps; of several of one step the last."""
    return [row for _, row in sorted({row["step"]: row for row in rows}.items())]


def _samples(folder: Path, pattern: str, faults: list[str]) -> dict[int, list[Sample]]:
    """Return the samples of each step, by the number in the name of its file."""
    found = {}
    for path in folder.glob(pattern):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            faults.append(f"{folder.name}/{path.name} cannot be read: {reason_of(error)}")
            continue
        samples = _of_text(text) if path.suffix == ".txt" else _of_json(path)
        if samples:
            found[_number_in(path.name)] = samples
    return dict(sorted(found.items()))


def _of_text(text: str) -> list[Sample]:
    """Return the samples of a file that evaluate.write_generations has written."""
    return [
        Sample(prompt, response, truth, _float(score))
        for prompt, response, truth, score in _SAMPLE.findall(text + "\n")
    ]


def _of_json(path: Path) -> list[Sample]:
    """Return the samples of a file that samples.write_samples has written."""
    rows, _ = json_objects_and_faults(path)
    return [
        Sample(str(row.get("input", "")), str(row.get("output", "")), str(row.get("gts", "")), number(row.get("score")))
        for row in rows
    ]


def _phases(folder: Path, faults: list[str]) -> dict[int, Row]:
    """Return the content of profile/step_<n>/phases.json by step."""
    found = {}
    for path in folder.glob("step_*/phases.json"):
        try:
            content = json.loads(path.read_text())
            if not isinstance(content.get("phases"), dict):
                raise ValueError("no phases")
            found[_number_in(path.parent.name)] = content
        except (OSError, ValueError, AttributeError) as error:
            faults.append(f"profile/{path.parent.name}/{path.name} cannot be read: {error}")
    return dict(sorted(found.items()))


def _number_in(name: str) -> int:
    """Return the number in the name of a file; 0 without one."""
    digits = re.search(r"\d+", name)
    return int(digits[0]) if digits else 0


def _float(text: str) -> float | None:
    try:
        return number(float(text))
    except ValueError:
        return None
