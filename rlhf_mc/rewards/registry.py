"""The registry of the built-in reward rules: by name, the function and the data sources that it
scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from rlhf_mc.rewards import math as math_rule
from rlhf_mc.rewards import text_rules, verl_rules
from rlhf_mc.rewards.ground_truths import accepted_answers, is_plain, is_solution, truth_text

RewardFunction = Callable[..., Any]
"""compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float or {"score":
float, ...}"""


_NUMBER = "a number such as 54, -1,234 or 3.5"
_TEXTS = 'a text, a number, a list of these, or {"target": list}'
_ANSWER = "an answer, as a text or number, and no whole solution"
_BOX = "\\boxed{*}"


@dataclass(frozen=True)
class RewardRule:
    """A reward rule."""

    function: RewardFunction
    data_sources: tuple[str, ...] = ()
    """Data sources, or patterns of them, that it scores where reward.mixture does not list them."""
    needs_truth: bool = True
    """It compares with the ground truth, so its score is the accuracy of the response. False: a
    rule on the format."""
    reads: str = ""
    """Ground truths that it can read, in words."""
    forms: tuple[str, ...] = ()
    """Responses in which it finds the answer *. It can read a ground truth that is right in one of
    them."""
    answer: Callable[[str], str | None] | None = None
    """Return the answer in a response, or None. Not set: the rule compares no single answer."""
    tags: tuple[str, ...] = ()
    """Tags that it reads: responses are decoded with those of them that are special tokens."""

    def can_read(self, ground_truth: Any) -> bool:
        """Return whether the rule can compare with a ground truth: some answer is right."""
        if self.reads == _TEXTS:
            truths = accepted_answers(ground_truth)
            return all(map(is_plain, truths)) and any(truth_text(truth).strip() for truth in truths)
        if not is_plain(ground_truth):
            return False
        text = truth_text(ground_truth).strip()
        if self.reads == _ANSWER and is_solution(text):
            text = math_rule.last_boxed(text) or ""
        return any(self._is_right(form.replace("*", text), ground_truth) for form in self.forms)

    def _is_right(self, response: str, ground_truth: Any) -> bool:
        result = self.function("", response, ground_truth)
        return bool((result["score"] if isinstance(result, dict) else result) == 1.0)


RULES = {
    "gsm8k_strict": RewardRule(
        text_rules.gsm8k_strict,
        ("openai/gsm8k",),
        reads=_NUMBER,
        forms=("#### *",),
        answer=text_rules.gsm8k_answer,
    ),
    "gsm8k_flexible": RewardRule(
        text_rules.gsm8k_flexible, reads=_NUMBER, forms=("*",), answer=text_rules.last_number
    ),
    "math": RewardRule(
        math_rule.compute_score,
        ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
        reads=_ANSWER,
        forms=(_BOX,),
        answer=math_rule.last_boxed,
    ),
    "math_string": RewardRule(
        verl_rules.math_string, reads=_ANSWER, forms=(_BOX,), answer=verl_rules.last_box
    ),
    "math_dapo": RewardRule(
        verl_rules.math_dapo,
        ("math_dapo", "math", "math_dapo_reasoning", "aime*"),
        reads=_ANSWER,
        forms=("Answer: *", _BOX),
        answer=verl_rules.dapo_answer,
    ),
    "numina": RewardRule(
        verl_rules.numina,
        ("numina_*",),
        reads=_ANSWER,
        forms=(_BOX,),
        answer=verl_rules.numina_answer,
    ),
    "exact_match": RewardRule(
        text_rules.exact_match, ("arithmetic",), reads=_TEXTS, answer=str.strip
    ),
    "multiple_choice": RewardRule(
        text_rules.multiple_choice,
        ("hellaswag", "Rowan/hellaswag"),
        reads="a letter A-Z or an index from 0 to 9",
        forms=("*",),
        answer=text_rules.extract_choice,
    ),
    "f1": RewardRule(text_rules.f1, ("squad", "rajpurkar/squad"), reads=_TEXTS),
    "boxed_format": RewardRule(text_rules.boxed_format, needs_truth=False),
    "gsm8k_format": RewardRule(text_rules.gsm8k_format, needs_truth=False),
    "think_format": RewardRule(
        text_rules.think_format, needs_truth=False, tags=("<think>", "</think>")
    ),
}
"""Name of the rule, as in reward.mixture -> the rule."""

RULE_OF_SOURCE = {source: name for name, rule in RULES.items() for source in rule.data_sources}
"""Data source, or a pattern of some -> the rule that scores it by default."""
WITHOUT_RULE = {
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "prime_code"),
    "hiyouga/geometry3k": "geo3k",
    "searchR1_*": "search_r1_like_qa_em",
}
"""Data sources, or patterns of them, that verl scores and no rule here -> verl's module in
verl/utils/reward_score."""


def match_source(table: Mapping[str, str], data_source: str) -> str | None:
    """Return the entry of RULE_OF_SOURCE or WITHOUT_RULE for a data source, or None."""
    return next(
        (entry for pattern, entry in table.items() if fnmatchcase(data_source, pattern)), None
    )
