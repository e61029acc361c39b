"""Stand-ins for the modules of verl that a user's tools import, where verl is not installed: the same names and
interfaces, and no more of verl.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

FUNCTION_TOOL_REGISTRY: dict[str, Any] = {}
"""The functions that are decorated with function_tool, by the tool's name: `fn` and `tool_schema`."""


class _Schema(BaseModel):
    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Schema):
    """A parameter."""

    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Schema):
    """The parameters of a function."""

    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str] = []


class OpenAIFunctionSchema(BaseModel):
    """A function."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema(type="object", properties={})
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool."""

    type: str
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """The answer of a tool."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class BaseTool:
    """The base of a user's tools: one object for all conversations of a process, with an instance for each."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Create an instance. Return its name."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Run a call. Return the answer, the reward and numbers."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

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


def rollout_trace_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function: nothing is traced."""
    return function


_MODULES = {
    "tools.base_tool": ("BaseTool", "OpenAIFunctionToolSchema", "ToolResponse"),
    "tools.function_tool": ("FUNCTION_TOOL_REGISTRY", "function_tool"),
    "tools.schemas": (
        "OpenAIFunctionParametersSchema",
        "OpenAIFunctionPropertySchema",
        "OpenAIFunctionSchema",
        "OpenAIFunctionToolSchema",
        "ToolResponse",
    ),
    "utils.rollout_trace": ("rollout_trace_op",),
}


def install() -> None:
    """Make the stand-ins importable, unless verl is installed."""
    if importlib.util.find_spec("verl") is not None:
        return
    for name, attributes in {"": (), "tools": (), "utils": (), **_MODULES}.items():
        module = ModuleType(f"verl.{name}".rstrip("."))
        module.__path__ = []
        for attribute in attributes:
            setattr(module, attribute, globals()[attribute])
        sys.modules[module.__name__] = module
