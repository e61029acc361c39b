"""The program of a worker process in which the environments of many conversations run at a time. It
imports neither torch nor numpy.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.environments.protocol import (
    SECTION,
    Completion,
    Environment,
    StepOutcome,
    StepResult,
    ToolCall,
    called,
    checked_answer,
    further_arguments,
    load_environment,
    most_answer_bytes,
    where,
)
from rlhf_mc.rewards.results import Failure, FailureReason
from rlhf_mc.rewards.scoring import awaited
from rlhf_mc.runtime.user_function import describe_error
from rlhf_mc.runtime.worker_process import MessageError, guarded_connection

MOST_THREADS = 256
"""Maximum number of concurrent calls of methods that are not async."""

Key = tuple[int, int]
"""Conversation key: the call of the engines, and the request's number in the call."""


class Turn(NamedTuple):
    """A turn of a conversation, which the rank sends."""

    key: Key
    row: dict[str, Any] | None
    """Dataset row, sent with the first turn, or before it for a first observation."""
    response: str | None
    """Text of the turn; None: the conversation has ended."""
    token_ids: list[int]
    tool_calls: Sequence[ToolCall] = ()
    """Tool calls in the text."""
    completion: Completion | None = None
    """Turn as an agent gets it."""


class EnvironmentsOfWorker:
    """The environments of this process."""

    def __init__(self, cfg: EnvironmentConfig) -> None:
        self.cfg = cfg
        self.tool_schemas: list[dict[str, Any]] = []
        """Schemas of the tools that the model may call."""
        self._class: type
        self._kwargs = cfg.kwargs
        if cfg.has_tools:
            # pydantic and transformers
            from rlhf_mc.environments.tools import ToolEnvironment, load_tools

            tools, self.tool_schemas = load_tools(cfg)
            self._class = ToolEnvironment
            self._kwargs = {"tools": tools, "cfg": cfg}
            self._further = further_arguments(ToolEnvironment)
        elif cfg.is_agent:
            from rlhf_mc.environments.agent_environment import AgentEnvironment, AgentServer

            self._class = AgentEnvironment
            self._kwargs = {"server": AgentServer(cfg)}
            self._further = ("token_ids", "tool_calls", "completion")
        else:
            self._class, self._further = load_environment(cfg)
        # each call of a tool has the limit
        self._limit = None if cfg.has_tools else cfg.timeout_seconds
        self.threads = ThreadPoolExecutor(MOST_THREADS * (32 if cfg.is_agent else 1))
        self._environments: dict[Key, Environment] = {}

    async def answer(self, turn: Turn) -> StepOutcome:
        """Return the environment's answer to a turn, or why there is none."""
        setting = f"{SECTION}.timeout_seconds"
        try:
            answer: StepResult = await awaited(
                self._answer(turn), self._limit, f"no answer after {{}} s ({setting})"
            )
            return answer
        except Failure as failure:
            return failure

    async def end(self, key: Key) -> None:
        """Close the environment of a conversation, and ignore errors."""
        if key in self._environments:
            with contextlib.suppress(Failure):
                await awaited(
                    _close(self._environments.pop(key)),
                    self.cfg.timeout_seconds,
                    "not closed after {} s",
                )

    async def _answer(self, turn: Turn) -> StepResult:
        return checked_answer(await self._step(turn), self.cfg)

    async def _step(self, turn: Turn) -> Any:
        if turn.row is not None:
            environment = self._environments[turn.key] = await called(self._class, **self._kwargs)
            try:
                first = await called(environment.reset, turn.row)
            except BaseException:  # raised again, once the environment has ended
                await self.end(turn.key)
                raise
            if self.cfg.begins:
                return first if self.cfg.is_agent else (first, 0.0, False, {})
            if first is not None:
                raise Failure(
                    "invalid",
                    f"reset returned {type(first).__name__} without {SECTION}.first_observation",
                )
        if turn.key not in self._environments:
            raise Failure("invalid", "its reset has failed")
        further = {name: getattr(turn, name) for name in self._further}
        return await called(self._environments[turn.key].step, turn.response, **further)


async def _close(environment: Any) -> None:
    if hasattr(environment, "close"):
        await called(environment.close)


async def _serve(
    connection: Connection, send: Callable[..., None], conversations: EnvironmentsOfWorker
) -> None:
    """Answer the turns that the rank sends, until it ends."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(conversations.threads)
    has_ended = loop.create_future()
    tasks: set[asyncio.Task[None]] = set()
    of_turns: dict[Key, asyncio.Task[None]] = {}

    async def answer(turn: Turn) -> None:
        answer = await conversations.answer(turn)
        message = answer.reason if isinstance(answer, Failure) else answer
        try:
            send((turn.key, message), most_answer_bytes(conversations.cfg))
        except MessageError as error:
            send((turn.key, FailureReason("invalid", f"its answer {error}")))

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


def main(parent: int, descriptors: tuple[int, int]) -> None:
    """Run the environments of the conversations that the rank sends, until it ends. This is the
    worker process's program."""
    connection, send = guarded_connection(parent, descriptors)
    (cfg,) = connection.recv()
    runner = asyncio.Runner()
    runner.get_loop()  # the current one of the user's file too
    try:
        conversations = EnvironmentsOfWorker(cfg)
        send(conversations.tool_schemas)
    except UserError as error:
        send(error)
        return
    except BaseException as error:  # user code outside of a call: an attribute that raises
        send(UserError(f"{where(cfg)}: raised {describe_error(error)}"))
        return
    if runner.get_loop().is_closed():  # by the user's file
        runner = asyncio.Runner()
    runner.run(_serve(connection, send, conversations))
