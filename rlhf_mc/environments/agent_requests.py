"""The texts of the endpoint of agents: a request of OpenAI's chat completions as messages for the
chat template, and the model's turn as an answer. What the run cannot do is refused with its reason.
Neither torch nor numpy is imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from rlhf_mc.config.masking import one_line
from rlhf_mc.environments.protocol import SECTION, ToolCall
from rlhf_mc.environments.tools import ToolSchema

_DEEPEST = 32
"""Levels of a request's JSON, into which parsers and templates recurse."""
_MOST_TOKENS = 1 << 31
_READ = (
    *("messages", "model", "tools", "max_tokens", "max_completion_tokens", "stream"),
    *("stream_options", "logprobs", "parallel_tool_calls", "user", "metadata", "store"),
    *("service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
)
"""Parameters that are read, or change no answer."""
_ONLY: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "stop": ([], ""),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
}
"""Values of parameters whose other values ask for another kind of answer."""
_NEUTRAL: Mapping[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "min_p": 0,
}
"""Values of sampling parameters that change nothing."""


class RefusedError(Exception):
    """A request that gets no turn of the model."""

    def __init__(self, problem: str, status: int = 400, code: str | None = None) -> None:
        """status: of HTTP. code: OpenAI's name of the error."""
        super().__init__(problem)
        self.status = status
        self.code = code


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str = ""


class _Call(msgspec.Struct):
    id: str
    function: _CalledFunction


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ChatRequest(msgspec.Struct):
    """The parameters of a request that are read."""

    messages: list[_Message]
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of the answer; None: that of the run."""
        given = (
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )
        return None if given is None else min(given, _MOST_TOKENS)


@dataclass(frozen=True)
class ChatAnswer:
    """A turn of the model."""

    number: int
    """Index in the conversation."""
    text: str
    """The turn without its calls."""
    calls: Sequence[ToolCall]
    log_probs: Sequence[float]
    """Log-prob of each token."""
    token_ids: Sequence[int]
    num_before: int
    """Tokens of the conversation before the turn."""
    is_complete: bool
    """Ends with an end token."""

    @property
    def reason(self) -> str:
        """Why the turn ends, in OpenAI's words."""
        return "length" if not self.is_complete else "tool_calls" if self.calls else "stop"


