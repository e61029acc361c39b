"""Stand-ins for the modules of verl that a user's tools and environments import, where verl is not
installed: names and interfaces, with this project's rules in place of verl's scores, and no more of
verl.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

from rlhf_mc.rewards import text_rules, verl_rules
from rlhf_mc.rewards.registry import RULE_OF_SOURCE, RULES, match_source

FUNCTION_TOOL_REGISTRY: dict[str, Any] = {}
"""The functions that are decorated with function_tool, by the tool's name: `fn` and
`tool_schema`."""
_MODULES = (
    "",
    ".tools",
    ".utils",
    ".tools.base_tool",
    ".tools.function_tool",
    ".tools.schemas",
    ".utils.rollout_trace",
    ".utils.reward_score",
    ".interactions",
    ".interactions.base",
)
_SCHEMAS = ("Tool", "", "Parameters", "Property")


class Fields(dict[str, Any]):
    """A schema or an answer: a mapping whose entries are attributes too. One that is missing is
    None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.get(name)
        return Fields(value) if isinstance(value, dict) else value

    @classmethod
    def model_validate(cls, fields: dict[str, Any]) -> Fields:
        """Return the fields."""
        return cls(fields)

    def model_dump(self, **kwargs: Any) -> dict[str, Any]:
        """Return a plain mapping."""
        return dict(self)


class BaseTool:
    """The base of a user's tools: one object for all conversations of a process, with an instance
    for each."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = getattr(getattr(self.tool_schema, "function", None), "name", None)
        if self.name is None:
            raise ValueError("tool_schema has no function.name")

    def get_openai_tool_schema(self) -> Any:
        """Return the schema."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """Create an instance. Return its name, and an answer that is not used."""
        return instance_id or str(uuid4()), Fields()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Run a call. Return the answer, the reward and numbers."""
        return Fields(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of an instance."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End an instance."""


class BaseInteraction:
    """The base of a user's interactions: one object for all conversations, with an instance for
    each."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Create an instance. Return its name."""
        return instance_id or str(uuid4())

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """End an instance."""


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> Any:
    """Return the score of the rule of a data source, compared as strings for MATH, as verl does."""
    name = match_source(RULE_OF_SOURCE, data_source)
    if name not in ("gsm8k_strict", "math", "math_dapo", "numina"):
        raise NotImplementedError(f"no rule of verl's for the data source {data_source!r}")
    rule = RULES["math_string" if name == "math" else name]
    return rule.function(data_source, solution_str, ground_truth, extra_info)


def _gsm8k_solution(solution_str: str, method: str = "strict") -> str | None:
    answers = {"strict": text_rules.gsm8k_answer, "flexible": text_rules.last_number}
    return answers[method](solution_str)


def _gsm8k_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    answer = _gsm8k_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == str(ground_truth) else format_score


def _math_score(solution_str: str, ground_truth: Any) -> float:
    return verl_rules.math_string("", solution_str, ground_truth)


def _dapo_score(solution_str: str, ground_truth: Any, **kwargs: Any) -> dict[str, Any]:
    result = verl_rules.math_dapo("", solution_str, ground_truth)
    return {**result, "acc": bool(result["acc"]), "pred": verl_rules.dapo_answer(solution_str)}


_SCORES: dict[str, dict[str, Callable[..., Any]]] = {
    "gsm8k": {"compute_score": _gsm8k_score, "extract_solution": _gsm8k_solution},
    "math_reward": {"compute_score": _math_score},
    "math": {"compute_score": _math_score},
    "math_dapo": {
        "compute_score": _dapo_score,
        "normalize_final_answer": verl_rules.dapo_normalised,
    },
}
"""Modules of verl.utils.reward_score, with the functions that this project has."""


def function_tool(name: Any = None, *, schema: Any = None) -> Callable[..., Any]:
    """Register a function as a tool: a decorator, with or without the tool's name."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        named = name if isinstance(name, str) else function.__name__
        FUNCTION_TOOL_REGISTRY[named] = SimpleNamespace(fn=function, tool_schema=schema)
        return function

    return register(name) if callable(name) else register


def install() -> None:
    """Make the stand-ins importable, unless verl is installed."""
    if "verl" in sys.modules or importlib.util.find_spec("verl") is not None:
        return
    names = {f"OpenAIFunction{part}Schema": Fields for part in _SCHEMAS} | {"ToolResponse": Fields}
    for name in _MODULES:
        module = _module(name)
        vars(module).update(names, rollout_trace_op=lambda function: function, BaseTool=BaseTool)
        vars(module).update(
            function_tool=function_tool, FUNCTION_TOOL_REGISTRY=FUNCTION_TOOL_REGISTRY
        )
        vars(module).update(
            BaseInteraction=BaseInteraction, default_compute_score=default_compute_score
        )
    for name, functions in _SCORES.items():
        vars(_module(f".utils.reward_score.{name}")).update(functions)


def _module(name: str) -> ModuleType:
    """Make a module of verl importable, also as an attribute of its package."""
    module = ModuleType(f"verl{name}")
    module.__path__ = []
    sys.modules[module.__name__] = module
    package, _, last = module.__name__.rpartition(".")
    if package:
        setattr(sys.modules[package], last, module)
    return module
