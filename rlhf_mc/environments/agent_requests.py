"""The texts of the endpoint of agents: a request of OpenAI's chat completions as messages for the
chat template, and the model's turn as an answer. What the run cannot do is refused with its reason.
Neither torch nor numpy is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from rlhf_mc.config.masking import one_line
from rlhf_mc.environments.protocol import SECTION, Completion, ToolCall
from rlhf_mc.environments.tools import ToolSchema

_DEEPEST = 32
"""Levels of a request's JSON, into which parsers and templates recurse."""
_READ = (
    *("messages", "model", "tools", "max_tokens", "max_completion_tokens", "stream"),
    *("stream_options", "logprobs", "parallel_tool_calls", "user", "metadata", "store"),
    *("service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
)
"""Parameters that are read, or change no answer."""
_ONLY: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "stop": ([], ""),
    "stop_sequences": ([],),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}
"""Values of parameters whose other values ask for another kind of answer."""
_NEUTRAL: Mapping[str, Any] = {
    **{"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}},
    "thinking": {"type": "disabled"},
}
"""Values of sampling parameters that change nothing."""


_FLAT = (str, int, float, type(None))
_Limit = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class RefusedError(Exception):
    """A request that gets no turn of the model."""

    def __init__(self, problem: str, status: int = 400, code: str | None = None) -> None:
        """status: of HTTP. code: OpenAI's name of the error."""
        super().__init__(problem)
        self.status = status
        self.code = code


class _Part(msgspec.Struct):
    type: Literal["text"]
    text: str


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


class ChatRequest(msgspec.Struct):
    """The parameters of a request that are read."""

    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | None = None
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    stream: bool | None = None
    logprobs: bool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of the answer; None: that of the run."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def parsed_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request. Raise RefusedError for something else."""
    try:
        values = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RefusedError(f"the body is no JSON object ({one_line(str(error), 200)})") from None
    if _is_deep(values):
        raise RefusedError(f"the body's JSON has more than {_DEEPEST} levels")
    return values


def _is_deep(value: Any) -> bool:
    """Return whether a value of JSON has more than _DEEPEST levels."""
    level = [value]
    for _ in range(_DEEPEST):
        groups = [inner.values() if isinstance(inner, dict) else inner for inner in level]
        level = [inner for group in groups if not isinstance(group, _FLAT) for inner in group]
    return bool(level)


def chat_request(
    body: Mapping[str, Any], sampling: Mapping[str, Any], ignores_others: bool
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
                raise RefusedError(
                    f"{name} is {one_line(repr(value), 80)}; only {allowed} is supported"
                )
            continue
        wanted = sampling.get(name, _NEUTRAL.get(name))
        if value == wanted:
            continue
        if not ignores_others:
            own = f", and that of the run {sampling[name]!r}" if name in sampling else ""
            problem = f"{name} is {one_line(repr(value), 80)}{own}: it would change the policy that"
            hint = f"leave it out, or set {SECTION}.other_sampling: ignore"
            raise RefusedError(f"{problem} is trained; {hint}")
        num_ignored += 1
    try:
        request = msgspec.convert(body, ChatRequest)
        for schema in request.tools or ():
            msgspec.convert(schema, ToolSchema)
    except msgspec.ValidationError as error:
        raise RefusedError(one_line(str(error), 300)) from None
    return request, num_ignored


def rendered(message: _Message) -> dict[str, Any]:
    """Return a message as the chat template gets it."""
    content = message.content or ""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    fields: dict[str, Any] = {"role": message.role, "content": text}
    if message.role == "developer":
        fields["role"] = "system"
    if message.role == "tool":
        fields["tool_call_id"] = message.tool_call_id or ""
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {
                    "name": call.function.name,
                    "arguments": parsed_arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return fields


def digest(message: Any) -> int:
    """Return a digest of what a message says, with its arguments written in any way."""
    fields = rendered(msgspec.convert(message, _Message, from_attributes=True))
    for call in fields.get("tool_calls", ()):
        call["function"]["arguments"] = _plain_numbers(call["function"]["arguments"])
    return hash(msgspec.json.encode(fields, order="sorted"))


def _plain_numbers(value: Any) -> Any:
    """Return a value of JSON with 1 in place of 1.0, as JavaScript writes it."""
    if isinstance(value, dict):
        return {key: _plain_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(inner) for inner in value]
    is_integral = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if is_integral else value


def parsed_arguments(text: str) -> dict[str, Any] | str:
    """Return the arguments of a call: those of an object as a mapping, else the text."""
    try:
        values = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return values if isinstance(values, dict) and not _is_deep(values) else text


# ---------------------------------------------------------------- answers


def completion_body(
    request: ChatRequest,
    number: int,
    text: str,
    calls: Sequence[ToolCall],
    token_ids: Sequence[int],
    turn: Completion,
) -> dict[str, Any]:
    """Return the body of an answer. number: index of the turn. text: of the turn without
    calls."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": call.number, "type": "function", "function": call._asdict()} for call in calls
        ]
    reason = "length" if not turn.is_complete else "tool_calls" if calls else "stop"
    choice = {"index": 0, "message": message, "finish_reason": reason}
    if request.logprobs:
        # the tokens as vLLM's return_tokens_as_token_ids has them
        pairs = zip(token_ids, turn.log_probs, strict=True)
        choice["logprobs"] = {
            "content": [
                {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
                for token, value in pairs
            ]
        }
    lens = {"prompt_tokens": turn.num_before, "completion_tokens": len(token_ids)}
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": request.model,
        "choices": [choice],
        "usage": {**lens, "total_tokens": sum(lens.values())},
    }


def completion_events(body: Mapping[str, Any]) -> bytes:
    """Return the server-sent events of an answer: the message, and its end."""
    (choice,) = body["choices"]
    calls = choice["message"].get("tool_calls", ())
    numbered = {"tool_calls": [{**call, "index": i} for i, call in enumerate(calls)]}
    delta = choice["message"] | (numbered if calls else {})
    start = {"choices": [choice | {"delta": delta, "finish_reason": None}], "usage": None}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    common = {**body, "object": "chat.completion.chunk"}
    datas = [*(msgspec.json.encode(common | chunk) for chunk in (start, end)), b"[DONE]"]
    return b"".join(b"data: " + data + b"\n\n" for data in datas)
