"""The files of a run in its directory that the report reads: their names, and readers of JSON lines that a killed run
may have left incomplete. No torch here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
STARTS_FILE = "starts.jsonl"
CONFIG_FILE = "resolved_config.yaml"
HISTOGRAMS_FILE = "histograms.jsonl"
HEALTH_FILE = "health.jsonl"
ADJUSTMENTS_FILE = "adjustments.jsonl"
RUN_FILE = "run.json"
"""Names the run to which a directory belongs: an export (with the step), or trainer.default_local_dir."""
SUCCESS_FILE = "success.json"
LOCK_FILE = "run.lock"
GENERATIONS = "generations"
TRAIN_GENERATIONS = "train_generations"
PROFILE = "profile"
PLOT = "training.png"
REPORT = "report.html"

Row = dict[str, Any]


def json_objects(path: Path) -> list[Row]:
    """Return the JSON objects of a file of JSON lines, without the lines that are none; none where there is no file."""
    return json_objects_and_faults(path)[0]


def json_objects_and_faults(path: Path) -> tuple[list[Row], list[int]]:
    """Return the JSON objects of a file of JSON lines, and the numbers of the lines, from 1, that are none. A file that
    is missing or a directory has no lines."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")  # U+2028 may be within a line
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return [], []
    if not lines[-1]:
        lines.pop()  # what follows the last newline
    found: list[Row] = []
    faults = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            found.append(row)
        else:
            faults.append(number)
    return found, faults


def differences(before: Any, after: Any, prefix: str = "") -> dict[str, list[Any]]:
    """Return {section.key: [value before, value after]} of two resolved configs; null for a key that one lacks. A
    section that one lacks is compared key by key."""
    if not any(isinstance(tree, dict) for tree in (before, after)):
        return {} if before == after else {prefix: [before, after]}
    if not all(tree is None or isinstance(tree, dict) for tree in (before, after)):
        return {prefix: [before, after]}
    found: dict[str, list[Any]] = {}
    before = before or {}
    after = after or {}
    for key in {**before, **after}:
        found |= differences(before.get(key), after.get(key), f"{prefix}.{key}" if prefix else key)
    return found
