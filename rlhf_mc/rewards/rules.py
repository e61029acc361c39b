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


RULES = {
    "gsm8k_strict": Rule(gsm8k.strict, ("openai/gsm8k",)),
    "gsm8k_flexible": Rule(gsm8k.flexible),
    "math": Rule(
        math_rule.compute_score,
        ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
    ),
    "exact_match": Rule(text_rules.exact_match, ("arithmetic",)),
    "multiple_choice": Rule(
        text_rules.multiple_choice, ("hellaswag", "Rowan/hellaswag"), truth_problem=text_rules.choice_problem
    ),
    "f1": Rule(text_rules.f1, ("squad", "rajpurkar/squad")),
    "boxed_format": Rule(text_rules.boxed_format, needs_truth=False),
    "gsm8k_format": Rule(text_rules.gsm8k_format, needs_truth=False),
    "think_format": Rule(text_rules.think_format, needs_truth=False),
}
"""Name of the rule, as in reward.mixture -> the rule."""

RULE_OF_SOURCE = {source: name for name, rule in RULES.items() for source in rule.data_sources}
