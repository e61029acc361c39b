"""Agents in real worker processes, with openai's and httpx's clients: conversations through
turns.py without an engine, what the endpoint refuses, and hostile programs."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_environments import Letters, begun, played, user_file  # noqa: F401

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.data.batch import CONTEXT_START, OBSERVED, Generation
from rlhf_mc.environments.agent_requests import digest
from rlhf_mc.environments.environment_manager import EnvironmentManager
from rlhf_mc.environments.environment_worker import Turn
from rlhf_mc.environments.pool import EnvironmentPool
from rlhf_mc.environments.turns import Conversations
from rlhf_mc.trainer.samples import split_turns

PROGRAM = """
import asyncio, json, os, sys
import httpx, psutil
from openai import AsyncOpenAI, BadRequestError

async def run(task, client_settings, kind="echo"):
    model = client_settings["model"]
    client = AsyncOpenAI(
        base_url=client_settings["base_url"], api_key=client_settings["api_key"], max_retries=0
    )
    messages = [{"role": "user", "content": "go"}]

    async def turn(**parameters):
        answer = await client.chat.completions.create(model=model, messages=messages, **parameters)
        messages.append(answer.choices[0].message)
        return answer
"""
REST = """
    return float(task["ground_truth"])

if __name__ == "__main__":
    settings = {
        "base_url": os.environ["OPENAI_BASE_URL"],
        "api_key": os.environ["OPENAI_API_KEY"],
        "model": os.environ["OPENAI_MODEL"],
    }
    score = asyncio.run(run(json.load(sys.stdin), settings))
    httpx.post(
        settings["base_url"] + "/score",
        json={"score": score, "acc": 1},
        headers={"x-api-key": settings["api_key"]},
    ).raise_for_status()
