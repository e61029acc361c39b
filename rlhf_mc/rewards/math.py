r"""The rule for competition mathematics (MATH): the last \boxed{...} of the response must be equivalent to the
reference answer. The two are compared after a light normalisation of their LaTeX, and if they differ by computer
algebra (equivalence.py). Every step in this file takes time linear in the response's length.
"""

from __future__ import annotations

import re
from typing import Any

from rlhf_mc.rewards.equivalence import Comparison, Undecided
from rlhf_mc.runtime.console import say

MAX_ANSWER_CHARS = 1000
"""A longer answer is compared character for character; it is neither normalised nor parsed."""

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
_DROPPED = re.compile(
    r"""\\[!,;:>]            # LaTeX's small spaces
    | \\(?:left|right)(?![a-zA-Z])
    | \\\$ | \$              # dollars, of money and of math mode
    | \\% | %
    | \^\s*\{?\\circ\}? | °  # degrees
    | \\(?:displaystyle|quad|qquad)(?![a-zA-Z])
    """,
    re.VERBOSE,
)
_TRAILING_UNIT = re.compile(r"(?<=\S)\s?\\(?:text|mbox|mathrm)\s*\{\s*[^{}]*\}(?:\^\{?[23]\}?)?\s*$")
_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|([0-9a-zA-Z]))\s*(?:\{([^{}]*)\}|([0-9a-zA-Z]))")
_SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9a-zA-Z])")
_SLASH_FRACTION = re.compile(r"(-?)(\d+)/(\d+)")
_THOUSANDS = re.compile(r"(?<=\d),(?:\\!)?(?=\d{3}(?!\d))")
_MIXED_NUMBER = re.compile(r"(-?\d+) (\d+)/(\d+)")
_NUMBER = re.compile(r"-?(?:\d+(?:\.\d*)?|\.\d+)")
_NAME_OF_RESULT = re.compile(r"^\s*[a-zA-Z](?:\([a-zA-Z]\))?\s*=\s*(?=[^=]+$)")


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


def normalise(answer: str) -> str:
    """Return the answer with one spelling of spaces, units, fractions, roots and trailing zeros."""
    text = " ".join(answer.split()).rstrip(".").replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac")
    text = _THOUSANDS.sub("", text)
    text = " ".join(_DROPPED.sub("", text).split())
    text = _TRAILING_UNIT.sub("", text)
    text = _TEXT.sub(r"\1", text)
    text = _NAME_OF_RESULT.sub("", text)
    text = _SHORT_FRACTION.sub(lambda m: f"\\frac{{{m[1] or m[2] or ''}}}{{{m[3] or m[4] or ''}}}", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = text.replace("\\varnothing", "\\emptyset")
    text = _mixed_number(text).replace(" ", "")
    if slash := _SLASH_FRACTION.fullmatch(text):
        text = f"{slash[1]}\\frac{{{slash[2]}}}{{{slash[3]}}}"
    if _NUMBER.fullmatch(text):
        text = _plain_number(text)
    return text


def _mixed_number(text: str) -> str:
    """Return 3 1/2 as 3\\frac{1}{2}: without the space it would become 31/2."""
    mixed = _MIXED_NUMBER.fullmatch(text.strip())
    return f"{mixed[1]}\\frac{{{mixed[2]}}}{{{mixed[3]}}}" if mixed else text


def _plain_number(text: str) -> str:
    """Return a decimal number without redundant zeros: 07.50 -> 7.5, .5 -> 0.5, -0 -> 0."""
    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
    whole, _, decimals = digits.partition(".")
    whole = whole.lstrip("0") or "0"
    decimals = decimals.rstrip("0")
    number = f"{whole}.{decimals}" if decimals else whole
    return number if number == "0" else sign + number


_comparison = Comparison()
_undecided = 0
_MAX_REPORTED = 5
"""Undecided answers that each process reports; after them it reports every hundredth."""


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    r"""Return 1.0 if the last \boxed{...} of the response is equivalent to the ground truth (itself boxed or bare),
    else 0.0. An answer that is not decided within equivalence.LIMIT_SECONDS of processor time scores 0.0 too."""
    answer = last_boxed(solution_str)
    if answer is None:
        return 0.0
    truth = str(ground_truth)
    boxed_truth = last_boxed(truth)
    return float(equivalent(answer.strip(), (truth if boxed_truth is None else boxed_truth).strip()))


def equivalent(answer: str, truth: str) -> bool:
    """Return whether two answers, in LaTeX, are equivalent."""
    if answer == truth:
        return True
    if not 0 < len(answer) <= MAX_ANSWER_CHARS or len(truth) > MAX_ANSWER_CHARS:
        return False
    if normalise(answer) == normalise(truth):
        return True
    if _NUMBER.fullmatch(answer) and _NUMBER.fullmatch(truth):
        return False  # two plain numbers: most wrong answers need no computer algebra
    try:
        return _comparison.same(_parsable(answer), _parsable(truth))
    except Undecided as why:
        _report_undecided(answer, truth, str(why))
        return False


def _parsable(text: str) -> str:
    """Return the text with spellings that math-verify misreads replaced by ones that it reads."""
    return _mixed_number(
        " ".join(text.split()).rstrip(".").replace("°", "^\\circ").replace("\\varnothing", "\\emptyset")
    )


def _report_undecided(answer: str, truth: str, why: str) -> None:
    """Count an undecided comparison, and warn of it."""
    global _undecided
    _undecided += 1
    if _undecided <= _MAX_REPORTED or _undecided % 100 == 0:
        say(
            f"warning: reward rule for MATH: answer {answer[:80]!r} scores 0: whether it is {truth[:80]!r} was"
            f" not decided: {why} ({_undecided} such answers so far in this process)"
        )
