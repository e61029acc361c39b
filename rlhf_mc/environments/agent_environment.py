"""An agent as an environment: a program that speaks to an OpenAI endpoint of its worker process. A
request is an observation, the answer to it is the next turn, and the end of the program is that of
the conversation. Neither torch nor numpy is imported.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import resource
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.environments import agent_messages
from rlhf_mc.environments.agent_program import load_agent
from rlhf_mc.environments.agent_requests import (
    ChatRequest,
    RefusedError,
    chat_request,
    completion_body,
    completion_events,
    digest,
    parsed_json,
    rendered,
)
from rlhf_mc.environments.protocol import Completion, StepResult, ToolCall, truncated
from rlhf_mc.rewards.results import Failure
from rlhf_mc.rewards.returned import checked
from rlhf_mc.runtime.user_function import describe_error

MODEL = "policy"
"""The name that the endpoint gives the model; requests may have any."""
_MOST_BODY_BYTES = 1 << 23
_MOST_FILES = 1 << 16
_MOST_READ = 8
_MOST_PARALLEL = 16
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class AgentEnvironment:
    """The environment of one conversation."""

    def __init__(self, server: AgentServer) -> None:
        self._server = server
        self.secret = secrets.token_hex(16)
        self.reading = asyncio.Semaphore(_MOST_READ)
        """Bounds the memory of bodies."""
        self.sampling: Mapping[str, Any] = {}
        """Sampling parameters of the call of the engines."""
        self._name = ""
        self._program: asyncio.Task[Any] | None = None
        self._asked: asyncio.Future[StepResult]
        """The next request."""
        self._request: ChatRequest | None = None
        """The last request."""
        self._digests: list[int] = []
        """Digests of the last request's messages."""
        self._turn: asyncio.Future[dict[str, Any] | None]
        """The body of the answer to the last request; None: the conversation has ended."""
        self._one_at_a_time = asyncio.Lock()
        self._num_parallel = 0
        """Requests that wait for a turn."""
        self._histories: list[list[int]] = []
        """Digests of the messages up to the answer of each turn."""
        self._tools: list[tuple[dict[str, Any], ...]] = []
        """Tools of each turn's request."""
        self._names: dict[str, str] = {}
        """Functions of the calls in the answers, by the calls' ids."""
        self._is_last = False
        """The last answer is the last turn that the conversation has room for."""
        self._reward = 0.0
        """Rewards since the last turn."""
        self.info = {"refused_requests": 0.0, "ignored_parameters": 0.0, "contexts": 1.0}

    async def reset(self, row: dict[str, Any]) -> StepResult:
        """Start the agent. Return its first request."""
        # lists in place of tuples, as requests have them
        self.sampling = msgspec.json.decode(msgspec.json.encode(row["sampling"]))
        self._asked = asyncio.get_running_loop().create_future()
        url = await self._server.url()
        self._name = str(next(self._server.names))
        self._server.agents[self._name] = self
        settings = {"base_url": url, "api_key": f"{self._name}-{self.secret}", "model": MODEL}
        self._program = asyncio.create_task(self._outcome(row, settings))
        return await self._next()

    async def step(
        self,
        response: str,
        token_ids: Sequence[int],
        tool_calls: Sequence[ToolCall],
        completion: Completion,
    ) -> StepResult:
        """Give the agent a turn. Return its next request."""
        request = self._request
        assert request is not None
        calls = [] if request.tool_choice == "none" else self._numbered(tool_calls)
        if request.parallel_tool_calls is False:
            calls = calls[:1]
        text = completion.content if calls else response
        number = len(self._histories)
        body = completion_body(request, number, text, calls, token_ids, completion)
        self._histories.append([*self._digests, digest(body["choices"][0]["message"])])
        self._names |= {call.number: call.name for call in calls}
        self._is_last = completion.is_last
        self._asked = asyncio.get_running_loop().create_future()
        self._turn.set_result(body)
        return await self._next()

    async def close(self) -> None:
        """End the agent, and all that it has started."""
        self._server.agents.pop(self._name, None)
        if self._request is not None and not self._turn.done():
            self._turn.set_result(None)
        if self._program is not None:
            self._program.cancel()
            await asyncio.wait({self._program})

    async def answer(
        self, request: ChatRequest, has_left: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Return the body of the answer to a request, after those of earlier ones. One with the
        messages of the last request is a client's second try, and gets the same. has_left: returns
        whether the client waits no more. Raise RefusedError for one that gets no turn."""
        new = [digest(message) for message in request.messages]
        if new == self._digests:
            return await self._answered()
        refuses = self._server.cfg.rewritten_history == "refuse"
        if self._num_parallel >= (1 if refuses else _MOST_PARALLEL):
            problem = f"{self._num_parallel} requests of this conversation wait for their answers"
            raise RefusedError(problem, 400 if refuses else 429)
        self._num_parallel += 1
        try:
            async with self._one_at_a_time:
                if has_left():
                    raise RefusedError("the client has left", 499)
                if new != self._digests:
                    self._accept(request, new)
                return await self._answered()
        finally:
            self._num_parallel -= 1

    async def _answered(self) -> dict[str, Any]:
        """Return the body of the answer to the last request."""
        # a client that goes away does not end the turn
        body = await asyncio.shield(self._turn)
        if body is None:
            raise RefusedError("the conversation has ended", 410)
        return body

    def score(self, value: Any) -> None:
        """Add a reward with numbers. Raise Failure if it is none."""
        numbers = checked(value)
        self._reward = checked(self._reward + numbers.pop("score"))["score"]
        self.info = checked({"score": 0.0, **self.info, **numbers})  # bounds their number
        self.info.pop("score")

    def _accept(self, request: ChatRequest, digests: list[int]) -> None:
        """Make a request the next observation: what it adds to the last turn's messages, or to
        those of an earlier turn, in a new context. Raise RefusedError if it gets no turn. digests:
        of its messages."""
        if self._asked.done():
            raise RefusedError("the conversation has ended", 410)
        if self._is_last:
            raise RefusedError(
                "the conversation has no room for a further turn (data.max_response_length, "
                "rollout.environment.max_turns)",
                code="context_length_exceeded",
            )
        tools = tuple(request.tools or ())
        turn = self._continued_turn(digests, tools)
        last = len(self._histories) - 1
        if turn != last and self._server.cfg.rewritten_history == "refuse":
            raise RefusedError(
                f"the request has not the conversation's {len(self._histories[last])} messages and "
                "a new one, or has other tools; what the model has seen stays"
            )
        num_known = len(self._histories[turn]) if turn >= 0 else 0
        messages = [rendered(message) for message in request.messages[num_known:]]
        for message in messages:
            if num_known or (self._histories and message["role"] == "tool"):
                message["content"] = truncated(message["content"], self._server.cfg)
            if message["role"] == "tool":
                message["name"] = self._names.get(message["tool_call_id"], "tool")
        self._request = request
        self._digests = digests
        self._tools.append(self._tools[turn] if turn >= 0 else tools)  # equal ones once
        self._turn = asyncio.get_running_loop().create_future()
        continues = None if turn == last else turn + 1
        self.info["contexts"] += continues is not None
        given = (messages, self._reward, False, self.info, (), tools, request.limit, continues)
        self._reward = 0.0
        self._asked.set_result(StepResult(*given))

    def _continued_turn(self, digests: Sequence[int], tools: Any) -> int:
        """Return the index of the turn after which a request has new messages, with the same tools:
        the one with the longest history, the last one of several; -1: none."""
        turn = -1
        for i, known in enumerate(self._histories):
            is_longest = turn < 0 or len(known) >= len(self._histories[turn])
            if is_longest and len(digests) > len(known) and [*digests[: len(known)]] == known:
                turn = i
        return turn if turn >= 0 and tools == self._tools[turn] else -1

    async def _next(self) -> StepResult:
        """Wait for a request, or for the end of the program. Raise Failure if that fails."""
        program = self._program
        assert program is not None
        await asyncio.wait({self._asked, program}, return_when=asyncio.FIRST_COMPLETED)
        if not program.done():
            return self._asked.result()
        self._server.agents.pop(self._name, None)
        value = program.result()
        if isinstance(value, Failure):
            raise value
        if not self._histories:
            raise Failure("invalid", "the agent has ended without a request")
        if value is not None:
            self.score(value)
        return StepResult("", self._reward, True, self.info)

    async def _outcome(self, row: dict[str, Any], settings: Mapping[str, str]) -> Any:
        """Return what the agent's program returns, or why it failed."""
        try:
            return await self._server.run(row, settings)
        except Failure as failure:
            return failure
        except BaseException as error:  # a task would raise it in the event loop
            return Failure("raised", f"raised {describe_error(error)}")

    def _numbered(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """Return calls with ids of their own in the conversation; none if one is malformed."""
        if not all(call.name for call in calls):
            return []
        turn = f"call{len(self._histories) % 100:02d}"
        return [
            call._replace(number=f"{turn}{i:03d}") if call.number.startswith("call0") else call
            for i, call in enumerate(calls)
        ]


class AgentServer:
    """The endpoint of the agents of this process: it listens on the loopback interface, with a key
    for each conversation."""

    def __init__(self, cfg: EnvironmentConfig) -> None:
        """Raise UserError if the agent cannot be loaded."""
        self.cfg = cfg
        self.run: Callable[[dict[str, Any], Mapping[str, str]], Awaitable[Any]] = load_agent(cfg)
        self.agents: dict[str, AgentEnvironment] = {}
        """Agents that may send requests, by their names."""
        self.names = itertools.count()
        self._started: asyncio.Task[str] | None = None

    async def url(self) -> str:
        """Return the base URL. The first call starts the server."""
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        return await asyncio.shield(self._started)

    async def _start(self) -> str:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _MOST_FILES), hard))
        app = web.Application(client_max_size=_MOST_BODY_BYTES)
        app.router.add_route("*", "/v1/{path:.*}", self._handle)
        # a malformed request is no line
        runner = web.AppRunner(app, access_log=None, logger=logging.Logger("silent", 100))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

    async def _handle(self, request: web.Request) -> web.Response:
        """Answer a request."""
        agent = self._agent(request)
        try:
            if agent is None:
                problem = "the key is of no conversation, or of one that has ended"
                raise RefusedError(problem, 401, "invalid_api_key")
            async with agent.reading:
                body = parsed_json(await request.read() or b"{}")
            match request.match_info["path"]:
                case "chat/completions" | "messages" as path:
                    is_messages = path == "messages"
                    ignores = self.cfg.other_sampling == "ignore"
                    body = agent_messages.chat_body(body) if is_messages else body
                    chat, num_ignored = chat_request(body, agent.sampling, ignores)
                    agent.info["ignored_parameters"] += num_ignored
                    answer = await agent.answer(chat, lambda: request.transport is None)
                    answer = agent_messages.message_body(answer) if is_messages else answer
                    if not chat.stream:
                        return _json(answer)
                    events = agent_messages.message_events if is_messages else completion_events
                    return _response(events(answer), "text/event-stream")
                case "score":
                    agent.score(body)
                    return _json({})
                case "models":
                    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rlhf_mc"}
                    return _json({"object": "list", "data": [model]})
            raise RefusedError("there is no such path", 404)
        except RefusedError as error:
            if agent is not None:
                agent.info["refused_requests"] += 1
            return _refusal(error)
        except Failure as failure:  # of a score
            return _refusal(RefusedError(failure.problem))

    def _agent(self, request: web.Request) -> AgentEnvironment | None:
        """Return the agent whose key a request has. The time does not depend on the secret."""
        header = request.headers.get("Authorization", "").removeprefix("Bearer ")
        key = request.headers.get("x-api-key", header)
        name, _, secret = key.partition("-")
        agent = self.agents.get(name)
        wanted = "" if agent is None else agent.secret
        is_same = hmac.compare_digest(wanted.encode(), secret.encode(errors="surrogateescape"))
        return agent if is_same else None


def _json(data: Mapping[str, Any], status: int = 200) -> web.Response:
    return _response(msgspec.json.encode(data), "application/json", status)


def _response(body: bytes, kind: str, status: int = 200) -> web.Response:
    """Return a response after which the connection is closed: one that stays has its request."""
    response = web.Response(body=body, status=status, content_type=kind)
    response.force_close()
    return response


def _refusal(error: RefusedError) -> web.Response:
    """Return a refusal in a form that is OpenAI's and Anthropic's."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    fields = {"message": str(error), "type": kind, "code": error.code}
    return _json({"type": "error", "error": fields}, error.status)
