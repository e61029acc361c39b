"""The registry of the built-in reward rules: by name, the function and the data sources that it scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from rlhf_mc.rewards import math as math_rule
from rlhf_mc.rewards import text_rules, verl_rules

RewardFunction = Callable[..., Any]
"""compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float or {"score": float, ...}"""


@dataclass(frozen=True)
class RewardRule:
    """A reward rule."""

    function: RewardFunction
    data_sources: tuple[str, ...] = ()
    """Data sources, or patterns of them, that it scores where reward.mixture does not list them."""
    needs_truth: bool = True
    """It compares with the ground truth, so its score is the accuracy of the response. False: a rule on the format."""
    truth_problem: Callable[[Any], str | None] = lambda truth: None
    """Return why the rule cannot compare with a ground truth, or None."""
    answer: Callable[[str], str | None] | None = None
    """Return the answer in a response, or None. Not set: the rule compares no single answer."""
    reads: tuple[str, ...] = ()
    """Its tags: responses are decoded with those of them that are special tokens."""


RULES = {
    "gsm8k_strict": RewardRule(text_rules.gsm8k_strict, ("openai/gsm8k",), answer=text_rules.gsm8k_answer),
    "gsm8k_flexible": RewardRule(text_rules.gsm8k_flexible, answer=text_rules.last_number),
    "math": RewardRule(
        math_rule.compute_score,
        ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
        answer=math_rule.last_boxed,
    ),
    "math_string": RewardRule(verl_rules.math_string, answer=verl_rules.last_box),
    "math_dapo": RewardRule(
        verl_rules.math_dapo, ("math_dapo", "math", "math_dapo_reasoning", "aime*"), answer=verl_rules.dapo_answer
    ),
    "numina": RewardRule(verl_rules.numina, ("numina_*",), answer=verl_rules.numina_answer),
    "exact_match": RewardRule(text_rules.exact_match, ("arithmetic",), answer=str.strip),
    "multiple_choice": RewardRule(
        text_rules.multiple_choice,
        ("hellaswag", "Rowan/hellaswag"),
        truth_problem=text_rules.choice_problem,
        answer=text_rules.extract_choice,
    ),
    "f1": RewardRule(text_rules.f1, ("squad", "rajpurkar/squad")),
    "boxed_format": RewardRule(text_rules.boxed_format, needs_truth=False),
    "gsm8k_format": RewardRule(text_rules.gsm8k_format, needs_truth=False),
    "think_format": RewardRule(text_rules.think_format, needs_truth=False, reads=("<think>", "</think>")),
}
"""Name of the rule, as in reward.mixture -> the rule."""

RULE_OF_SOURCE = {source: name for name, rule in RULES.items() for source in rule.data_sources}
"""Data source, or a pattern of some -> the rule that scores it by default."""
WITHOUT_RULE = {
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "prime_code"),
    "hiyouga/geometry3k": "geo3k",
    "searchR1_*": "search_r1_like_qa_em",
}
"""Data sources, or patterns of them, that verl scores and no rule here -> verl's module in verl/utils/reward_score."""


def match_source(table: Mapping[str, str], data_source: str) -> str | None:
    """Return the entry of RULE_OF_SOURCE or WITHOUT_RULE for a data source, or None."""
    return next((entry for pattern, entry in table.items() if fnmatchcase(data_source, pattern)), None)
