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
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.environments.agent_program import load_agent
from rlhf_mc.environments.agent_requests import (
    ChatAnswer,
    ChatRequest,
    RefusedError,
    answer_digest,
    chat_request,
    completion,
    completion_events,
    digests,
    parsed_json,
    rendered_messages,
)
from rlhf_mc.environments.protocol import Completion, StepResult, ToolCall, truncated
from rlhf_mc.rewards.results import Failure
from rlhf_mc.rewards.returned import checked
from rlhf_mc.runtime.user_function import describe_error

MODEL = "policy"
"""The name that the endpoint gives the model; requests may have any."""
_HOST = "127.0.0.1"
_MOST_BODY_BYTES = 1 << 23
_MOST_FILES = 1 << 16
_SILENT = logging.getLogger("rlhf_mc.agents")
_SILENT.disabled = True  # else each malformed request would be a line


@dataclass
class _Ask:
    """A request that waits for the model's turn, or got it."""

    request: ChatRequest
    digests: list[int]
    transport: asyncio.BaseTransport | None
    """The connection of the client."""
    turn: asyncio.Future[ChatAnswer | None]
    """None: the conversation has ended."""
    is_delivered: bool = False

    @property
    def is_lost(self) -> bool:
        """The client that has sent the request no longer waits."""
        return not self.is_delivered and (self.transport is None or self.transport.is_closing())