"""


ROW = {"role": "user", "content": "row"}


@pytest.fixture
def agent(tmp_path: Path, user_file: str) -> Iterator[Any]:  # noqa: F811
    """Return play(body, turns, **settings): the ended conversations of an agent of this body, and
    their episodes."""

    running: list[EnvironmentManager] = []

    def play(
        body: str,
        turns: tuple[str, ...] = ("a", "b", "c"),
        as_program: bool = False,
        **settings: Any,
    ) -> tuple[dict[int, Generation], Conversations]:
        path = tmp_path / "agent.py"
        lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
        path.write_text(PROGRAM + lines + REST)
        place = {"command": [sys.executable, str(path)]} if as_program else {"path": str(path)}
        limit = settings.pop("limit", 200)
        replayed = settings.pop("replayed", None)
        is_closed = settings.pop("is_closed", True)
        cfg = EnvironmentConfig(name="openai", **place, **settings)
        environments, conversations = begun(cfg, limit, replayed, tmp_path, messages=[ROW])
        running.append(environments)
        try:
            return played(conversations, turns), conversations
        finally:
            if is_closed:
                environments.close()

    yield play
    for environments in running:
        environments.close()


TWO_TURNS = """
await turn()
messages.append({"role": "user", "content": "on"})
await turn()
"""


@pytest.mark.parametrize("as_program", [False, True])
def test_an_agents_requests_are_observations(agent: Any, as_program: bool) -> None:
    ended, conversations = agent(TWO_TURNS, as_program=as_program)
    text = Letters().decode(ended[0].token_ids)
    assert text == "user>go\2\n<assistant>a\2\n<user>on\2\n<assistant>b\2"
    sampled = [log_prob != OBSERVED for log_prob in ended[0].log_probs]
    drawn = [token for token, kept in zip(ended[0].token_ids, sampled, strict=True) if kept]
    assert Letters().decode(drawn) == "a\2b\2" and ended[0].finished
    for number in (0, 1):
        episode = conversations.episode(number)
        assert episode.rewards == [(-1, 0.0), (1, 0.0), (3, float(number))]
        assert episode.failure is None and episode.info["refused_requests"] == 0
        assert ("acc" in episode.info) == as_program


TOOLS = r"""
tools = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add <stop>.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
answer = await turn(tools=tools, tool_choice="auto", logprobs=True)
(choice,) = answer.choices
assert choice.finish_reason == "tool_calls" and choice.message.content == "hm", choice
(call,) = choice.message.tool_calls
assert (call.id, call.function.name, call.function.arguments) == ("call00000", "add", '{"a": 1}')
tokens = choice.logprobs.content
assert tokens[0].token == f"token_id:{ord('h')}" and {one.logprob for one in tokens} == {-1.0}
assert answer.usage.completion_tokens == len(tokens) and answer.usage.prompt_tokens > 100
messages.append({"role": "tool", "tool_call_id": call.id, "content": "2 <stop>"})
answer = await turn(tools=tools)
assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("stop", "b<stop>\2")
messages[1] = {"role": "assistant", "content": "hm", "tool_calls": [
    {"id": call.id, "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
]}
messages.append({"role": "user", "content": [{"type": "text", "text": "on"}]})
parts = []
stream = await client.chat.completions.create(
    model="gpt-4o", messages=messages, tools=tools, tool_choice="none", stream=True,
    stream_options={"include_usage": True}
)
async for chunk in stream:
    parts += [one.delta.content or one.finish_reason for one in chunk.choices]
assert parts == ["hm<tool_call>{}</tool_call>\2", "stop"] and chunk.usage.completion_tokens == 28
"""
CALL = '<tool_call>{"name": "add", "arguments": {"a":  1}}</tool_call>'


def test_an_agent_calls_tools(agent: Any) -> None:
    """Check calls, their arguments written otherwise by the agent, a stream, log-probs, and control
    tokens in schemas and messages."""
    turns = (f"hm{CALL}", "b<stop>", "hm<tool_call>{}</tool_call>")
    ended, conversations = agent(TOOLS, turns, limit=1000, skip_special_tokens=False)
    text = Letters().decode(ended[0].token_ids)
    assert conversations.episode(0).failure is None, text
    assert text.startswith('tools>[{"type": "function", "function": {"name": "add", ')
    assert f"<assistant>hm{CALL}\2\n<tool>2 <stop>\2\n<assistant>b<stop>\2\n<user>on" in text
    # the model's own one alone is a token
    assert sum(token == 0x110000 for token in ended[0].token_ids) == 1


REFUSED = {
    "temperature=0.5": "temperature is 0.5, and that of the run 1.0: it would change the policy",
    "extra_body={'stop_token_ids': [3]}": "stop_token_ids is [3], and that of the run [2]",
    "seed=7": "seed is 7: it would change the policy that is trained",
    "extra_body={'guided_json': {}}": "guided_json is {}: it would change",
    "n=2": "n is 2; only 1 is supported",
    "stop=['x']": "stop is ['x']; only [] or '' is supported",
    "tool_choice='required'": "only 'auto' or 'none'",
    "top_logprobs=2": "top_logprobs is 2; only 0",
    "response_format={'type': 'json_object'}": "response_format is {'type': 'json_object'}",
    "max_tokens=0": "Expected `int` >= 1 - at `$.max_tokens`",
    "tools=[{'type': 'function', 'function': {}}]": "required field `name`",
    "extra_body={'messages': [{'role': 'king', 'content': ''}]}": "Invalid enum value 'king'",
    "extra_body={'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]}": (
        "Invalid enum value 'image_url'"
    ),
}


def test_what_would_change_the_policy_is_refused(agent: Any) -> None:
    """Check parameters that the run does not have, and requests that rewrite the conversation."""
    lines = [
        "async def refused(problem, model='', **parameters):",
        "    try:",
        "        await client.chat.completions.create(",
        "            **{'model': model, 'messages': messages} | parameters)",
        "    except BadRequestError as error:",
        "        assert problem in str(error), (problem, error)",
        "    else:",
        "        raise AssertionError(problem)",
        *(f"await refused({problem!r}, {given})" for given, problem in REFUSED.items()),
        "await turn(temperature=1, top_p=1.0, seed=None, presence_penalty=0, user='me',",
        "    extra_body={'stop_token_ids': [2]})",
        "await refused('2 messages and a new one')",
        "for wrong in ([], messages[:1], [*messages[:1], {'role': 'assistant', 'content': 'x'}]):",
        "    new = [*wrong, {'role': 'user', 'content': 'on'}]",
        "    await refused('2 messages and a new one', messages=new)",
        "messages.append({'role': 'user', 'content': 'on'})",
        "await refused('other tools', tools=[{'type': 'function', 'function': {'name': 'f'}}])",
        "await turn()",
    ]
    ended, conversations = agent("\n".join(lines), limit=300, rewritten_history="refuse")
    assert conversations.episode(0).failure is None
    assert conversations.episode(0).info["refused_requests"] == len(REFUSED) + 5
    assert Letters().decode(ended[0].token_ids).count("<assistant>") == 2


CONTEXTS = """
async def asked(*texts, **parameters):
    chat = [{"role": "user", "content": text} for text in texts]
    answer = await client.chat.completions.create(model=model, messages=chat, **parameters)
    return answer.choices[0].message.content, answer.usage.prompt_tokens
await turn()
assert await asked("sum up") == ("b\\2", len("__user>sum up\\2\\n<assistant>"))
messages.append({"role": "user", "content": "on"})
await turn()
others = await asyncio.gather(asked("one"), asked("two"))
assert sorted(text for text, _ in others) == ["d\\2", "e\\2"]
messages.append({"role": "user", "content": "more"})
await turn(tools=[{"type": "function", "function": {"name": "f"}}])
"""


def test_a_rewritten_history_begins_a_context(agent: Any) -> None:
    """Check a question beside the conversation, which a further context continues with the
    tokens that were drawn, two parallel questions, and other tools: the tokens of each context, and
    those that are drawn."""
    turns = ("a", "b", "c", "d", "e", "f")
    ended, conversations = agent(CONTEXTS, turns, limit=500)
    assert conversations.episode(0).failure is None
    assert conversations.episode(0).score == 0.0 and conversations.episode(1).score == 1.0
    log_probs = ended[1].log_probs
    starts = [0, *(i for i, x in enumerate(log_probs) if x == CONTEXT_START), None]
    texts = [Letters().decode(ended[1].token_ids[a:b]) for a, b in itertools.pairwise(starts)]
    first = "user>go\2\n<assistant>a\2"
    assert texts[:3] == [
        first,
        "\5\6user>sum up\2\n<assistant>b\2",
        f"\5\6{first}\n<user>on\2\n<assistant>c\2",
    ]
    questions = {f"\5\6user>{name}\2\n<assistant>" for name in ("one", "two")}
    assert {text.rstrip("de\2") for text in texts[3:5]} == questions
    assert texts[5].startswith("\5\6tools>[{")
    assert texts[5].endswith("<user>more\2\n<assistant>f\2")
    drawn = [t for t, x in zip(ended[1].token_ids, log_probs, strict=True) if x == -1.0]
    assert Letters().decode(drawn) == "".join(f"{letter}\2" for letter in "abcdef")
    letters: Any = Letters()
    turns = split_turns(letters, ended[1].token_ids, conversations.episode(1))
    assert [kind for kind, _ in turns[::2]] == ["observation", *["context"] * 5]
    assert {kind for kind, _ in turns[1::2]} == {"response"}
    assert conversations.episode(1).info["contexts"] == 6


def test_a_result_of_a_tool_is_truncated_in_a_new_context_too(agent: Any) -> None:
    body = """
await turn()
call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1]"}}
messages[:] = [
    {"role": "user", "content": "no" * 20},
    {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "tool_call_id": "1", "content": "x" * 300},
]
await turn()
"""
    ended, conversations = agent(body, limit=900, max_observation_length=20)
    assert conversations.episode(0).failure is None
    text = Letters().decode(ended[0].token_ids)
    assert 0 < text.count("x") < 30 and "no" * 20 in text


def test_only_arguments_are_compared_as_numbers() -> None:
    def said(content: str, arguments: str) -> int:
        call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
        return digest({"role": "assistant", "content": content, "tool_calls": [call]})

    assert said("", '{"a": [1.0, 2.5], "b": 3}') == said("", '{"b": 3.0, "a": [1, 2.5]}')
    assert said("", '{"a": "1.0, 2"}') != said("", '{"a": "1, 2"}')
    assert said("is [1.0, 2]", "{}") != said("is [1, 2]", "{}")


def test_a_run_has_many_numbers_of_an_agent_at_most(agent: Any) -> None:
    body = """
