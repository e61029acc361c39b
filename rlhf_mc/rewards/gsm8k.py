"""The rules for GSM8K: a number of the response must be the reference answer, as in verl's strict and flexible rule."""

from __future__ import annotations

import re
from typing import Any

_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")
_TAIL_CHARS = 300
"""Characters at the end of a response that are searched, as in verl."""


def extract_answer(text: str) -> str | None:
    """Return the last number that follows `#### `, without thousands commas, or None.

    It is as strict as verl's: after `#### $18` there is no number, and `#### 18.` gives "18.", which is not "18".
    """
    answers = _ANSWER.findall(text[-_TAIL_CHARS:])
    return answers[-1].replace(",", "") if answers else None


def strict(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 1.0 if the number after `#### ` equals the ground truth, character for character, else 0.0."""
    return float(extract_answer(solution_str) == _reference(ground_truth))


def flexible(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 1.0 if the last number of the response equals the ground truth, character for character, else 0.0. Unlike
    verl's flexible rule it ignores thousands commas and a full stop after the number."""
    return float(extract_number(solution_str) == _reference(ground_truth))


def extract_number(text: str) -> str | None:
    """Return the last number, without thousands commas, or None."""
    numbers = _NUMBER.findall(text[-_TAIL_CHARS:])
    return numbers[-1].replace(",", "") if numbers else None


def _reference(ground_truth: Any) -> str:
    return str(ground_truth).strip().replace(",", "")
