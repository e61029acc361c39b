"""Ground truths as the built-in rules read them: values of the data as text."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

_SEVERAL_SENTENCES = re.compile(
    r"####|(?<!\A\w)[.!?]\s+[A-Z][a-z']*\s+[a-z]|(?i:\banswers?(?: is| are|:))"
)
"""Marks of a worked solution. A dot after one first letter, as in `D. None of these`, ends no
sentence."""


def truth_text(ground_truth: Any) -> str:
    """Return a ground truth as text; a float without an exponent. One that is a whole number has no
    decimals: pandas makes such floats of the integers of a column with missing values."""
    if isinstance(ground_truth, float | Decimal) and math.isfinite(ground_truth):
        whole = int(ground_truth)
        return str(whole) if ground_truth == whole else f"{Decimal(str(ground_truth)):f}"
    return str(ground_truth)


def accepted_answers(ground_truth: Any) -> list[Any]:
    """Return the values of the accepted answers: the ground truth, each of a list, or each of
    {"target": list}."""
    if isinstance(ground_truth, dict) and "target" in ground_truth:
        ground_truth = ground_truth["target"]
    return [*ground_truth] if isinstance(ground_truth, list | tuple) else [ground_truth]


def is_plain(ground_truth: Any) -> bool:
    """Return whether a ground truth is a text or a finite number."""
    if isinstance(ground_truth, float | Decimal):
        return math.isfinite(ground_truth)
    return isinstance(ground_truth, str | int)


def is_solution(text: str) -> bool:
    """Return whether a text is a worked solution, which no answer equals."""
    return _SEVERAL_SENTENCES.search(text) is not None
