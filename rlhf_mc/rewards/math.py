r"""The rule for competition mathematics (MATH): the last \boxed{...} of the response must be
equivalent to the reference answer, by math-verify in a process of its own (equivalence.py). Every
step in this file takes time linear in the response's length.
"""

from __future__ import annotations

import re
from typing import Any

from rlhf_mc.rewards import answer_forms as forms
from rlhf_mc.rewards.equivalence import Comparison, Undecided
from rlhf_mc.rewards.ground_truths import truth_text

MAX_ANSWER_CHARS = 1000
"""A longer answer is compared character for character; it is not parsed."""

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
_TWO_SIGNS = re.compile(r"[-+] ?[-+]")
_NEVER_SAME = (
    {"set", "tuple"},
    {"set", "interval"},
    {"one", "boxed"},
    {"one", "list"},
    {"boxed", "list"},
)
"""Kinds of answers (answer_forms.brackets) of which one is never the other."""


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed \boxed{...} of `text`, inner braces included, or None.
    An escaped brace is an ordinary character."""
    # position of the brace, and start of the box's content (0: not a box)
    open_braces: list[tuple[int, int]] = []
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


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, float]:
    r"""Return as "score" 1.0 if the last \boxed{...} of the response is equivalent to the ground
    truth (itself boxed or bare), else 0.0. "undecided" is 1.0 if equivalence.LIMIT_SECONDS of
    processor time did not decide that: the score is 0.0 then."""
    return score_answer(last_boxed(solution_str), ground_truth)


def score_answer(answer: str | None, ground_truth: Any) -> dict[str, float]:
    """Return compute_score's result for an answer that was taken from a response."""
    if answer is None:
        return {"score": 0.0, "undecided": 0.0}
    truth = truth_text(ground_truth)
    boxed_truth = last_boxed(truth)
    truth = (truth if boxed_truth is None else boxed_truth).strip()
    try:
        return {"score": float(equivalent(answer.strip(), truth)), "undecided": 0.0}
    except Undecided:
        return {"score": 0.0, "undecided": 1.0}


def equivalent(answer: str, truth: str) -> bool:
    """Return whether two answers, in LaTeX, are equivalent. Raise Undecided if the comparison was
    not completed."""
    if max(len(answer), len(truth)) > MAX_ANSWER_CHARS:
        return answer == truth
    return _equivalent(forms.spelled(answer), forms.spelled(truth))


def _equivalent(answer: str, truth: str) -> bool:
    """Decide what the forms of the answers decide; ask math-verify for the rest."""
    if not answer or not truth:
        return False
    if forms.squeezed(answer) == forms.squeezed(truth):
        return True
    if any(_TWO_SIGNS.match(text) for text in (answer, truth)):
        return False
    values = forms.decimal_value(answer), forms.decimal_value(truth)
    if None not in values:
        return values[0] == values[1]  # most answers need no computer algebra
    letters, contents = zip(forms.label(answer), forms.label(truth), strict=True)
    if all(letters):
        return letters[0] == letters[1] and (not all(contents) or _equivalent(*contents))
    if any(letter and content for letter, content in zip(letters, contents, strict=True)):
        return _equivalent(*contents)
    with_base = forms.based(answer), forms.based(truth)
    if any(with_base):
        digits = [
            match[0] if match else text
            for match, text in zip(with_base, (answer, truth), strict=True)
        ]
        bases = {match[1] for match in with_base if match}
        return digits[0] == digits[1] and len(bases) == 1
    texts = forms.words(answer), forms.words(truth)
    if all(texts):
        return texts[0] == texts[1]
    if (
        any(texts)
        and forms.squeezed(forms.plain(answer)).lower()
        == forms.squeezed(forms.plain(truth)).lower()
    ):
        return True
    units = {forms.unit(answer), forms.unit(truth)} - {None}
    if len(units) == 2:
        return False
    counts = forms.without_unit(answer), forms.without_unit(truth)
    bare = forms.without_percent(counts[0]), forms.without_percent(counts[1])
    if bare != counts and _equivalent(*bare):
        return True
    return _same_lists(*counts)


def _same_lists(answer: str, truth: str) -> bool:
    """Compare brackets and number of parts; ask math-verify for the rest."""
    texts = [answer, truth]
    if ("=" in answer) != ("=" in truth):
        if forms.is_equation(answer) or forms.is_equation(truth):
            return False
        texts = [forms.without_name(text) for text in texts]
    texts = [forms.as_union(forms.with_both_signs(text)) for text in texts]
    lists = [forms.parts(text) for text in texts]
    kinds = [forms.brackets(text, items) for text, items in zip(texts, lists, strict=True)]
    if set(kinds) in _NEVER_SAME:
        return False
    if set(kinds) == {"list"}:
        repetitions = [", ".join(forms.repeated(items)) for items in lists]
        if len(lists[0]) != len(lists[1]) or (any(repetitions) and not _equivalent(*repetitions)):
            return False
    if set(kinds) == {"list", "tuple"}:  # 1, 2 for (1, 2), in this order
        texts = [
            f"({', '.join(map(forms.without_name, items))})" if kind == "list" else text
            for text, items, kind in zip(texts, lists, kinds, strict=True)
        ]
    return _comparison.same(*texts)
