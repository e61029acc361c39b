"""The interface of an environment, and the call and check of a user's. Neither torch nor numpy is
imported, so that a worker process (environment_worker.py) starts fast.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.environments import verl_tools
from rlhf_mc.rewards.results import Failure, FailureReason
from rlhf_mc.rewards.returned import checked
from rlhf_mc.runtime.user_function import describe_error, load_attribute
from rlhf_mc.runtime.worker_process import MOST_BYTES

SECTION = "rollout.environment"
_FURTHER = frozenset({"token_ids", "tool_calls"})
_CUT = "...(truncated)..."
_NO_OBSERVATION = "no text, tokens or messages"
_MOST_OTHER_BYTES = 1 << 18
_MOST_AGENT_BYTES = 1 << 22
Sliceable = TypeVar("Sliceable", str, list[Any])

Observation = str | Sequence[int | dict[str, Any]]
"""Text, tokens, or chat messages, which the chat template renders."""


class ToolCall(NamedTuple):
    """A call of a tool in a turn of the model."""

    name: str
    """Tool name; empty for a malformed call."""
    arguments: str
    """Arguments as JSON."""
    number: str
    """Call id in the chat template."""


class Completion(NamedTuple):
    """A turn of the model, as an agent gets it."""

    content: str
    """Text without the calls."""
    log_probs: Sequence[float]
    """Log-prob of each token."""
    num_before: int
    """Tokens of the conversation before the turn."""
    is_complete: bool
    """Ends with an end token."""
    is_last: bool
    """The conversation has no room for another turn."""


class Environment(Protocol):
    """The environment of one conversation. Methods may be async; one that is not runs in a
    thread."""

    def reset(self, row: dict[str, Any]) -> Observation | None:
        """Begin a conversation. row: `prompt` (chat messages), `data_source`, `ground_truth`,
        `extra_info` and `agent_name`. Return the first observation with
        rollout.environment.first_observation, else None."""

    def step(self, response: str) -> tuple[Observation | None, float, bool, Mapping[str, float]]:
        """Answer a turn of the model. Return the observation, the turn's reward, whether the
        conversation has ended, and numbers for the metrics. With an argument `token_ids` it also
        gets the turn's tokens."""

    def close(self) -> None:
        """End the conversation. This method is optional."""


@dataclass(frozen=True)
class StepResult:
    """The answer of an environment to a turn."""

    observation: Observation
    reward: float
    done: bool
    info: Mapping[str, float]
    failures: tuple[FailureReason, ...] = ()
    """Failures of tool calls, which the observation reports to the model."""
    tools: tuple[dict[str, Any], ...] = ()
    """Schemas of an agent's tools."""
    max_tokens: int | None = None
    """Maximum length of the next turn, by an agent's request; None: that of the settings."""
    continues: int | None = None
    """Number of the turn that an agent's messages follow in a new context, from 1; 0: they are the
    whole context; None: they follow the last turn."""


StepOutcome = StepResult | Failure
"""Answer of an environment to a turn, or why there is none."""


def where(cfg: EnvironmentConfig) -> str:
    """Return the name of the user's class or tools, for messages."""
    if cfg.has_tools:
        return (
            f"{SECTION}, tools of "
            f"{' and '.join(filter(None, (cfg.function_tool_path, cfg.tool_config_path)))}"
        )
    if cfg.is_agent:
        return f"{SECTION}, agent {cfg.path or shlex.join(cfg.command or ())}"
    return f"{SECTION} {cfg.name} of {cfg.path}"


def most_answer_bytes(cfg: EnvironmentConfig) -> int:
    """Return the largest size of an answer: observations of the largest length in UTF-8, and 256
    KiB for numbers, further messages and their other texts; of an agent, which may send all its
    messages again, 4 MiB."""
    if cfg.is_agent:
        return _MOST_AGENT_BYTES
    num_observations = cfg.max_parallel_calls if cfg.has_tools else 1
    return min(4 * num_observations * cfg.max_observation_length + _MOST_OTHER_BYTES, MOST_BYTES)


def load_environment(cfg: EnvironmentConfig) -> tuple[type, Collection[str]]:
    """Return the user's class, and the further arguments of its `step`. Raise UserError if the file
    is missing, if importing it or building an object raises, or if an object lacks a method."""
    verl_tools.install()
    environment: type = load_attribute(SECTION, str(cfg.path), cfg.name, f" ({SECTION}.name)")
    try:
        instance = environment(**cfg.kwargs)
    except BaseException as error:  # the user's code may raise anything, SystemExit included
        raise UserError(
            f"{where(cfg)}: building an object raised {describe_error(error)}"
        ) from error
    for method in ("reset", "step"):
        if not callable(getattr(instance, method, None)):
            raise UserError(f"{where(cfg)}: has no method {method} (docs/environments.md)")
    return environment, further_arguments(instance)


