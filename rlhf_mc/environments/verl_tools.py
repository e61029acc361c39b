"""Stand-ins for the modules of verl that a user's tools import, where verl is not installed: names and interfaces, and
no more of verl.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

FUNCTION_TOOL_REGISTRY: dict[str, Any] = {}
"""The functions that are decorated with function_tool, by the tool's name: `fn` and `tool_schema`."""
_MODULES = (
    "",
    ".tools",
    ".utils",
    ".tools.base_tool",
    ".tools.function_tool",
    ".tools.schemas",
    ".utils.rollout_trace",
)
_SCHEMAS = ("Tool", "", "Parameters", "Property")


class Fields(dict[str, Any]):
    """A schema or an answer: a mapping whose entries are attributes too. One that is missing is None."""

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
    """The base of a user's tools: one object for all conversations of a process, with an instance for each."""

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


def function_tool(name: Any = None, *, schema: Any = None) -> Callable[..., Any]:
    """Register a function as a tool: a decorator, with or without the tool's name."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        named = name if isinstance(name, str) else function.__name__
        FUNCTION_TOOL_REGISTRY[named] = SimpleNamespace(fn=function, tool_schema=schema)
        return function

    return register(name) if callable(name) else register


def install() -> None:
    """Make the stand-ins importable, unless verl is installed."""
    if importlib.util.find_spec("verl") is not None:
        return
    names = {f"OpenAIFunction{part}Schema": Fields for part in _SCHEMAS} | {"ToolResponse": Fields}
    for name in _MODULES:
        module = ModuleType(f"verl{name}")
        module.__path__ = []
        vars(module).update(names, rollout_trace_op=lambda function: function, BaseTool=BaseTool)
        vars(module).update(function_tool=function_tool, FUNCTION_TOOL_REGISTRY=FUNCTION_TOOL_REGISTRY)
        sys.modules[module.__name__] = module