await turn()
async with httpx.AsyncClient() as http:
    for i in range(300):
        (await http.post(
            client_settings["base_url"] + "/score", json={"score": 1.0, f"n{i}": 1},
            headers={"x-api-key": client_settings["api_key"]},
        )).raise_for_status()
"""
    _, conversations = agent(body)
    assert conversations.episode(1).score == 301.0 and len(conversations.episode(1).info) < 150


def test_a_context_that_does_not_fit_ends_the_conversation(agent: Any) -> None:
    body = "await turn()\nmessages[0]['content'] = 'x' * 60\nawait turn()"
    ended, conversations = agent(body, limit=80)
    assert Letters().decode(ended[1].token_ids) == "user>go\2\n<assistant>a\2"
    assert conversations.episode(1).failure is None and not ended[1].finished


def test_other_sampling_parameters_are_ignored_by_a_setting(agent: Any) -> None:
    _, conversations = agent("await turn(temperature=0.5, seed=7)", other_sampling="ignore")
    assert conversations.episode(0).info["ignored_parameters"] == 2
    assert conversations.episode(0).failure is None


LIMITS = """
answer = await turn(max_tokens=2)
assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("length", "ab")
messages.append({"role": "user", "content": "on"})
await turn()
messages.append({"role": "user", "content": "on"})
try:
    await turn()
    raise AssertionError
