"""Agents in real worker processes that speak Anthropic's messages, with anthropic's and httpx's
clients: tools, streams, and what the endpoint refuses."""

from __future__ import annotations

from typing import Any

from test_agent_endpoint import CALL, agent  # noqa: F401
from test_environments import Letters, user_file  # noqa: F401

TOOLS = r"""
from anthropic import AsyncAnthropic
claude = AsyncAnthropic(max_retries=0)  # by the variables
assert os.environ["ANTHROPIC_MODEL"] == model
marked = {"cache_control": {"type": "ephemeral"}}
schema = {"type": "object", "properties": {"a": {"type": "number"}}}
tools = [{"name": "add", "description": "Add.", "input_schema": schema, **marked}]
system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief.", **marked}]
asked = {"model": model, "system": system, "tools": tools, "max_tokens": 999}
answer = await claude.messages.create(messages=messages, **asked)
text, call = answer.content
assert (answer.stop_reason, answer.role, text.text) == ("tool_use", "assistant", "hm"), answer
assert (call.id, call.name, call.input) == ("call00000", "add", {"a": 1.0, "b": "1.0"}), call
assert answer.usage.output_tokens == LENGTH and answer.usage.input_tokens > 100, answer.usage
again = [text, {**call.to_dict(), "input": {"b": "1.0", "a": 1}, **marked}]  # as JavaScript has it
result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "2"}]}
results = [{**result, "is_error": False}, {"type": "text", "text": "on"}]
messages += [{"role": "assistant", "content": again}, {"role": "user", "content": results}]
async with claude.messages.stream(messages=messages, **asked) as stream:
    kinds = [event.type async for event in stream]
    answer = await stream.get_final_message()
block = ["content_block_start", "input_json", "content_block_delta", "content_block_stop"]
assert sorted(set(kinds)) == sorted({*block, "message_start", "message_delta", "message_stop"})
(call,) = answer.content
assert (answer.stop_reason, call.input) == ("tool_use", {"INVALID_JSON": "[1]"}), answer
assert answer.usage.output_tokens == LAST_LENGTH
messages += [{"role": "assistant", "content": answer.content}]
messages += [{"role": "user", "content": [{**result, "tool_use_id": call.id, "content": "3"}]}]
asked["tool_choice"] = {"type": "none"}
events = await claude.messages.create(messages=messages, stream=True, **asked | {"max_tokens": 3})
text = "".join([one.delta.text async for one in events if one.type == "content_block_delta"])
assert text == "end"
"""


def test_an_agent_speaks_anthropics_messages(agent: Any) -> None:  # noqa: F811
    """Check a program with tools: answers and streams, arguments that JavaScript writes otherwise
    or that are no JSON object, cache marks, and the end of a turn at its limit."""
    calls = (CALL.replace("1}", '1.0, "b": "1.0"}'), CALL.replace('{"a":  1}', "[1]"))
    body = TOOLS.replace("LAST_LENGTH", f"{len(calls[1]) + 1}")
    body = body.replace("LENGTH", f"{len(calls[0]) + 3}")
    ended, conversations = agent(body, (f"hm{calls[0]}", calls[1], "end"), True, limit=1500)
    text = Letters().decode(ended[0].token_ids)
    assert conversations.episode(0).failure is None, text
    assert '"name": "add", "description": "Add.", "parameters": {"type": "object"' in text
    assert "<system>Be brief.\2\n<user>go\2\n<assistant>hm<tool_call>" in text
    assert text.endswith("<tool>2\2\n<user>on\2\n<assistant>" + text[text.rindex("<tool_call>") :])


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}
DEEP: Any = 1
for _ in range(40):
    DEEP = {"a": DEEP}


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [*blocks]}, {"role": "user", "content": "go"}]}


REFUSED = [
    (said(IMAGE), "a block is {'type': 'image', "),
    (said({"type": "thinking", "thinking": "hm", "signature": ""}, role="assistant"), "'thinking'"),
    (said({"type": "text", "text": 1}), "; the model reads and writes text, tool_use and tool_res"),
    (said({"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}), "enum value 'image'"),
    (said({"type": "tool_use", "id": "a", "name": "b", "input": DEEP}), "more than 32 levels"),
    (said(role="king"), "Invalid enum value 'king' - at `$.messages[0].role`"),
    ({"messages": []}, "length >= 1"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "which an answer cannot continue"),
    ({"thinking": {"type": "adaptive"}}, "it would change the policy that is trained"),
    (
        {"temperature": 0.5},
        "temperature is 0.5, and that of the run 1.0: it would change the policy",
    ),
    ({"top_k": 5}, "top_k is 5, and that of the run -1"),
    ({"stop_sequences": ["x"]}, "stop_sequences is ['x']; only [] is supported"),
    ({"tool_choice": {"type": "any"}}, "tool_choice is 'any'; only 'auto' or 'none'"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "required field `input_schema`"),
    ({"max_tokens": 0}, "Expected `int` >= 1"),
]
SHOWN = """
from anthropic import AsyncAnthropic, AuthenticationError, NotFoundError
url, key = client_settings["base_url"], client_settings["api_key"]
claude = AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0)
question = {"model": "claude", "messages": messages, "max_tokens": 9}

async with httpx.AsyncClient(headers={"x-api-key": key}) as http:
    for given, problem in refused:
        answer = await http.post(url + "/messages", json=question | given)
        error = answer.json()
        assert answer.status_code == 400 and error["type"] == "error", error
        assert error["error"]["type"] == "invalid_request_error", error
        assert problem in error["error"]["message"], (problem, error)
try:
    await claude.with_options(api_key=key + "0").messages.create(**question)
    raise AssertionError
except AuthenticationError as error:
    assert error.body["error"]["type"] == "authentication_error", error
try:
    await claude.messages.count_tokens(model="claude", messages=messages)
    raise AssertionError
except NotFoundError as error:
    assert error.body["error"]["type"] == "not_found_error", error
neutral = {"temperature": 1.0, "top_p": 1, "stop_sequences": [], "thinking": {"type": "disabled"}}
more = {"metadata": {"user_id": "me"}, "service_tier": "auto", "extra_body": neutral}
answers = [await claude.messages.create(**question, **more) for _ in range(2)]
assert answers[0] == answers[1] and answers[0].stop_reason == "end_turn", answers
messages += [{"role": "assistant", "content": answers[0].content[0].text}]
messages += [{"role": "user", "content": "on"}]
await turn()
"""


def test_what_the_model_cannot_do_is_refused_in_anthropics_form(agent: Any) -> None:  # noqa: F811
    """Check blocks and parameters, the same request twice, and a turn in OpenAI's form after one in
    Anthropic's."""
    ended, conversations = agent(f"refused = {REFUSED!r}{SHOWN}")
    text = Letters().decode(ended[0].token_ids)
    assert conversations.episode(0).failure is None, text
    assert text == "user>go\2\n<assistant>a\2\n<user>on\2\n<assistant>b\2"
    assert conversations.episode(0).info["refused_requests"] == len(REFUSED) + 1
