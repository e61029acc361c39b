r"""The rule for competition mathematics (MATH): the last \boxed{...} of the response must say the same as the
reference answer after light normalisation of its LaTeX. No computer algebra: 2x and x+x are different here.
"""

from __future__ import annotations

import re
from typing import Any

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")

_DROPPED = re.compile(
    r"""\\[!,;:>]            # LaTeX's small spaces
    | \\(?:left|right)(?![a-zA-Z])
    | \\\$ | \$              # dollars, of money and of math mode
    | \\% | %
    | \^\s*\{?\\circ\}?      # degrees
    | \\(?:displaystyle|quad|qquad)(?![a-zA-Z])
    """,
    re.VERBOSE,
)
_TRAILING_UNIT = re.compile(r"(?<=\S)\s*\\(?:text|mbox|mathrm)\s*\{\s*[^{}]*\}(?:\^\{?[23]\}?)?\s*$")
_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|([0-9a-zA-Z]))\s*(?:\{([^{}]*)\}|([0-9a-zA-Z]))")
_SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9a-zA-Z])")
_SLASH_FRACTION = re.compile(r"(-?)(\d+)/(\d+)")
_THOUSANDS = re.compile(r"(?<=\d),(?:\\!)?(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)")
_NAME_OF_RESULT = re.compile(r"^\s*[a-zA-Z](?:\([a-zA-Z]\))?\s*=\s*(?=[^=]+$)")


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} of `text`, inner braces included; None where none is closed."""
    for match in reversed(list(_BOXED.finditer(text))):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[match.end() : end]
    return None


def normalise(answer: str) -> str:
    """One spelling for what is written in several ways: spaces, units, fractions, roots, trailing zeros."""
    text = answer.strip().rstrip(".").replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac")
    text = _THOUSANDS.sub("", text)
    text = _DROPPED.sub("", text)
    text = _TRAILING_UNIT.sub("", text)
    text = _TEXT.sub(r"\1", text)
    text = _NAME_OF_RESULT.sub("", text)
    text = _SHORT_FRACTION.sub(lambda m: f"\\frac{{{m[1] or m[2] or ''}}}{{{m[3] or m[4] or ''}}}", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = re.sub(r"\s+", "", text)
    if slash := _SLASH_FRACTION.fullmatch(text):
        text = f"{slash[1]}\\frac{{{slash[2]}}}{{{slash[3]}}}"
    if _NUMBER.fullmatch(text):
        text = _plain_number(text)
    return text


def _plain_number(text: str) -> str:
    """A decimal number without needless zeros: 07.50 -> 7.5, .5 -> 0.5, -0 -> 0."""
    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
    whole, _, part = digits.partition(".")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    number = f"{whole}.{part}" if part else whole
    return number if number == "0" else sign + number


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    r"""1.0 where the last \boxed{...} of the response says the same as the ground truth (itself boxed or bare)."""
    answer = last_boxed(solution_str)
    if answer is None:
        return 0.0
    truth = str(ground_truth)
    boxed_truth = last_boxed(truth)
    return float(normalise(answer) == normalise(truth if boxed_truth is None else boxed_truth))