except BadRequestError as error:
    assert error.code == "context_length_exceeded", error
"""


@pytest.mark.parametrize(("max_turns", "limit"), [(2, 300), (16, 47)])
def test_an_agent_learns_that_the_conversation_has_no_room(
    agent: Any, max_turns: int, limit: int
) -> None:
    ended, conversations = agent(LIMITS, ("abc", "d" * 9), max_turns=max_turns, limit=limit)
    text = Letters().decode(ended[1].token_ids)
    end = "\2" if max_turns == 2 else ""
    letters = "d" * (9 if max_turns == 2 else 2)
    assert text == f"user>go\2\n<assistant>ab\2\n<user>on\2\n<assistant>{letters}{end}", len(text)
    assert conversations.episode(1).score == 1.0, "the agent has given its score all the same"


FAULTS = {
    "raise SystemExit('no more')": ("raised", "raised SystemExit: no more"),
    "await turn()\nawait asyncio.sleep(300)": ("timeout", "no answer after"),
    "await turn()\nos.kill(os.getpid(), 9)": ("exited", "ended"),
    "await turn()\nreturn 'much'": ("invalid", "returned 'much', expected a number"),
    "return 1.0": ("invalid", "the agent has ended without a request"),
    "messages[0]['content'] = 'x' * 5 * 10**6\nawait turn()": ("invalid", "bytes; at most"),
}


@pytest.mark.parametrize(
    ("fault", "as_program"),
    [*((fault, False) for fault in FAULTS), *((fault, True) for fault in [*FAULTS][:3])],
)
def test_a_fault_of_an_agent_ends_its_conversation_alone(
    agent: Any, capfd: pytest.CaptureFixture[str], fault: str, as_program: bool
) -> None:
    lines = "\n".join(f"    {line}" for line in fault.splitlines())
    body = f"if task['ground_truth'] == 1:\n{lines}\n{TWO_TURNS}"
    kind, problem = FAULTS[fault]
    # a program imports its packages within it
    seconds = 60.0 if kind != "timeout" else 10.0 if as_program else 3.0
    ended, conversations = agent(
        body,
        as_program=as_program,
        timeout_seconds=seconds,
        default_score=-1.0,
        max_tokens_per_turn=9,
    )
    episode = conversations.episode(1)
    error = capfd.readouterr().err
    assert episode.score == -1.0 and conversations.episode(0).failure is None
    if not as_program or kind in ("timeout", "exited"):
        assert kind in episode.failed_calls and problem in error, error
    elif kind == "raised":
        assert "its program has ended with exit code 1;" in error
    if not fault.startswith("await turn()"):
        # it fails before its first request: the model answers the row's prompt
        assert Letters().decode(ended[1].token_ids) == "user>row\2\n<assistant>a\2"


@pytest.mark.parametrize("again", ["go", "other"])
def test_an_agent_that_is_begun_again_gets_the_earlier_turns(
    agent: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path, again: str
) -> None:
    """Check an agent whose process is killed in its second turn, once: it runs again with the turns
    that were drawn, and the conversation is that of an agent that was not killed. One that then
    asks something else keeps the first question, with a warning."""
    body = f"""
