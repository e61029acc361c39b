"""The files of a run in its directory: their names, and the reader of JSON lines that a killed run
may have left incomplete. No torch here.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_mc import durable, json_files
from rlhf_mc.config.load import to_dict
from rlhf_mc.config.schema import Config, DataConfig, ModelConfig, TrainerConfig

METRICS_FILE = "metrics.jsonl"
STARTS_FILE = "starts.jsonl"
CONFIG_FILE = "resolved_config.yaml"
HISTOGRAMS_FILE = "histograms.jsonl"
HEALTH_FILE = "health.jsonl"
JOURNAL_FILE = "rollouts.jsonl"
"""The groups of each step, with rollout.tail_batching or partial_rollout."""
OBSERVATIONS = "observations"
"""The answers of environments, by step and rank: step_<n>_<rank>.jsonl."""
ADJUSTMENTS_FILE = "adjustments.jsonl"
RUN_FILE = "run.json"
"""Names the run to which a directory belongs: an export (with the step), or
trainer.default_local_dir."""
SUCCESS_FILE = "success.json"
LOCK_FILE = "run.lock"
STALE_SECONDS = 60.0
"""Time without a touch of LOCK_FILE (its owner touches it every 10 s) after which an owner on
another machine counts as dead."""
NONFINITE_FILE = "nonfinite_step_{}.json"
"""The samples of a skipped update, by step."""
GENERATIONS = "generations"
TRAIN_GENERATIONS = "train_generations"
PROFILE = "profile"
REPORT = "report.html"

Row = dict[str, Any]


def text_lines(path: Path) -> list[str]:
    """Return the lines of a text file, each with its newline; a last line that is cut has none.
    Only a newline ends a line: U+2028, of which str.splitlines makes two, may be within a JSON
    string. Raise OSError."""
    lines = json_files.read_bytes(path).decode(errors="replace").split("\n")
    return [*(f"{line}\n" for line in lines[:-1]), *filter(None, lines[-1:])]


def json_objects(path: Path) -> list[Row]:
    """Return the JSON objects of a file of JSON lines, without other lines; an empty list where
    there is no file."""
    return json_objects_and_bad_lines(path)[0]


def json_objects_and_bad_lines(path: Path) -> tuple[list[Row], list[int]]:
    """Return the JSON objects of a file of JSON lines, and the numbers, from 1, of all other lines.
    A file that is missing or a directory has no lines."""
    try:
        rows = [_object(line) for line in text_lines(path)]
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return [], []
    return [row for row in rows if row is not None], [
        number for number, row in enumerate(rows, 1) if row is None
    ]


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield each complete line of a step with its parsed row, of metrics.jsonl or a file like it. A
    missing file has none."""
    try:
        lines = text_lines(path)
    except FileNotFoundError:
        return
    for line in lines:
        if (
            line.endswith("\n")
            and (row := _object(line)) is not None
            and isinstance(row.get("step"), int)
        ):
            yield line, row


def checked_line(row: Row) -> str:
    """Return a row as a line of JSON that begins with the CRC-32 of the rest."""
    text = json.dumps(row)
    return f"{_checksum(text)}{text[1:]}\n"


@dataclass
class CheckedRows:
    """The lines of a file of checked lines, by their numbers, from 1. Empty ones are left out."""

    rows: dict[int, Row] = field(default_factory=dict)
    changed: list[int] = field(default_factory=list)
    """Lines whose checksum is wrong."""
    incomplete: list[int] = field(default_factory=list)
    """Lines that do not end as a row: a killed process may leave one."""


def checked_rows(path: Path) -> CheckedRows:
    """Return the lines of a file of checked lines; none if it is missing."""
    checked = CheckedRows()
    try:
        lines = text_lines(path)
    except FileNotFoundError:
        return checked
    for number, line in enumerate(lines, 1):
        # Without its newline: a process that was killed just before it has left a whole row, which
        # the next one ends.
        line = line.removesuffix("\n")
        text = "{" + line[len(_checksum("")) :]
        row = _object(text) if line == f"{_checksum(text)}{text[1:]}" else None
        if row is not None:
            checked.rows[number] = row
        elif line:
            ends = line.endswith("}") and line.count("}") >= line.count("{")
            (checked.changed if ends else checked.incomplete).append(number)
    return checked


def _checksum(text: str) -> str:
    return f'{{"crc32": "{zlib.crc32(text.encode()):08x}", '


def steps_logged(path: Path) -> list[int]:
    """Return the steps of the rows of metrics.jsonl, in file order."""
    return [row["step"] for _, row in read_rows(path)]


def keep_up_to(path: Path, step: int) -> None:
    """Drop the rows of later steps, and a truncated row. The file is replaced atomically."""
    lines = [line for line, row in read_rows(path) if row["step"] <= step]
    durable.replace(path, "".join(lines).encode())


def observation_files(root: Path) -> list[tuple[int, Path]]:
    """Return the files in OBSERVATIONS, each with its step, in the order of the steps."""
    names = (
        (path.stem.split("_")[1], path) for path in (root / OBSERVATIONS).glob("step_*_*.jsonl")
    )
    return sorted((int(step), path) for step, path in names if step.isdecimal())


def _object(line: str) -> Row | None:
    """Return the JSON object of a line, None for anything else."""
    try:
        row = json_files.parse(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting with its dotted key."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(before: Any, after: Any) -> dict[str, list[Any]]:
    """Return {section.key: [value before, value after]} of two resolved configs. A key that one
    lacks has its default, as in an earlier version without the setting, or null."""
    old, new = (
        dict(flattened(settings)) if isinstance(settings, Mapping) else {}
        for settings in (before, after)
    )
    pairs = {
        key: [side.get(key, _defaults().get(key)) for side in (old, new)] for key in {**old, **new}
    }
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


@functools.cache
def _defaults() -> dict[str, Any]:
    """Return the default of each setting that has one, by its dotted key."""
    required = (DataConfig(None), ModelConfig(None), TrainerConfig(None))  # type: ignore[arg-type]
    return dict(flattened(to_dict(Config(*required))))
