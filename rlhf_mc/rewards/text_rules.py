"""Rules on texts: GSM8K, exact match, token F1, multiple choice, and the format of a response. Each
takes time linear in the response's length and raises nothing, whatever the response is.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from rlhf_mc.rewards.ground_truths import accepted_answers, truth_text
from rlhf_mc.rewards.math import last_boxed

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CHOICE_AFTER_MARK = re.compile(
    r"(?i:answer|choice|option)(?i:\s+is)?[\s:*]*[(\[]?([A-Z]|[0-9])\b[)\].]?"
)
_BARE_CHOICE = re.compile(r"[(\[]?([A-Z]|[0-9])[)\].]?")
_TAIL_CHARS = 300
"""Characters at the end of a response that are searched for a choice or, as in verl, for GSM8K's
answer."""
_THINK = re.compile(r"<(/?)think>")
_GSM8K_MARK = re.compile(r"#### -?[0-9]")
_GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")


def gsm8k_strict(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    """Return 1.0 if the number after `#### ` equals the ground truth, character for character, else
    0.0."""
    return float(gsm8k_answer(solution_str) == _gsm8k_truth(ground_truth))


def gsm8k_flexible(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    """Return 1.0 if the last number of the response equals the ground truth, character for
    character, else 0.0. Unlike verl's flexible rule it ignores thousands commas and a full stop
    after the number."""
    return float(last_number(solution_str) == _gsm8k_truth(ground_truth))


def gsm8k_answer(text: str) -> str | None:
    """Return the last number that follows `#### `, without thousands commas, or None.

    It is as strict as verl's: after `#### $18` there is no number, and `#### 18.` gives "18.",
    which is not "18".
    """
    return _last_match(_GSM8K_ANSWER, text)


def last_number(text: str) -> str | None:
    """Return the last number, without thousands commas, or None."""
    return _last_match(_NUMBER, text)


def _last_match(pattern: re.Pattern[str], text: str) -> str | None:
    matches = pattern.findall(text[-_TAIL_CHARS:])
    return matches[-1].replace(",", "") if matches else None


def _gsm8k_truth(ground_truth: Any) -> str:
    return truth_text(ground_truth).strip().replace(",", "")


def exact_match(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    """Return 1.0 if the response, stripped of white space, is an accepted answer, else 0.0."""
    return float(
        solution_str.strip()
        in [truth_text(truth).strip() for truth in accepted_answers(ground_truth)]
    )


def f1(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, float]:
    """Return the token F1 of the response and an accepted answer, the best of them, and as "acc"
    whether both are equal after normalisation.

    It is SQuAD's (Rajpurkar et al. 2016, arXiv 1606.05250): lower case, without punctuation and
    articles; precision and recall over the words, with their multiplicity."""
    words = _normalised_words(solution_str)
    truths = [_normalised_words(truth_text(truth)) for truth in accepted_answers(ground_truth)]
    return {
        "score": max((_token_f1(words, truth) for truth in truths), default=0.0),
        "acc": float(words in truths),
    }


def _normalised_words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _token_f1(words: list[str], truth: list[str]) -> float:
    if not words or not truth:
        return float(words == truth)
    common = sum((Counter(words) & Counter(truth)).values())
    return 2.0 * common / (len(words) + len(truth))


def multiple_choice(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    r"""Return 1.0 if the response's choice is the ground truth, else 0.0.

    The choice is the content of the last \boxed{}, else the letter or digit after the last
    "answer", "choice" or "option", else the whole response. A choice is a capital letter or an
    index from 0 (HellaSwag's label): 2 is C.
    A response without a choice, such as an ending in words, chooses that one of the texts
    extra_info["choices"] with which it has the highest token F1, if only one has it."""
    choice = extract_choice(solution_str)
    truth = _index(truth_text(ground_truth).strip())
    if choice is not None:
        return float(_index(choice) == truth)
    words = _normalised_words(solution_str)
    likeness = [
        _token_f1(words, _normalised_words(text))
        for text in (extra_info or {}).get("choices") or []
    ]
    best = max(likeness, default=0.0)
    return float(best > 0 and likeness.count(best) == 1 and likeness.index(best) == truth)


def extract_choice(text: str) -> str | None:
    """Return the letter or digit that the response chooses, or None."""
    tail = text[-_TAIL_CHARS:]
    boxed = last_boxed(tail)
    if boxed is not None:
        match = _BARE_CHOICE.fullmatch(boxed.replace("\\text{", "").replace("}", "").strip())
        return match[1] if match else None
    if marked := _CHOICE_AFTER_MARK.findall(tail):
        return str(marked[-1])
    match = _BARE_CHOICE.fullmatch(text.strip()) if len(text) <= _TAIL_CHARS else None
    return match[1] if match else None


def _index(choice: str) -> int:
    """Return the place of a choice, from 0; -1: it is none."""
    if len(choice) != 1:
        return -1
    return int(choice) if choice.isdecimal() else ord(choice) - ord("A")


def boxed_format(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    r"""Return 1.0 if the response has a closed \boxed{...}, else 0.0."""
    return float(last_boxed(solution_str) is not None)


def gsm8k_format(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    """Return 1.0 if a number follows `#### ` in the response, else 0.0."""
    return float(_GSM8K_MARK.search(solution_str) is not None)


def think_format(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    """Return 1.0 if the response is `<think>...</think>` and an answer after it, with no other such
    tag, else 0.0. The opening tag may be missing: chat templates of reasoning models add it to the
    prompt."""
    tags = [match[1] for match in _THINK.finditer(solution_str)]
    starts = solution_str.lstrip().startswith("<think>")
    if tags != (["", "/"] if starts else ["/"]):
        return 0.0
    return float(bool(solution_str.rpartition("</think>")[2].strip()))
