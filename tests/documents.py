"""The metric keys that docs/metrics.md explains, for tests of the pages and of runs."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def expanded(text: str) -> list[str]:
    """Return each spelling of a text with alternatives: "a/{b,c}" -> ["a/b", "a/c"]."""
    parts = [part.split(",") for part in re.split(r"\{([^}]*)\}", text)]
    return ["".join(choice) for choice in itertools.product(*parts)]


def explained_metrics() -> list[str]:
    """Return the keys of docs/metrics.md; * stands for any text, and so do <data_source> and N."""
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    keys = [key for row in rows for text in re.findall(r"`([^`]+)`", row) for key in expanded(text)]
    return [re.sub(r"<\w+>|(?<=@)N", "*", key) for key in keys]


def unexplained(metrics: set[str]) -> list[str]:
    """Return the keys of a run that docs/metrics.md does not explain."""
    patterns = [re.compile(re.escape(key).replace(r"\*", ".+")) for key in explained_metrics()]
    return sorted(key for key in metrics if not any(p.fullmatch(key) for p in patterns))
