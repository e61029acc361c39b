"""The program of a worker process in which the environments of many conversations run at a time. It imports neither
torch nor numpy.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.user_function import describe_error
from rlhf_mc.environments.protocol import (
    SECTION,
    Environment,
    StepResult,
    ToolCall,
    called,
    checked_answer,
    load_environment,
)
from rlhf_mc.rewards.results import Failure
from rlhf_mc.rewards.scoring import awaited
from rlhf_mc.runtime.worker_process import guarded_connection

_MOST_THREADS = 256
"""Calls of environments without async methods at a time."""


Key = tuple[int, int]
"""Names a conversation: the call of the engines, and the request's number in it."""


class Turn(NamedTuple):
    """A turn of a conversation, which the rank sends."""

    key: Key
    row: dict[str, Any] | None
    """Of the dataset, in the first turn, or before it for a first observation."""
    response: str | None
    """The text of the turn; None: the conversation has ended."""
    token_ids: list[int]
    tool_calls: Sequence[ToolCall] = ()
    """In the text."""


class EnvironmentsOfWorker:
    """The environments of this process."""

    def __init__(self, cfg: EnvironmentConfig) -> None:
        self._cfg = cfg
        self.tool_schemas: list[dict[str, Any]] = []
        """Of the tools that the model may call."""
        self._class: type
        self._kwargs = cfg.kwargs
        if cfg.has_tools:
            from rlhf_mc.environments.tools import ToolEnvironment, load_tools  # pydantic and transformers

            tools, self.tool_schemas = load_tools(cfg)
            self._class = ToolEnvironment
            self._kwargs = {"tools": tools, "cfg": cfg}
        else:
            self._class = load_environment(cfg)
        self._further = {"token_ids", "tool_calls"}.intersection(inspect.signature(self._class.step).parameters)  # type: ignore[attr-defined]
        """Arguments of `step` beside the text."""
        self._limit = None if cfg.has_tools else cfg.timeout_seconds  # each call of a tool has the limit
        self.threads = ThreadPoolExecutor(_MOST_THREADS)
        self._environments: dict[Key, Environment] = {}

    async def answer(self, turn: Turn) -> StepResult | Failure:
        """Return the environment's answer to a turn, or why there is none."""
        setting = "rollout.environment.timeout_seconds"
        try:
            result = await awaited(self._step(turn), self._limit, f"no answer after {{}} s ({setting})")
            return checked_answer(result, self._cfg)
        except Failure as failure:
            return failure
        except Exception as error:  # the user's own number class
            return Failure("raised", f"raised {describe_error(error)}")

    async def end(self, key: Key) -> None:
        """Close the environment of a conversation. An error is of no importance any more."""
        environment = self._environments.pop(key, None)
        if environment is not None and hasattr(environment, "close"):
            try:
                await awaited(called(environment.close), self._cfg.timeout_seconds, "not closed after {} s")
            except Failure:
                return

    async def _step(self, turn: Turn) -> Any:
        if turn.row is not None:
            environment = self._environments[turn.key] = await called(self._class, **self._kwargs)
            try:
                first = await called(environment.reset, turn.row)
            except BaseException:
                await self.end(turn.key)
                raise
            if self._cfg.first_observation:
                return first, 0.0, False, {}
            if first is not None:
                raise Failure("invalid", f"reset returned {type(first).__name__} without {SECTION}.first_observation")
        if turn.key not in self._environments:
            raise Failure("invalid", "its reset has failed")
        further = {name: getattr(turn, name) for name in self._further}
        return await called(self._environments[turn.key].step, turn.response, **further)


async def _serve(connection: Connection, send: Callable[[object], None], conversations: EnvironmentsOfWorker) -> None:
    """Answer the turns that the rank sends, until it ends."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(conversations.threads)
    has_ended = loop.create_future()
    tasks: set[asyncio.Task[None]] = set()
    of_turns: dict[Key, asyncio.Task[None]] = {}

    async def answer(turn: Turn) -> None:
        send((turn.key, await conversations.answer(turn)))

    def read() -> None:
        try:
            while connection.poll():
                turn = connection.recv()
                if turn.response is not None:
                    task = of_turns[turn.key] = loop.create_task(answer(turn))
                else:
                    if turn.key in of_turns:
                        of_turns.pop(turn.key).cancel()
                    task = loop.create_task(conversations.end(turn.key))
                tasks.add(task)  # asyncio holds no reference to a task
                task.add_done_callback(tasks.discard)
        except (EOFError, OSError):
            if not has_ended.done():
                has_ended.set_result(None)

    loop.add_reader(connection.fileno(), read)
    await has_ended


def main(descriptor: int, parent: int) -> None:
    """Run the environments of the conversations that the rank sends, until it ends. This is the worker process's
    program."""
    connection, send = guarded_connection(descriptor, parent)
    try:
        (cfg,) = connection.recv()
        conversations = EnvironmentsOfWorker(cfg)
    except UserError as error:
        send(UserError(str(error)))
        return
    send(conversations.tool_schemas)
    asyncio.run(_serve(connection, send, conversations))
