"""The rule for GSM8K: the number after `####` must be the reference answer; it scores as verl's strict rule does."""

from __future__ import annotations

import re
from typing import Any

_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_TAIL_CHARS = 300
"""Only the end of a response is searched, as in verl; an answer is given last."""


def extract_answer(text: str) -> str | None:
    """The last number that follows `#### `, without thousands commas; None where there is none.

    As strict as verl's: after `#### $18` there is no number, and `#### 18.` gives "18.", which is not "18".
    """
    found = _ANSWER.findall(text[-_TAIL_CHARS:])
    return found[-1].replace(",", "") if found else None


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1.0 where the answer of the response is the ground truth, character for character; else 0.0."""
    return float(extract_answer(solution_str) == str(ground_truth).strip().replace(",", ""))