class AgentEnvironment:
    """The environment of one conversation."""

    def __init__(self, server: AgentServer) -> None:
        self._server = server
        self._cfg = server.cfg
        self.secret = secrets.token_hex(16)
        self.sampling: Mapping[str, float] = {}
        """Sampling parameters of the call of the engines."""
        self._name = ""
        self._program: asyncio.Task[Any] | None = None
        self._asked: asyncio.Future[StepResult]
        """The next request."""
        self._ask: _Ask | None = None
        self._history: list[int] = []
        """Digests of the conversation's messages, up to the last answer."""
        self._names: dict[str, str] = {}
        """Functions of the calls in the last answer, by the calls' ids."""
        self._num_turns = 0
        self._is_last = False
        """The last answer is the last turn that the conversation has room for."""
        self._reward = 0.0
        """Rewards since the last turn."""
        self._info = {"refused_requests": 0.0, "ignored_parameters": 0.0}

    async def reset(self, row: dict[str, Any]) -> StepResult:
        """Start the agent. Return its first request."""
        self.sampling = row["sampling"]
        self._asked = asyncio.get_running_loop().create_future()
        url = await self._server.url()
        self._name = self._server.add(self)
        settings = {"base_url": url, "api_key": f"{self._name}-{self.secret}", "model": MODEL}
        self._program = asyncio.create_task(self._outcome(row, settings))
        return await self._next()

    async def step(
        self, response: str, tool_calls: Sequence[ToolCall], completion: Completion
    ) -> StepResult:
        """Give the agent a turn. Return its next request."""
        ask = self._ask
        assert ask is not None
        calls = [] if ask.request.tool_choice == "none" else self._numbered(tool_calls)
        if ask.request.parallel_tool_calls is False:
            calls = calls[:1]
        answer = ChatAnswer(
            self._num_turns,
            completion.content if calls else response,
            calls,
            completion.log_probs,
            completion.token_ids,
            completion.num_before,
            completion.is_complete,
        )
        self._num_turns += 1
        self._history = [*ask.digests, answer_digest(answer)]
        self._names = {call.number: call.name for call in calls}
        self._is_last = completion.is_last
        self._asked = asyncio.get_running_loop().create_future()
        ask.turn.set_result(answer)
        return await self._next()

    async def close(self) -> None:
        """End the agent, and all that it has started."""
        self._server.remove(self._name)
        if self._ask is not None and not self._ask.turn.done():
            self._ask.turn.set_result(None)
        if self._program is not None:
            self._program.cancel()
            await asyncio.wait({self._program})

    async def asks(self, ask: _Ask) -> tuple[_Ask, ChatAnswer]:
        """Take a request. Return it, or an earlier one of which it is another try, and the model's
        turn. Raise RefusedError for one that does not continue the conversation."""
        earlier = self._ask
        if earlier is not None and earlier.digests == ask.digests and earlier.is_lost:
            earlier.transport = ask.transport  # the client tries again
            ask = earlier
        else:
            self._accept(ask)
        # a client that goes away does not end the turn
        answer = await asyncio.shield(ask.turn)
        if answer is None:
            raise RefusedError("the conversation has ended", 410)
        return ask, answer

    def refused(self) -> None:
        """Count a request that was refused."""
        self._info["refused_requests"] += 1

    def ignored(self, number: int) -> None:
        """Count parameters that are ignored."""
        self._info["ignored_parameters"] += number

    def score(self, value: Any) -> None:
        """Add a reward with numbers. Raise Failure if it is none."""
        numbers = checked(value)
        self._reward += numbers.pop("score")
        self._info |= numbers

    def _accept(self, ask: _Ask) -> None:
        """Make a request the next observation. Raise RefusedError if it does not continue the
        conversation."""
        if self._ask is not None and not self._ask.turn.done():
            raise RefusedError("another request of this conversation waits for its answer")
        if self._is_last:
            raise RefusedError(
                "the conversation has no room for a further turn (data.max_response_length, "
                "rollout.environment.max_turns)",
                code="context_length_exceeded",
            )
        known = self._history
        pairs = zip(known, ask.digests, strict=False)
        same = next((i for i, (old, new) in enumerate(pairs) if old != new), len(ask.digests))
        if same < len(known):
            raise RefusedError(
                f"the request has not the conversation's {len(known)} messages unchanged: message "
                f"{same} is another one, or missing; what the model has seen cannot be rewritten"
            )
        if same == len(known) == len(ask.digests):
            raise RefusedError("the request has no message after the model's last answer")
        request = ask.request
        tools = request.tools or []
        if self._ask is not None and tools != (self._ask.request.tools or []):
            raise RefusedError("the request has other tools than the conversation's first one")
        messages = rendered_messages(request.messages[len(known) :], self._names)
        for message in messages if known else ():
            message["content"] = truncated(message["content"], self._cfg)
        self._ask = ask
        result = StepResult(
            messages, self._take(), False, self._info, tools=tools, max_tokens=request.limit
        )
        self._asked.set_result(result)

    async def _next(self) -> StepResult:
        """Wait for a request, or for the end of the program. Raise Failure if that fails."""
        program = self._program
        assert program is not None
        await asyncio.wait({self._asked, program}, return_when=asyncio.FIRST_COMPLETED)
        if not program.done():
            return self._asked.result()
        self._server.remove(self._name)
        value = program.result()
        if isinstance(value, Failure):
            raise value
        if self._num_turns == 0:
            raise Failure("invalid", "the agent has ended without a request")
        if value is not None:
            self.score(value)
        return StepResult("", self._take(), True, self._info)

    async def _outcome(self, row: dict[str, Any], settings: Mapping[str, str]) -> Any:
        """Return what the agent's program returns, or why it failed."""
        try:
            return await self._server.run(row, settings)
        except Failure as failure:
            return failure
        except BaseException as error:  # a task would raise it in the event loop
            return Failure("raised", f"raised {describe_error(error)}")

    def _take(self) -> float:
        reward, self._reward = self._reward, 0.0
        return reward

    def _numbered(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """Return calls with ids of their own in the conversation; none if one is malformed."""
        if not all(call.name for call in calls):
            return []
        turn = f"call{self._num_turns % 100:02d}"
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
        self._agents: dict[str, AgentEnvironment] = {}
        self._names = itertools.count()
        self._started: asyncio.Task[str] | None = None

    async def url(self) -> str:
        """Return the base URL. The first call starts the server."""
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        return await asyncio.shield(self._started)

    def add(self, agent: AgentEnvironment) -> str:
        """Let an agent send requests. Return its name."""
        name = str(next(self._names))
        self._agents[name] = agent
        return name

    def remove(self, name: str) -> None:
        """Refuse the further requests of an agent."""
        self._agents.pop(name, None)

    async def _start(self) -> str:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        app = web.Application(client_max_size=_MOST_BODY_BYTES)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._answered(self._complete)),
                web.post("/v1/score", self._answered(self._score)),
                web.get("/v1/models", self._answered(self._models)),
            ]
        )
        runner = web.AppRunner(app, access_log=None, logger=_SILENT)
        await runner.setup()
        await web.TCPSite(runner, _HOST, 0, backlog=1024).start()
        return f"http://{_HOST}:{runner.addresses[0][1]}/v1"

    def _answered(
        self, handler: Callable[[AgentEnvironment, web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            agent = self._agent(request)
            if agent is None:
                problem = "the key is of no conversation, or of one that has ended"
                return _refusal(RefusedError(problem, 401, "invalid_api_key"))
            try:
                return await handler(agent, request)
            except RefusedError as error:
                agent.refused()
                return _refusal(error)
            except Failure as failure:
                return _refusal(RefusedError(failure.problem))

        return handle

    def _agent(self, request: web.Request) -> AgentEnvironment | None:
        """Return the agent whose key a request has. The time does not depend on the secret."""
        header = request.headers.get("Authorization", "").removeprefix("Bearer ")
        key = request.headers.get("x-api-key", header)
        name, _, secret = key.partition("-")
        agent = self._agents.get(name)
        wanted = "" if agent is None else agent.secret
        is_same = hmac.compare_digest(wanted.encode(), secret.encode(errors="surrogateescape"))
        return agent if is_same else None

    async def _complete(self, agent: AgentEnvironment, request: web.Request) -> web.StreamResponse:
        body = parsed_json(await request.read())
        chat, num_ignored = chat_request(body, agent.sampling, self.cfg.other_sampling == "ignore")
        turn: asyncio.Future[ChatAnswer | None] = asyncio.get_running_loop().create_future()
        ask = _Ask(chat, digests(chat.messages), request.transport, turn)
        agent.ignored(num_ignored)
        ask, answer = await agent.asks(ask)
        response: web.StreamResponse
        if chat.stream:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for event in completion_events(chat, answer):
                await response.write(event)
        else:
            response = _json(completion(chat, answer))
            await response.prepare(request)
        await response.write_eof()
        ask.is_delivered = True
        return response

    async def _score(self, agent: AgentEnvironment, request: web.Request) -> web.StreamResponse:
        try:
            agent.score(msgspec.json.decode(await request.read()))
        except (msgspec.DecodeError, RecursionError) as error:
            raise RefusedError(f"the body is not valid JSON ({error})") from None
        return _json({})

    async def _models(self, agent: AgentEnvironment, request: web.Request) -> web.StreamResponse:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rlhf_mc"}
        return _json({"object": "list", "data": [model]})


def _json(data: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(data), status=status, content_type="application/json"
    )


def _refusal(error: RefusedError) -> web.Response:
    """Return a refusal in the forms of OpenAI and Anthropic."""
    kind = "authentication_error" if error.status == 401 else "invalid_request_error"
    fields = {"message": str(error), "type": kind, "param": None, "code": error.code}
    return _json({"type": "error", "error": fields}, error.status)
