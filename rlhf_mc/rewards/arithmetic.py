"""The rule for the quickstart's arithmetic: the whole response must be the answer."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1.0 where the response, white space around it aside, is `ground_truth` as Python writes it; else 0.0."""
    return float(solution_str.strip() == str(ground_truth).strip())
