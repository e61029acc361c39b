"""Functions that the ranks run in test_health_actions.py: whole runs that health rules roll back or
adjust."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from cases import built_run
from resume_cases import Blocks, blocks

from rlhf_mc.config.errors import UserError
from rlhf_mc.trainer import loop


def train(config_path: str, overrides: list[str]) -> dict[str, Any]:
    """Run the whole loop. Return the rows of metrics.jsonl, adjustments.jsonl and health.jsonl, the
    lines that this rank has printed, the last weights or the error."""
    printed = io.StringIO()
    with (
        built_run(config_path, overrides) as run,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        directory = Path(run.config.trainer.default_local_dir)
        error: str | None = None
        last: Blocks = []
        try:
            loop.fit(run)
            last = blocks(run)
        except UserError as found:
            error = str(found)
    return {
        "metrics": _rows(directory / "metrics.jsonl"),
        "adjustments": _rows(directory / "adjustments.jsonl"),
        "events": _rows(directory / "health.jsonl"),
        "printed": printed.getvalue().splitlines(),
        "error": error,
        "last": last,
    }


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