def parsed_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request. Raise RefusedError for something else."""
    try:
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RefusedError(f"the body is not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise RefusedError("the body is not a JSON object")
    if _is_deep(values):
        raise RefusedError(f"the body's JSON has more than {_DEEPEST} levels")
    return values


def _is_deep(value: Any) -> bool:
    """Return whether a value of JSON has more than _DEEPEST levels."""
    level = [value]
    for _ in range(_DEEPEST):
        dicts = [inner.values() for inner in level if isinstance(inner, dict)]
        lists = [inner for inner in level if isinstance(inner, list)]
        level = [*itertools.chain(*dicts, *lists)]
    return bool(level)


def chat_request(
    body: Mapping[str, Any], sampling: Mapping[str, float], ignores_others: bool
) -> tuple[ChatRequest, int]:
    """Return a request, and the number of its parameters that are ignored. sampling: the sampling
    parameters of the run. ignores_others: the request's may differ, and are ignored. Raise
    RefusedError for what the run cannot do."""
    num_ignored = 0
    for name, value in body.items():
        if value is None or name in _READ:
            continue
        if name in _ONLY:
            if value not in _ONLY[name]:
                allowed = " or ".join(map(repr, _ONLY[name]))
                raise RefusedError(f"{name} is {_shown(value)}; only {allowed} is supported")
            continue
        wanted = sampling.get(name, _NEUTRAL.get(name))
        if value == wanted:
            continue
        if not ignores_others:
            own = f", and that of the run {sampling[name]:g}" if name in sampling else ""
            raise RefusedError(
                f"{name} is {_shown(value)}{own}: it would change the policy that is trained; "
                f"leave it out, or set {SECTION}.other_sampling: ignore"
            )
        num_ignored += 1
    try:
        request = msgspec.convert(body, ChatRequest)
        for schema in request.tools or ():
            msgspec.convert(schema, ToolSchema)
    except msgspec.ValidationError as error:
        raise RefusedError(one_line(str(error), 300)) from None
    if not request.messages or (request.limit is not None and request.limit < 1):
        raise RefusedError("messages must not be empty, and max_tokens must be at least 1")
    return request, num_ignored


def _shown(value: Any) -> str:
    return one_line(repr(value), 80)


def rendered_messages(
    messages: Sequence[_Message], names: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return messages as the chat template gets them. names: the function of each call that was
    answered, by its id. Raise RefusedError for an image or a sound."""
    rendered = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        fields: dict[str, Any] = {"role": role, "content": _text(message)}
        if message.tool_calls:
            fields["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {
                        "name": call.function.name,
                        "arguments": _parsed(call.function.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        if message.role == "tool":
            number = message.tool_call_id or ""
            fields |= {"tool_call_id": number, "name": message.name or names.get(number, "tool")}
        rendered.append(fields)
    return rendered


def digests(messages: Sequence[_Message]) -> list[int]:
    """Return a digest of what each message says. One of an answer is that of its `answer_digest`,
    with its arguments written in any way."""
    return [
        hash(
            (
                message.role,
                _text(message),
                tuple(
                    _call_digest(call.function.name, call.function.arguments, call.id)
                    for call in message.tool_calls or ()
                ),
                message.tool_call_id,
            )
        )
        for message in messages
    ]


def answer_digest(answer: ChatAnswer) -> int:
    """Return the digest of an answer, as a later request has it."""
    return hash(
        ("assistant", answer.text, tuple(_call_digest(*call) for call in answer.calls), None)
    )


def _call_digest(name: str, arguments: str, number: str) -> tuple[str, ...]:
    return name, msgspec.json.encode(_parsed(arguments), order="sorted").decode(), number


def _text(message: _Message) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    for part in message.content:
        if part.text is None:
            raise RefusedError(f"a message has a part of type {part.type!r}; it must be a text")
    return "".join(part.text or "" for part in message.content)


def _parsed(arguments: str) -> Any:
    """Return the arguments of a call: those of an object as a mapping, else the text."""
    try:
        values = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return values if isinstance(values, dict) and not _is_deep(values) else arguments


# ---------------------------------------------------------------- answers


def completion(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    """Return the body of an answer."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.calls:
        calls = [
            {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments, number in answer.calls
        ]
        message |= {"content": answer.text or None, "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": answer.reason}
    if request.logprobs:
        # the tokens as vLLM's return_tokens_as_token_ids has them
        pairs = zip(answer.token_ids, answer.log_probs, strict=True)
        choice["logprobs"] = {
            "content": [
                {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
                for token, value in pairs
            ]
        }
    num = len(answer.token_ids)
    return {
        "id": f"chatcmpl-{answer.number}",
        "object": "chat.completion",
        "created": 0,
        "model": request.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": answer.num_before,
            "completion_tokens": num,
            "total_tokens": answer.num_before + num,
        },
    }


def completion_events(request: ChatRequest, answer: ChatAnswer) -> Iterator[bytes]:
    """Yield the server-sent events of an answer: the message, its end, and with
    stream_options.include_usage the numbers of tokens."""
    whole = completion(request, answer)
    (choice,) = whole["choices"]
    usage = whole.pop("usage")
    delta = choice.pop("message")
    for index, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = index
    has_usage = request.stream_options is not None and request.stream_options.include_usage
    chunks: list[dict[str, Any]] = [
        {"choices": [{**choice, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": answer.reason}]},
        *([{"choices": [], "usage": usage}] if has_usage else []),
    ]
    for chunk in chunks:
        yield _event({**whole, "object": "chat.completion.chunk", **chunk})
    yield b"data: [DONE]\n\n"


def _event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    prefix = b"" if name is None else f"event: {name}\n".encode()
    return prefix + b"data: " + msgspec.json.encode(data) + b"\n\n"
