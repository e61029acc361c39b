r"""The rule for competition mathematics (MATH): the last \boxed{...} of the response must be equivalent to the
reference answer, by math-verify in a process of its own (equivalence.py). Every step in this file takes time linear in
the response's length.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from rlhf_mc.rewards.equivalence import Comparison, Undecided
from rlhf_mc.runtime.console import say

MAX_ANSWER_CHARS = 1000
"""A longer answer is compared character for character; it is not parsed."""

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
_MIXED_NUMBER = re.compile(r"^(-?\d+) (\d+)/(\d+)$")
_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!]| )(?=\d{3}(?![\d/]))")
_NUMBER = re.compile(r"-?(?:\d+(?:\.\d*)?|\.\d+)")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed \boxed{...} of `text`, inner braces included, or None. An escaped brace is
    an ordinary character."""
    open_braces: list[tuple[int, int]] = []  # position of the brace, and start of the box's content (0: not a box)
    last = -1
    start = 0
    end = 0
    for match in _BRACES.finditer(text):
        kind = match[0]
        if kind == "}" and open_braces:
            position, content = open_braces.pop()
            if content and position > last:
                last = position
                start = content
                end = match.start()
        elif kind == "{":
            open_braces.append((match.start(), 0))
        elif kind[-1] == "{" and len(kind) > 2:
            open_braces.append((match.start(), match.end()))
    return None if last < 0 else text[start:end]


_comparison = Comparison()
_undecided = 0
_MAX_REPORTED = 5
"""Undecided answers that each process reports; after them it reports every hundredth."""


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, float]:
    r"""Return as "score" 1.0 if the last \boxed{...} of the response is equivalent to the ground truth (itself boxed or
    bare), else 0.0. "undecided" is 1.0 if equivalence.LIMIT_SECONDS of processor time did not decide that: the score is
    0.0 then."""
    answer = last_boxed(solution_str)
    if answer is None:
        return {"score": 0.0, "undecided": 0.0}
    truth = str(ground_truth)
    boxed_truth = last_boxed(truth)
    truth = (truth if boxed_truth is None else boxed_truth).strip()
    try:
        return {"score": float(equivalent(answer.strip(), truth)), "undecided": 0.0}
    except Undecided as why:
        _report_undecided(answer, truth, str(why))
        return {"score": 0.0, "undecided": 1.0}


def equivalent(answer: str, truth: str) -> bool:
    """Return whether two answers, in LaTeX, are equivalent. Raise Undecided if the comparison was not completed."""
    if answer == truth:
        return True
    if not 0 < len(answer) <= MAX_ANSWER_CHARS or len(truth) > MAX_ANSWER_CHARS:
        return False
    if _NUMBER.fullmatch(answer) and _NUMBER.fullmatch(truth):
        return Decimal(answer) == Decimal(truth)  # most answers need no computer algebra
    return _comparison.same(_parsable(answer), _parsable(truth))


def _parsable(text: str) -> str:
    """Return the text with spellings that math-verify misreads replaced by ones that it reads."""
    text = " ".join(text.split()).rstrip(".").replace("°", "^\\circ").replace("\\varnothing", "\\emptyset")
    # 3 1/2 without its space would become 31/2.
    return _THOUSANDS.sub("", _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", text))


def _report_undecided(answer: str, truth: str, why: str) -> None:
    """Count an undecided comparison, and warn of it."""
    global _undecided
    _undecided += 1
    if _undecided <= _MAX_REPORTED or _undecided % 100 == 0:
        say(
            f"warning: reward rule for MATH: answer {answer[:80]!r} scores 0: whether it is {truth[:80]!r} was"
            f" not decided: {why} ({_undecided} such answers so far in this process)"
        )
