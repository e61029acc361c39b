"""Anthropic's messages at the endpoint of agents: a request as one of OpenAI's chat completions,
which agent_requests.py checks, and the answer in Anthropic's form. Neither torch nor numpy is
imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import asdict

from rlhf_mc.config.masking import one_line
from rlhf_mc.environments.agent_requests import RefusedError, parsed_arguments

_INVALID = "INVALID_JSON"
"""Key of arguments that are no JSON object, as Anthropic's documentation has it."""
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_Content = str | list[dict[str, Any]]


class _Message(msgspec.Struct):
    role: Literal["system", "user", "assistant"]
    content: _Content


class _Tool(msgspec.Struct, kw_only=True):
    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(name="input_schema")


class _Request(msgspec.Struct):
    """The parameters that OpenAI has in another form."""

    messages: list[_Message]
    system: _Content = ""
    tools: list[_Tool] = []
    tool_choice: dict[str, Any] = {}


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of OpenAI's request that asks for the same, without cache_control. Raise
    RefusedError for what the model cannot read or write."""
    try:
        request = msgspec.convert(body, _Request)
    except msgspec.ValidationError as error:
        raise RefusedError(one_line(str(error), 300)) from None
    given = [_Message("system", request.system)] if request.system else []
    messages = [chat for one in [*given, *request.messages] for chat in _chat_messages(one)]
    if messages and messages[-1]["role"] == "assistant":
        raise RefusedError("the last message is the assistant's, which an answer cannot continue")
    choice = request.tool_choice
    return {
        **body,
        **dict.fromkeys(("system", "cache_control")),
        "messages": messages,
        "tools": [{"type": "function", "function": asdict(tool)} for tool in request.tools],
        "tool_choice": choice.get("type"),
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
    }


def _chat_messages(message: _Message) -> list[dict[str, Any]]:
    """Return OpenAI's messages for one of Anthropic's: each tool result is a message."""
    messages: list[dict[str, Any]] = []
    calls = []
    texts = []
    text_alone = [{"type": "text", "text": message.content}]
    for block in text_alone if isinstance(message.content, str) else message.content:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_use", "id": str(number), "name": str(name), "input": dict(values)}:
                calls.append({"id": number, "function": {"name": name, "arguments": _text(values)}})
            case {"type": "tool_result", "tool_use_id": str(number)}:
                result = {"role": "tool", "tool_call_id": number}
                messages.append({**result, "content": block.get("content", "")})
            case _:
                problem = "the model reads and writes text, tool_use and tool_result alone"
                raise RefusedError(f"a block is {one_line(repr(block), 80)}; {problem}")
    if texts or not messages:
        messages.append({"role": message.role, "content": "".join(texts), "tool_calls": calls})
    return messages


def _text(values: Mapping[str, Any]) -> str:
    """Return the arguments of a call as text."""
    text = values.get(_INVALID) if len(values) == 1 else None
    return text if isinstance(text, str) else msgspec.json.encode(values).decode()


# ---------------------------------------------------------------- answers


def message_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of an answer. body: of OpenAI's."""
    (choice,) = body["choices"]
    text = choice["message"]["content"]
    content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    for call in choice["message"].get("tool_calls", ()):
        values = parsed_arguments(call["function"]["arguments"])
        inputs = {_INVALID: values} if isinstance(values, str) else values
        block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
        content.append({**block, "input": inputs})
    lens = body["usage"]
    usage = {"input_tokens": lens["prompt_tokens"], "output_tokens": lens["completion_tokens"]}
    return {
        **{"id": body["id"], "type": "message", "role": "assistant", "model": body["model"]},
        **{"stop_reason": _STOP_REASONS[choice["finish_reason"]], "stop_sequence": None},
        **{"content": content, "usage": usage},
    }


def message_events(message: Mapping[str, Any]) -> bytes:
    """Return the server-sent events of an answer."""
    end = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    start = {**message, **dict.fromkeys(end), "content": []}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    for i, block in enumerate(message["content"]):
        empty: dict[str, Any] = {"text": ""}
        delta = {"type": "text_delta", "text": block.get("text")}
        if block["type"] == "tool_use":
            empty = {"input": {}}
            values = msgspec.json.encode(block["input"]).decode()
            delta = {"type": "input_json_delta", "partial_json": values}
        events += [
            {"type": "content_block_start", "index": i, "content_block": block | empty},
            {"type": "content_block_delta", "index": i, "delta": delta},
            {"type": "content_block_stop", "index": i},
        ]
    events += [{"type": "message_delta", "delta": end, "usage": message["usage"]}]
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))
        for event in [*events, {"type": "message_stop"}]
    )
