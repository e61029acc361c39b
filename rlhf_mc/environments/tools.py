"""Tools as an environment: the calls of a turn are run, and their answers are the observation. A
user's function and an object of verl's BaseTool have one interface here. Neither torch nor numpy is
imported.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import yaml

from rlhf_mc import json_files
from rlhf_mc.config.environment_schema import SINGLE_TURN_AGENT, EnvironmentConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.masking import one_line
from rlhf_mc.environments import verl_tools
from rlhf_mc.environments.protocol import SECTION, StepResult, ToolCall, called, truncated, unicode
from rlhf_mc.rewards.results import Failure, FailureReason
from rlhf_mc.rewards.returned import checked
from rlhf_mc.rewards.scoring import awaited
from rlhf_mc.runtime.user_function import describe_error, load_file

Schema = dict[str, Any]
"""A tool as the chat template gets it: {"type": "function", "function": {"name": ..., ...}}."""


class _Function(msgspec.Struct):
    """The fields of a schema that all formats of tool calls read."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolSchema(msgspec.Struct):
    """A tool, by the fields that all formats of tool calls read."""

    function: _Function
    type: Literal["function"] = "function"


class _FunctionTool(verl_tools.BaseTool):
    """A user's function. It has no instances."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return await called(self.function, **parameters)


class _InvalidCallError(Exception):
    """A call that the model has got wrong."""


class ToolEnvironment:
    """The environment of a conversation with tools. It ends with a turn that calls none."""

    def __init__(self, tools: Mapping[str, Any], cfg: EnvironmentConfig) -> None:
        """tools: of all conversations of this process, by name."""
        self._tools = tools
        self._cfg = cfg
        self._num_turns = 0
        self._is_single = False
        self._kwargs: dict[str, dict[str, Any]] = {}
        self._instances: dict[str, Any] = {}
        """The instance of each tool that has been called."""
        self._lock = asyncio.Lock()
        self._agent_data = SimpleNamespace(extra_fields={})
        self._info = {"tool_calls": 0.0, "invalid_calls": 0.0}

    async def reset(self, row: dict[str, Any]) -> None:
        """Begin."""
        self._is_single = row["agent_name"] == SINGLE_TURN_AGENT
        # A null of a parquet file must not replace the default of a tool's argument.
        self._kwargs = json_files.without_nulls(row["extra_info"].get("tools_kwargs") or {})
        self._agent_data = SimpleNamespace(
            messages=row["prompt"], tools_kwargs=self._kwargs, extra_fields={}
        )

    async def step(self, response: str, tool_calls: Sequence[ToolCall]) -> StepResult:
        """Run the calls of a turn, at the same time."""
        self._num_turns += 1
        failures: list[FailureReason] = []
        if self._is_single or not tool_calls or self._num_turns >= self._cfg.max_turns:
            with_rewards = [
                name for name in self._instances if not isinstance(self._tools[name], _FunctionTool)
            ]
            await asyncio.gather(*(self._calc_reward(name, failures) for name in with_rewards))
            return StepResult("", 0.0, True, self._info, tuple(failures))
        calls = tool_calls[: self._cfg.max_parallel_calls]
        rewards: list[float] = []
        answers = await asyncio.gather(*(self._answer(call, rewards, failures) for call in calls))
        messages = [
            {
                "role": "tool",
                "name": unicode(call.name) or "unknown",
                "tool_call_id": call.number,
                "content": text,
            }
            for call, text in zip(calls, answers, strict=True)
        ]
        return StepResult(messages, sum(rewards), False, self._info, tuple(failures))

    async def close(self) -> None:
        """Release the instances."""
        for name, instance in self._instances.items():
            await self._tools[name].release(instance, **self._row_arguments(name, "release_kwargs"))

    async def _answer(
        self, call: ToolCall, rewards: list[float], failures: list[FailureReason]
    ) -> str:
        """Run a call. Return its answer, or what was wrong."""
        self._info["tool_calls"] += 1
        try:
            parameters = self._parameters(call)
            text, reward, numbers = await self._awaited(self._run(call.name, parameters))
            self._info |= numbers
            rewards.append(reward)
        except _InvalidCallError as error:
            self._info["invalid_calls"] += 1
            text = f"Error: {error}"
        except Exception as error:  # of the user's own classes among them
            failure = (
                error
                if isinstance(error, Failure)
                else Failure("invalid", f"returned {describe_error(error)}")
            )
            failures.append(
                FailureReason(failure.kind, f"the tool {call.name!r} {failure.problem}")
            )
            text = f"Error: {failure.problem}"
        return truncated(text, self._cfg)

    def _parameters(self, call: ToolCall) -> dict[str, Any]:
        """Return the parameters of a call. Raise _InvalidCallError if it names no tool, or does not
        fit it."""
        if not call.name:
            raise _InvalidCallError("the tool call cannot be read")
        tool = self._tools.get(call.name)
        if tool is None:
            raise _InvalidCallError(
                f"there is no tool {call.name!r}; the tools are {', '.join(self._tools)}"
            )
        try:
            parameters = json_files.parse(call.arguments)
        except ValueError as error:
            raise _InvalidCallError(f"the arguments are not valid JSON ({error})") from error
        if not isinstance(parameters, dict):
            raise _InvalidCallError("the arguments are not a JSON object")
        if isinstance(tool, _FunctionTool):
            try:
                inspect.signature(tool.function).bind(**parameters)
            except TypeError as error:
                raise _InvalidCallError(f"{call.name}: {error}") from error
        return parameters

    async def _run(
        self, name: str, parameters: dict[str, Any]
    ) -> tuple[str, float, dict[str, float]]:
        tool = self._tools[name]
        async with self._lock:
            if name not in self._instances:
                kwargs = self._row_arguments(name, "create_kwargs")
                # verl passes one or the other, by version
                created = await tool.create(create_kwargs=kwargs, **kwargs)
                self._instances[name] = created[0] if isinstance(created, tuple) else created
        kwargs = self._row_arguments(name, "execute_kwargs")
        answer = await tool.execute(
            self._instances[name], parameters, agent_data=self._agent_data, **kwargs
        )
        return _results(answer)

    async def _calc_reward(self, name: str, failures: list[FailureReason]) -> None:
        """Add the reward that a tool gives the conversation to the numbers."""
        kwargs = self._row_arguments(name, "calc_reward_kwargs")
        try:
            self._info[f"calc_reward/{name}"] = await self._awaited(self._reward(name, kwargs))
        except Failure as failure:
            failures.append(
                FailureReason(failure.kind, f"calc_reward of the tool {name!r} {failure.problem}")
            )

    async def _reward(self, name: str, kwargs: dict[str, Any]) -> float:
        reward = await self._tools[name].calc_reward(self._instances[name], **kwargs)
        return checked(reward or 0.0)["score"]

    async def _awaited(self, result: Any) -> Any:
        problem = f"gave no answer after {{}} s ({SECTION}.timeout_seconds)"
        return await awaited(result, self._cfg.timeout_seconds, problem)

    def _row_arguments(self, name: str, key: str) -> dict[str, Any]:
        return self._kwargs.get(name, {}).get(key, {})


def _results(result: Any) -> tuple[str, float, dict[str, float]]:
    """Return the text, the reward and the numbers that a tool returned. Raise Failure for others
    than there may be."""
    values = result if isinstance(result, tuple) else (result,)
    if not 1 <= len(values) <= 3:
        raise Failure("invalid", f"returned {len(values)} values, not (text, reward, metrics)")
    answer, reward, metrics = (*values, None, None)[:3]
    numbers = checked({**(metrics or {}), "score": reward or 0.0})
    if getattr(answer, "image", None) or getattr(answer, "video", None):
        raise Failure("invalid", "returned an image or a video; only texts are supported")
    answer = getattr(answer, "text", answer)
    if isinstance(answer, Mapping):
        answer = json.dumps(answer, ensure_ascii=False, default=str)
    elif not isinstance(answer, str):
        answer = "" if answer is None else str(answer)
    return answer, numbers.pop("score"), numbers


# ---------------------------------------------------------------- loading


def load_tools(cfg: EnvironmentConfig) -> tuple[dict[str, Any], list[Schema]]:
    """Return the tools of both files by name, and their schemas. Raise UserError if a file cannot
    be used."""
    verl_tools.install()
    tools: dict[str, Any] = {}
    schemas = []
    for path, load in (
        (cfg.function_tool_path, _load_functions),
        (cfg.tool_config_path, _load_classes),
    ):
        for tool, schema in load(path) if path is not None else ():
            name = schema["function"]["name"]
            if name in tools:
                raise UserError(f"{SECTION}: two tools are named {name!r}")
            tools[name] = tool
            schemas.append(schema)
    if not tools:
        raise UserError(
            f"{SECTION}: {cfg.function_tool_path or cfg.tool_config_path} defines no tool"
        )
    return tools, schemas


def _load_functions(path: str) -> list[tuple[Any, Schema]]:
    """Return the functions that are decorated with verl's function_tool, else all public ones that
    the file defines."""
    from transformers.utils import get_json_schema  # two seconds

    setting = f"{SECTION}.function_tool_path"
    module = load_file(setting, path)
    registry = getattr(sys.modules.get("verl.tools.function_tool"), "FUNCTION_TOOL_REGISTRY", {})
    functions = {name: (entry.fn, entry.tool_schema) for name, entry in registry.items()} or {
        name: (function, None)
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
    }
    tools = []
    for name, (function, schema) in functions.items():
        try:
            given = get_json_schema(function) if schema is None else schema
        except Exception as error:  # transformers has a type for each part that is missing
            raise UserError(
                f"{setting} {path}: {name} needs type hints, and a docstring with a line for each "
                "argument under Args:; if it is no tool its name must begin with _ "
                f"({one_line(str(error), 300)})"
            ) from error
        schema = _dumped(given, f"{setting} {path}: {name}")
        schema["function"]["name"] = name
        schema["function"].pop("return", None)
        tools.append((_FunctionTool(function), schema))
    return tools


def _load_classes(path: str) -> list[tuple[Any, Schema]]:
    """Return objects of the classes of verl's YAML file."""
    where = f"{SECTION}.tool_config_path {path}"
    schema_class = importlib.import_module("verl.tools.schemas").OpenAIFunctionToolSchema
    tools = []
    try:
        given = yaml.safe_load(Path(path).read_text())
        entries = given.get("tools") if isinstance(given, dict) else None
        if not isinstance(entries, list) or not all(
            isinstance(entry, dict) and "class_name" in entry for entry in entries
        ):
            raise UserError(
                f"{where}: expected 'tools', a list of mappings that each have 'class_name'"
            )
        for entry in entries:
            module, _, name = entry["class_name"].rpartition(".")
            config = entry.get("config") or {}
            if config.get("type", "native") != "native":
                raise UserError(
                    f"{where}: {name} is of type {config['type']!r}; only native tools are "
                    "supported (a tool of an MCP"
                    " server: examples/mcp_tool.py)"
                )
            fields = entry.get("tool_schema")
            schema = None if fields is None else schema_class.model_validate(fields)
            tool = getattr(importlib.import_module(module), name)(config=config, tool_schema=schema)
            tools.append((tool, _dumped(tool.tool_schema, f"{where}: {name}")))
    except UserError:
        raise
    except BaseException as error:  # the user's code may raise anything, SystemExit included
        raise UserError(f"{where}: {describe_error(error)}") from error
    return tools


def _dumped(schema: Any, where: str) -> Schema:
    """Return a schema, of verl's classes too, as JSON data. Raise UserError if it is no tool's."""
    try:
        if not isinstance(schema, dict):
            schema = schema.model_dump(exclude_unset=True, exclude_none=True)
        dumped: Schema = msgspec.json.decode(msgspec.json.encode(schema))
        msgspec.convert(dumped, ToolSchema)
    except Exception as error:  # of the user's classes too
        raise UserError(f"{where}: its schema is no tool's: {one_line(str(error), 300)}") from error
    return dumped
