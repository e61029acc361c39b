"""The interface of an environment, and the call and check of a user's. Neither torch nor numpy is imported, so that a
worker process (environment_worker.py) starts fast.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.user_function import describe_error, load_attribute
from rlhf_mc.environments import verl_tools
from rlhf_mc.rewards.results import Failure
from rlhf_mc.rewards.returned import checked

SECTION = "rollout.environment"
_CUT = "...(truncated)..."
Sliceable = TypeVar("Sliceable", str, list[int])

Observation = str | list[int] | list[dict[str, str]]
"""Text, tokens, or chat messages, which the chat template renders."""


class ToolCall(NamedTuple):
    """A call of a tool in a turn of the model."""

    name: str
    """Empty: the turn has a call that cannot be read."""
    arguments: str
    """JSON."""
    number: str
    """Names the call in the chat template."""


class Environment(Protocol):
    """The environment of one conversation. Methods may be async; one that is not runs in a thread."""

    def reset(self, row: dict[str, Any]) -> Observation | None:
        """Begin. row: `prompt` (chat messages), `data_source`, `ground_truth`, `extra_info` and `agent_name`. Return
        the first observation with rollout.environment.first_observation, else None."""

    def step(self, response: str) -> tuple[Observation | None, float, bool, Mapping[str, float]]:
        """Answer a turn of the model. Return the observation, the turn's reward, whether the conversation has ended,
        and numbers for the metrics. With an argument `token_ids` it also gets the turn's tokens."""

    def close(self) -> None:
        """End. It may be left out."""


@dataclass(frozen=True)
class StepResult:
    """The answer of an environment to a turn."""

    observation: Observation
    reward: float
    done: bool
    info: Mapping[str, float]
    failures: Sequence[Failure] = ()
    """Of tools: the observation says so."""


def where(cfg: EnvironmentConfig) -> str:
    """Return the name of the user's class or tools, for messages."""
    if cfg.has_tools:
        return f"{SECTION}, tools of {' and '.join(filter(None, (cfg.function_tool_path, cfg.tool_config_path)))}"
    return f"{SECTION} {cfg.name} of {cfg.path}"


def load_environment(cfg: EnvironmentConfig) -> type:
    """Return the user's class. Raise UserError if the file is missing, if importing it or building an object raises, or
    if the class lacks a method."""
    verl_tools.install()
    environment = load_attribute(SECTION, str(cfg.path), cfg.name, f" ({SECTION}.name)")
    try:
        one = environment(**cfg.kwargs)
    except BaseException as error:  # the user's code may raise anything, SystemExit included
        raise UserError(f"{where(cfg)}: building an object raised {describe_error(error)}") from error
    for method in ("reset", "step"):
        if not callable(getattr(one, method, None)):
            raise UserError(f"{where(cfg)}: has no method {method} (docs/environments.md)")
    loaded: type = environment
    return loaded


async def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a user's function or method returns. One that is not async runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await asyncio.get_running_loop().run_in_executor(None, lambda: function(*args, **kwargs))
    return await result if inspect.isawaitable(result) else result  # of a decorated coroutine function


def checked_answer(result: Any, cfg: EnvironmentConfig) -> StepResult:
    """Return what `step` has returned. Raise Failure if it is something else than it should be."""
    if isinstance(result, StepResult):  # of tools
        return result
    if not isinstance(result, tuple) or len(result) != 4:
        raise Failure("invalid", f"step returned {type(result).__name__}, not (observation, reward, done, info)")
    observation, reward, done, info = result
    if not isinstance(info, Mapping):
        raise Failure("invalid", f"step returned an info of {type(info).__name__}, not a mapping of numbers")
    if isinstance(done, str):
        raise Failure("invalid", f"step returned {done[:20]!r} as done, not a bool")
    numbers = checked({**info, "score": reward})
    return StepResult(_observation(observation, cfg), numbers.pop("score"), bool(done), numbers)


def _observation(value: Any, cfg: EnvironmentConfig) -> Observation:
    """Return a user's observation, truncated to its largest length."""
    if value is None or (isinstance(value, Sequence) and not value):
        return ""
    if isinstance(value, str):
        return truncated(value, cfg)
    if isinstance(value, list | tuple) and all(type(token) is int and token >= 0 for token in value):
        return truncated(list(value), cfg)
    if isinstance(value, list | tuple) and all(isinstance(one, Mapping) for one in value):
        messages = [{key: text for key, text in one.items() if isinstance(text, str)} for one in value]
        if all({"role", "content"} <= one.keys() for one in messages):
            return [{**one, "content": truncated(one["content"], cfg)} for one in messages]
    raise Failure("invalid", f"returned an observation of {type(value).__name__}: no text, tokens or messages")


def truncated(value: Sliceable, cfg: EnvironmentConfig) -> Sliceable:
    """Return the value without what exceeds max_observation_length. A text has a mark there, and marks in place of what
    is not Unicode."""
    if isinstance(value, str):
        value = value.encode("utf-8", "replace").decode("utf-8")
    excess = len(value) - cfg.max_observation_length
    if excess <= 0:
        return value
    start = {"left": 0, "right": cfg.max_observation_length, "middle": cfg.max_observation_length // 2}[cfg.truncate]
    if isinstance(value, str):
        return value[:start] + _CUT + value[start + excess :]
    return value[:start] + value[start + excess :]
