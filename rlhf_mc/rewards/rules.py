"""The registry of the built-in reward rules: by name, the function and the data sources that it scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhf_mc.rewards import gsm8k, text_rules
from rlhf_mc.rewards import math as math_rule

RewardFunction = Callable[..., Any]
"""compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float or {"score": float, ...}"""


@dataclass(frozen=True)
class Rule:
    """A reward rule."""

    function: RewardFunction
    data_sources: tuple[str, ...] = ()
    """Data sources that it scores where reward.mixture does not list them."""
    needs_truth: bool = True
    """It compares with the ground truth, so its score is the accuracy of the response. False: a rule on the format."""
    truth_problem: Callable[[Any], str | None] = lambda truth: None
    """Return why the rule cannot compare with a ground truth, or None."""
    answer: Callable[[str], str | None] | None = None
    """Return the answer in a response, or None. Not set: the rule compares no single answer."""


RULES = {
    "gsm8k_strict": Rule(gsm8k.strict, ("openai/gsm8k",), answer=gsm8k.extract_answer),
    "gsm8k_flexible": Rule(gsm8k.flexible, answer=gsm8k.extract_number),
    "math": Rule(
        math_rule.compute_score,
        ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
        answer=math_rule.last_boxed,
    ),
    "exact_match": Rule(text_rules.exact_match, ("arithmetic",), answer=str.strip),
    "multiple_choice": Rule(
        text_rules.multiple_choice,
        ("hellaswag", "Rowan/hellaswag"),
        truth_problem=text_rules.choice_problem,
        answer=text_rules.extract_choice,
    ),
    "f1": Rule(text_rules.f1, ("squad", "rajpurkar/squad")),
    "boxed_format": Rule(text_rules.boxed_format, needs_truth=False),
    "gsm8k_format": Rule(text_rules.gsm8k_format, needs_truth=False),
    "think_format": Rule(text_rules.think_format, needs_truth=False),
}
"""Name of the rule, as in reward.mixture -> the rule."""

RULE_OF_SOURCE = {source: name for name, rule in RULES.items() for source in rule.data_sources}