from pathlib import Path
killed = Path({str(tmp_path / "killed")!r})
messages[0]["content"] = {again!r} if killed.exists() and task["ground_truth"] == 1 else "go"
await turn(tools=[{{"type": "function", "function": {{"name": "f"}}}}])
messages.append({{"role": "user", "content": "on"}})
if task["ground_truth"] == 1 and not killed.exists():
    killed.touch()
    os.kill(os.getpid(), 9)
await turn(tools=[{{"type": "function", "function": {{"name": "f"}}}}])
"""
    ended, conversations = agent(body, limit=300)
    assert ended[0].token_ids == ended[1].token_ids
    assert [conversations.episode(number).score for number in (0, 1)] == [0.0, 1.0]
    warning = "begun again, it answers turn 1 otherwise than before" in capfd.readouterr().err
    assert warning == (again == "other")


def test_a_journal_repeats_an_agent(agent: Any, tmp_path: Path) -> None:
    """Check a run that is replayed: the agent does not run, and the limits of its requests hold."""
    body = (
        "await turn(max_tokens=2)\nmessages.append({'role': 'user', 'content': 'on'})\nawait turn()"
    )
    first = agent(body, ("abc", "d" * 9))[0]
    assert Letters().decode(first[0].token_ids).endswith("<user>on\2\n<assistant>ddddddddd\2")
    journal = tmp_path / "observations" / "step_000000_0.jsonl"
    assert journal.read_text().count('"max_tokens": 2') == 2
    again, conversations = agent("raise OSError", ("abc", "d" * 9), replayed=str(tmp_path))
    assert again == first and conversations.episode(1).score == 1.0


HOSTILE = """
base, key = client_settings["base_url"], client_settings["api_key"]
headers = {"Authorization": f"Bearer {key}"}
question = {"messages": messages}
is_hostile = task["ground_truth"] == 1
url = base + "/chat/completions"
port = int(base.rpartition(":")[2].partition("/")[0])

async def raw(*parts):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return (await asyncio.wait_for(reader.read(1 << 16), 20)).split(b"\\r\\n")[0]
    except ConnectionError:
        return b"reset"
    finally:
        writer.close()

