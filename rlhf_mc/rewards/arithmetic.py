"""The rule for the quickstart's arithmetic: the whole response must be the answer."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 1.0 if the response, stripped of white space, equals str(ground_truth), else 0.0."""
    return float(solution_str.strip() == str(ground_truth).strip())
