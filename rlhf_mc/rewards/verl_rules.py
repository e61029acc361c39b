r"""verl's own rules for mathematics: `math_string`, its comparison of MATH answers as strings, and
`math_dapo`, DAPO's "Answer:" form. Their results are verl's (2026-08), which
tests/unit/rewards/verl_answers.jsonl holds. `numina` takes the answer where PRIME's rule takes it
and compares as the rule `math` does.
"""

from __future__ import annotations

import re
from typing import Any

from rlhf_mc.rewards import math as math_rule
from rlhf_mc.rewards.ground_truths import truth_text

# ---------------------------------------------------------------- math_string

_REPLACED = (
    ("\n", ""), ("\\!", ""),
    ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""),
    ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""),
)  # fmt: skip
_UNIT = "\\text{ "
_REPLACED_AFTER_UNITS = (("\\\\%", ""), ("\\%", ""), (" .", " 0."), ("{.", "{0."))
_WHOLE = "(-?[1-9][0-9]{0,4298}|0)"
_QUOTIENT = re.compile(f"{_WHOLE}/{_WHOLE}")


class _Unreadable(Exception):
    """A string that the normalisation does not read; it is compared as it is."""


def math_string(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    r"""Return 1.0 if the last \boxed{...} of the response and the ground truth are the same string
    after the normalisation of Hendrycks et al. 2021 (arXiv 2103.03874), else 0.0."""
    answer = last_box(solution_str)
    if answer is None:
        return 0.0
    truth = truth_text(ground_truth)
    try:
        return float(_normalised(answer) == _normalised(truth))
    except _Unreadable:
        return float(answer == truth)


def last_box(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} as verl finds it, or None. `\boxed 5` ends at the
    next $, and comes before every \boxed{...}; nothing else may stand between \boxed and its
    brace."""
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    return _braced(text, text.rfind("\\boxed"))


def _braced(text: str, start: int) -> str | None:
    r"""Return the content of the braces after the \boxed at `start`, if they follow it at once and
    are closed."""
    first = start + len("\\boxed")
    if start < 0 or text[first : first + 1] != "{":
        return None
    depth = 0
    for brace in re.finditer("[{}]", text[first:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[first + 1 : first + brace.start()]
    return None


def _normalised(text: str) -> str:
    text = _replaced(text, _REPLACED)
    if text.count(_UNIT) > 1:
        raise _Unreadable
    text = _replaced(text.partition(_UNIT)[0], _REPLACED_AFTER_UNITS)
    if text.startswith("."):
        text = f"0{text}"
    name, _, value = text.partition("=")
    if text.count("=") == 1 and len(name) <= 2:
        text = value
    if re.search(r"\\sqrt(?:\\sqrt|\Z)", text):
        raise _Unreadable
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = _braced_fractions(text)
    if text == "0.5":
        return "\\frac{1}{2}"
    return _QUOTIENT.sub(r"\\frac{\1}{\2}", text) if _QUOTIENT.fullmatch(text) else text


def _braced_fractions(text: str) -> str:
    r"""Return \frac12 as \frac{1}{2}; the text as it is if a \frac has a single character after
    it."""
    head, *pieces = text.split("\\frac")
    for i, piece in enumerate(pieces):
        if not piece:
            raise _Unreadable
        if piece[0] == "{":
            continue
        if len(piece) == 1:
            return text
        pieces[i] = (
            f"{{{piece[0]}}}{piece[1:] if piece[1] == '{' else f'{{{piece[1]}}}{piece[2:]}'}"
        )
    return "\\frac".join([head, *pieces])


def _replaced(text: str, table: tuple[tuple[str, str], ...]) -> str:
    for old, new in table:
        text = text.replace(old, new)
    return text


# ---------------------------------------------------------------- math_dapo

_DAPO_CHARS = 300
"""Characters at the end of a response that are searched; a box must begin in the last hundred."""
_DAPO_ANSWER = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)
_NO_ANSWER = "[INVALID]"
_DAPO_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
    *((removed, "") for removed in (
        "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots",
        "sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds",
        "meters", "meals", "edges", "students", "childrentickets", "multiples", "\\text{s}",
        "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}",
        "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
    )),
)  # fmt: skip
_DAPO_FORMS = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def math_dapo(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, float]:
    r"""Return as "score" 1.0 if the text after the last "Answer:" is the ground truth after the
    normalisation of Minerva (Lewkowycz et al. 2022, arXiv 2206.14858, appendix D), else -1.0, and
    as "acc" 1.0 or 0.0. A response without "Answer:" is right if its last \boxed{...} is the ground
    truth, character for character."""
    answer, is_normalised = _dapo_answer(solution_str)
    truth = truth_text(ground_truth)
    is_right = answer == (dapo_normalised(truth) if is_normalised else truth)
    return {"score": 1.0 if is_right else -1.0, "acc": float(is_right)}


def dapo_answer(text: str) -> str:
    """Return the answer of a response, normalised."""
    return _dapo_answer(text)[0]


def _dapo_answer(text: str) -> tuple[str, bool]:
    """Return the answer, and whether it is after "Answer:", and so normalised."""
    text = text[-_DAPO_CHARS:]
    marked = _DAPO_ANSWER.findall(text)
    answer = dapo_normalised(marked[-1]) if marked else _NO_ANSWER
    if answer == _NO_ANSWER:
        tail = text[-100:]
        boxed = _braced(tail, tail.rfind("\\boxed{"))
        if boxed is not None:
            return boxed, False
    return answer, True


def dapo_normalised(text: str) -> str:
    """Return an answer in Minerva's normal form."""
    text = _replaced(text.rpartition("=")[2], _DAPO_REPLACED)
    for pattern, replacement in _DAPO_FORMS:
        text = pattern.sub(replacement, text)
    text = text.replace("$", "")
    without_commas = text.replace(",", "")
    return (without_commas if without_commas.isdigit() else text).strip()


# ---------------------------------------------------------------- numina

_MARK = re.compile(r"answers? (?:is|are)|answer:", re.IGNORECASE)
_TAIL_CHARS = 1000
"""Characters at the end of a response that are searched for a mark."""


def numina_answer(text: str) -> str | None:
    r"""Return the last \boxed{...}, else the first line after the last "answer:", "answer is" or
    "answers are"."""
    boxed = math_rule.last_boxed(text)
    if boxed is not None:
        return boxed
    _, *after = _MARK.split(text[-_TAIL_CHARS:])
    return (after or [""])[-1].strip().partition("\n")[0].partition(". ")[0].strip() or None


def numina(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, float]:
    """Return the score of the response's answer by the comparison of the rule `math`."""
    return math_rule.score_answer(numina_answer(solution_str), ground_truth)