if is_hostile:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=60, limits=limits) as http:
        assert (await http.get(base + "/models")).json()["data"][0]["id"] == "policy"
        assert (await http.get(base + "/files")).status_code == 404
        for wrong in ("-", "x", key[:-1], key + "0", "0-", "7-" + key[2:], "é"):
            wrong_headers = {"Authorization": f"Bearer {wrong}".encode()}
            answer = await http.post(url, json=question, headers=wrong_headers)
            assert answer.status_code == 401, wrong
        other = {"Authorization": f"Bearer {1 - int(key[0])}{key[1:]}"}
        assert (await http.post(url, json=question, headers=other)).status_code == 401
        for text in ("{", "[]", "null", "1", '"x"', "[" * 10**5, '{"a":' * 40 + "1" + "}" * 40,
                     '{"messages": "x"}', '{"messages": []}', "{}", '{"messages": [{"role": 1}]}',
                     '{"messages": [{"role": "user", "content": "\\\\ud800"}]}'):
            answer = await http.post(url, content=text)
            assert answer.status_code == 400 and answer.json()["error"]["message"], text
        async def chunks(number):
            for _ in range(number):
                yield b"x" * 2**20
        answer = None
        try:
            answer = await http.post(url, content=chunks(100))
        except httpx.TransportError:
            pass  # closed while it was sent
        assert answer is None or answer.status_code == 413, answer
        for score, status in (("3e38", 200), ("3e38", 400), ("-3e38", 200)):
            answer = await http.post(base + "/score", content='{"score": %s}' % score)
            assert answer.status_code == status, score
        for score in ('"x"', "{}", '{"score": 1e999}', '{"score": "a"}'):
            assert (await http.post(base + "/score", content=score)).status_code == 400
        small = ["GET /v1/models HTTP/1.0", f"Authorization: Bearer {key}"]
        assert b" 200 " in await raw("\\r\\n".join([*small, "", ""]).encode())
        bomb = b"GET /v1/models HTTP/1.1\\r\\n" + b"a: b\\r\\n" * 10**5 + b"\\r\\n"
        long = b"GET /v1/models HTTP/1.1\\r\\na: " + b"b" * 10**5 + b"\\r\\n\\r\\n"
        for bytes_ in (bomb, long, b"\\0" * 1000 + b"\\r\\n\\r\\n"):
            status = await raw(bytes_)
            assert b" 400 " in status or status == b"reset", status
        worker = psutil.Process(os.getppid())
        before = worker.memory_info().rss
        large = b'{"messages": "' + b"x" * (7 << 20) + b'"}'
        posts = [asyncio.create_task(http.post(url, content=large)) for _ in range(60)]
        assert {answer.status_code for answer in await asyncio.gather(*posts)} == {400}
        assert worker.memory_info().rss - before < 200 << 20
        slow = await asyncio.open_connection("127.0.0.1", port)  # sends no more than this
        slow[1].write(b"POST /v1/chat/completions HTTP/1.1\\r\\nContent-Length: 9\\r\\n")
        posts = [asyncio.create_task(http.post(url, json={
            "messages": [{"role": "user", "content": f"go {i}"}]})) for i in range(1000)]
        statuses = [answer.status_code for answer in await asyncio.gather(*posts)]
        assert statuses.count(200) == 16 and {*statuses} <= {200, 400, 429}, sorted(statuses)
        return 1.0
await turn()
"""


def test_no_request_reaches_another_conversation(
    agent: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Check wrong and foreign keys, what is no JSON, bodies of 100 MB, headers without an end, a
    client that is slow, and a thousand requests at once, of which 16 have turns."""
    ended, conversations = agent(HOSTILE, ("a",) * 16, as_program=True, limit=1000)
    assert "warning" not in (error := capfd.readouterr().err), error
    assert conversations.episode(1).info["refused_requests"] > 1000
    assert conversations.episode(0).info["refused_requests"] == 0
    assert Letters().decode(ended[0].token_ids) == "user>go\2\n<assistant>a\2"
    assert Letters().decode(ended[1].token_ids).startswith("user>go ")