def further_arguments(environment: Any) -> Collection[str]:
    """Return the arguments of `step` beside the text."""
    try:
        return _FURTHER.intersection(inspect.signature(environment.step).parameters)
    except (TypeError, ValueError):  # it has no signature
        return ()


async def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a user's function or method returns. One that is not async runs in a thread.
    Raise Failure if it raises there: asyncio's futures take no StopIteration."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)

    def call() -> tuple[Any, BaseException | None]:
        try:
            return function(*args, **kwargs), None
        except BaseException as error:  # the user's code may raise anything, SystemExit included
            return None, error

    result, error = await asyncio.get_running_loop().run_in_executor(None, call)
    if isinstance(error, Failure):  # MaskSample
        raise error
    if error is not None:
        raise Failure("raised", f"raised {describe_error(error)}") from error
    # of a decorated coroutine function
    return await result if inspect.isawaitable(result) else result


def checked_answer(result: Any, cfg: EnvironmentConfig) -> StepResult:
    """Return what `step` has returned. Raise Failure if it is something else than it should be."""
    if (cfg.has_tools or cfg.is_agent) and isinstance(result, StepResult):
        return result
    if not isinstance(result, tuple) or len(result) != 4:
        raise Failure(
            "invalid",
            f"step returned {type(result).__name__}, not (observation, reward, done, info)",
        )
    observation, reward, done, info = result
    if not isinstance(info, Mapping):
        raise Failure(
            "invalid", f"step returned an info of {type(info).__name__}, not a mapping of numbers"
        )
    if isinstance(done, str):
        raise Failure("invalid", f"step returned {done[:20]!r} as done, not a bool")
    numbers = checked({**info, "score": reward})
    return StepResult(_observation(observation, cfg), numbers.pop("score"), bool(done), numbers)


def _observation(value: Any, cfg: EnvironmentConfig) -> Observation:
    """Return a user's observation, truncated to its largest length."""
    if isinstance(value, str):
        return truncated(value, cfg)
    if value is None or (isinstance(value, Sequence) and not value):
        return ""
    if isinstance(value, list | tuple):
        tokens = truncated([*value], cfg)
        if all(type(token) is int and token >= 0 for token in tokens):
            return tokens
        return _messages(value, cfg)
    raise Failure(
        "invalid", f"returned an observation of {type(value).__name__}: {_NO_OBSERVATION}"
    )


def _messages(value: Sequence[Any], cfg: EnvironmentConfig) -> list[dict[str, str]]:
    """Return a user's messages, with their texts alone."""
    most = most_answer_bytes(cfg)
    size = 0
    messages = []
    for message in value:
        if not isinstance(message, Mapping):
            raise Failure(
                "invalid",
                f"returned an observation with {type(message).__name__} in it: {_NO_OBSERVATION}",
            )
        items = [
            (unicode(key), text)
            for key, text in message.items()
            if isinstance(key, str) and isinstance(text, str)
        ]
        texts = {
            key: truncated(text, cfg) if key == "content" else unicode(text) for key, text in items
        }
        if not {"role", "content"} <= texts.keys():
            raise Failure("invalid", "returned a message without a text as role and one as content")
        size += sum(map(len, itertools.chain(texts.keys(), texts.values())))
        if size > most:  # sending it counts the bytes
            raise Failure("invalid", f"returned messages of more than {most:,} bytes")
        messages.append(texts)
    return messages


def truncated(value: Sliceable, cfg: EnvironmentConfig) -> Sliceable:
    """Return the value without what exceeds max_observation_length. A text has a mark there, and
    marks in place of what is not Unicode."""
    if isinstance(value, str):
        value = str.__str__(value)  # of a class of the user's own, without its methods
    excess = len(value) - cfg.max_observation_length
    start = {
        "left": 0,
        "right": cfg.max_observation_length,
        "middle": cfg.max_observation_length // 2,
    }[cfg.truncate]
    if excess > 0:
        mark: Any = _CUT if isinstance(value, str) else []
        value = value[:start] + mark + value[start + excess :]
    return unicode(value) if isinstance(value, str) else value


def unicode(text: str) -> str:
    """Return a text, of a class of the user's own too, as a plain one, with marks in place of what
    is not Unicode."""
    return str.encode(text, "utf-8", "replace").decode("utf-8")