STAYS = """
import subprocess
await turn()
code = "import os, sys, time; os.setsid(); print(os.getpid(), file=open(sys.argv[1], 'w')); time.sleep(99)"
twice = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]])"
for name, arguments in (("near", [code]), ("far", [twice, code])):
    subprocess.Popen([sys.executable, "-c", *arguments, os.environ["PLACE"] + f"/{name}{task['ground_truth']}"])
while len(os.listdir(os.environ["PLACE"])) < 4 or "" in [open(entry.path).read() for entry in os.scandir(os.environ["PLACE"])]:
    await asyncio.sleep(0.05)
os.kill(os.getppid(), 15)
"""  # noqa: E501


def test_a_program_leaves_no_process(
    agent: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check processes that have left their session, and a signal to the worker process."""
    (tmp_path / "pids").mkdir()
    monkeypatch.setenv("PLACE", str(tmp_path / "pids"))
    body = STAYS + "\nos._exit(0)"
    assert agent(body, as_program=True, is_closed=False)[1].episode(0).failure is None
    assert _pids_gone([int(path.read_text()) for path in (tmp_path / "pids").iterdir()])


def _pids_gone(pids: list[int]) -> bool:
    """Wait for the ends of processes. Return False if one stays."""
    deadline = time.monotonic() + 15
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("ends", ["the conversation", "the run", "the worker"])
def test_a_program_ends_with_its_conversation_and_its_worker(
    agent: Any, tmp_path: Path, ends: str
) -> None:
    """Check programs that wait for an answer, and that ignore signals."""
    path = tmp_path / "agent.py"
    text = f"""
import os, pathlib, signal, time, httpx
signal.signal(signal.SIGTERM, signal.SIG_IGN)
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
pathlib.Path({str(tmp_path)!r}, f"pid{{os.getpid()}}").write_text("")
body = {{"messages": [{{"role": "user", "content": "go"}}]}}
try:
    httpx.post(url + "/chat/completions", json=body, headers={{"x-api-key": key}}, timeout=600)
except httpx.HTTPError:
    pass
time.sleep(600)
"""
    path.write_text(text)
    command = [sys.executable, str(path)]
    pool = EnvironmentPool(EnvironmentConfig(name="openai", command=command, num_workers=1))
    row = {"prompt": [], "sampling": {}}
    for number in (0, 1):
        pool.submit(Turn((0, number), row, "", []))
    answers: dict[Any, Any] = {}
    while len(answers) < 2:
        answers |= pool.take(60.0)
    assert all(answer.observation for answer in answers.values()), answers
    pids = [int(file.name[3:]) for file in tmp_path.glob("pid*")]
    assert len(pids) == 2
    if ends == "the conversation":
        pool.end((0, 0))
        deadline = time.monotonic() + 15
        while sum(Path(f"/proc/{pid}").exists() for pid in pids) > 1:
            assert time.monotonic() < deadline, "a program stays"
            time.sleep(0.05)
        assert sum(Path(f"/proc/{pid}").exists() for pid in pids) == 1, "its neighbour stays"
    elif ends == "the worker":
        (worker,) = {psutil.Process(pid).ppid() for pid in pids}
        os.kill(worker, signal.SIGKILL)
        assert _pids_gone(pids)
    pool.close()
    assert _pids_gone(pids)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"command": ["no such program", "x"]}, "there is no program 'no such program'"),
        ({"path": "agent.py"}, "has no function 'run'"),
    ],
)
def test_an_agent_that_cannot_be_used_is_one_line(
    tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    if "path" in settings:
        (tmp_path / "agent.py").write_text("")
        settings = {"path": str(tmp_path / "agent.py")}
    with pytest.raises(UserError) as caught:
        EnvironmentPool(EnvironmentConfig(name="openai", num_workers=1, **settings))
    assert problem in str(caught.value)


def test_a_template_that_begins_in_several_ways_is_one_line(
    agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rendered(self: Any, messages: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        return "".join(one["role"] for one in messages)

    monkeypatch.setattr(Letters, "apply_chat_template", rendered)
    with pytest.raises(UserError, match="has no first token that all conversations have"):
        agent("await turn()")
