"""Scores by an HTTP endpoint, against a server on this machine: both APIs, repetitions, time
limits, bad answers."""

from __future__ import annotations

import asyncio
import base64
import gzip
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import yaml
from config_files import MINIMAL

from rlhf_mc.config.checks import check_config
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import load_config
from rlhf_mc.config.reward_schema import (
    CustomRewardFunctionConfig,
    RemoteRewardConfig,
    RewardConfig,
)
from rlhf_mc.config.schema import Config
from rlhf_mc.data.batch import Prompt
from rlhf_mc.rewards import remote
from rlhf_mc.rewards.manager import RewardManager
from rlhf_mc.rewards.results import Failure, RewardRow, Score, reward_metrics
from rlhf_mc.rewards.returned import MOST_NAMES, Names

Answer = Callable[[str, dict[str, Any], Any], tuple[int, str | bytes | Iterator[bytes]]]


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a client that does not wait for its answer closes the connection."""


class Endpoint:
    """A server whose answers a test chooses: answer(path, request, headers) returns the status and
    the body. A body in pieces is sent without its length until the client has closed the
    connection."""

    def __init__(self) -> None:
        self.answer: Answer = lambda path, request, headers: (200, "1.0")
        self.requests: list[dict[str, Any]] = []
        self.encoding = "identity"
        self.num_sent = 0
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.requests.append(request)
                status, body = endpoint.answer(self.path, request, self.headers)
                self.send_response(status)
                self.send_header("Content-Encoding", endpoint.encoding)
                body = body.encode() if isinstance(body, str) else body
                if isinstance(body, bytes):
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                for piece in [body] if isinstance(body, bytes) else body:
                    self.wfile.write(piece)
                    endpoint.num_sent += len(piece)
                self.close_connection = not isinstance(body, bytes)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    found = Endpoint()
    yield found
    found.close()


def ask(limit: float = 60.0, num_rows: int = 1, **settings: Any) -> list[Any]:
    """Return the endpoint's results for rows whose responses are "0", "1", ..."""
    rows = [
        RewardRow(f"row {i}", "mine", str(i), "4", {"level": i}, {"remote": 1.0}, "2+2={response}?")
        for i in range(num_rows)
    ]
    answered: list[None] = []
    asked = remote.RemoteReward(RemoteRewardConfig(**settings), limit)
    results = asyncio.run(asked.score(rows, lambda: answered.append(None)))
    assert len(answered) == num_rows
    return results


def test_http_endpoint_gets_the_arguments_of_a_reward_function(endpoint: Endpoint) -> None:
    endpoint.answer = lambda path, request, headers: (
        200,
        json.dumps({"score": float(request["solution_str"])}),
    )
    assert ask(num_rows=3, url=f"{endpoint.url}/score") == [
        {"score": 0.0},
        {"score": 1.0},
        {"score": 2.0},
    ]
    assert {
        "prompt",
        "data_source",
        "solution_str",
        "ground_truth",
        "extra_info",
    } == endpoint.requests[0].keys()
    assert sorted(request["extra_info"]["level"] for request in endpoint.requests) == [0, 1, 2]


def test_openai_endpoint_judges_by_the_template(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    seen = []

    def answer(path: str, request: dict[str, Any], headers: Any) -> tuple[int, str]:
        seen.append((path, request["model"], request["messages"], headers["Authorization"]))
        return 200, json.dumps({"choices": [{"message": {"content": "Of 10 points: 0.75."}}]})

    endpoint.answer = answer
    template = "{prompt} {response} of {ground_truth} {other}"
    settings = {"api": "openai", "model": "judge", "template": template, "api_key_env": "JUDGE_KEY"}
    assert ask(url=f"{endpoint.url}/v1/", **settings) == [{"score": 0.75}]
    message = {"role": "user", "content": "2+2={response}? 0 of 4 {other}"}
    assert seen == [("/v1/chat/completions", "judge", [message], "Bearer secret")]


def test_overloaded_endpoint_is_asked_again(endpoint: Endpoint) -> None:
    endpoint.answer = lambda path, request, headers: (
        (503, "busy") if len(endpoint.requests) < 3 else (200, "0.5")
    )
    assert ask(url=endpoint.url, max_retries=2) == [{"score": 0.5}]
    assert len(endpoint.requests) == 3


def test_requests_are_concurrent_up_to_the_limit(endpoint: Endpoint) -> None:
    running: list[int] = []
    most = []
    four = threading.Barrier(4)

    def answer(path: str, request: dict[str, Any], headers: Any) -> tuple[int, str]:
        running.append(0)
        most.append(len(running))
        four.wait(60)
        running.pop()
        return 200, "1"

    endpoint.answer = answer
    ask(url=endpoint.url, num_rows=12, max_concurrency=4)
    assert max(most) == 4


@pytest.mark.parametrize(
    ("status", "body", "settings", "words"),
    [
        (200, "[" * 100_000, {}, "the answer is not JSON: brackets are nested too deep"),
        (
            200,
            '{"score": 1, "why": ' + "[" * 990 + "]" * 990 + "}",
            {"api": "openai"},
            "the answer is not JSON: brackets are nested too deep",
        ),
        (200, "9" * 5000, {}, "the answer is not JSON: Exceeds the limit"),
        (200, "1e999", {}, "returned inf, expected a finite number"),
        (200, '{"why": "' + "x" * 5000 + '"}', {}, "returned a dict without 'score'"),
        (500, "\x1b[31m" + "x" * 9000, {"max_retries": 0}, "HTTP status 500: \\x1b[31mxxx"),
        (503, "busy", {"max_retries": 1}, "HTTP status 503: busy (2 attempts)"),
        (404, "no such page", {}, "HTTP status 404: no such page (1 attempts)"),
        (200, "<html>", {}, "the answer is not JSON"),
        (200, "[1]", {"api": "openai"}, "the answer [1] is no chat completion"),
        (
            200,
            '{"choices": [{"message": {"content": "good"}}]}',
            {"api": "openai"},
            "the reply good has no number",
        ),
    ],
)
def test_answer_without_a_score(
    endpoint: Endpoint, status: int, body: str, settings: dict[str, Any], words: str
) -> None:
    endpoint.answer = lambda path, request, headers: (status, body)
    [failure] = ask(url=endpoint.url, **settings)
    assert isinstance(failure, Failure) and failure.kind == (
        "invalid" if "returned" in words else "endpoint"
    )
    assert words in failure.problem and len(failure.problem) < 300
    assert failure.origin == f"reward.remote.url {endpoint.url}"


def test_slow_endpoint_is_limited_by_request_and_by_response(endpoint: Endpoint) -> None:
    may_answer = threading.Event()
    endpoint.answer = lambda path, request, headers: (may_answer.wait(), (200, "1"))[1]
    [failure] = ask(url=endpoint.url, timeout_seconds=0.05, max_retries=1)
    assert "no complete answer after 0.05 s (reward.remote.timeout_seconds) (2 attempts)" in str(
        failure
    )
    [failure] = ask(url=endpoint.url, limit=0.1)
    may_answer.set()
    assert "no score after 0.1 s (reward.timeout_seconds)" in str(failure)


def test_answer_that_never_ends_is_limited_by_the_time_of_the_request(endpoint: Endpoint) -> None:
    """Send a byte more often than any limit of the time between two of them would notice."""
    closed = threading.Event()

    def bytes_one_by_one() -> Iterator[bytes]:
        try:
            while True:
                time.sleep(0.02)
                yield b" "
        finally:
            closed.set()

    endpoint.answer = lambda path, request, headers: (200, bytes_one_by_one())
    [failure] = ask(url=endpoint.url, timeout_seconds=0.3, max_retries=0)
    assert "no complete answer after 0.3 s (reward.remote.timeout_seconds) (1 attempts)" in str(
        failure
    )
    assert closed.wait(30), "the connection is closed"


def test_answer_is_read_up_to_a_limit(endpoint: Endpoint) -> None:
    endpoint.answer = lambda path, request, headers: (200, itertools.repeat(b" " * (1 << 16)))
    [failure] = ask(url=endpoint.url)
    assert "the answer has more than 4 MiB" in str(failure)
    assert endpoint.num_sent < 64 << 20, "what the sockets hold may be sent too"


def test_compressed_answer_is_refused(endpoint: Endpoint) -> None:
    endpoint.encoding = "gzip"
    endpoint.answer = lambda path, request, headers: (200, gzip.compress(b"0.5"))
    assert "the answer has the Content-Encoding gzip" in str(ask(url=endpoint.url))


def test_hostile_answers_are_failures_of_their_rows(endpoint: Endpoint) -> None:
    """Continue after them in a worker, with a reward.default_score."""
    answers = ["[" * 100_000, "{" * 3, "0.5", '{"score": {"score": 1}}']
    endpoint.answer = lambda path, request, headers: (200, answers[int(request["solution_str"])])
    prompts = [
        Prompt(i, np.array([1], np.int32), "mine", "4", {}, "t.parquet", i) for i in range(4)
    ]
    cfg = RewardConfig(default_score=0.0, remote=RemoteRewardConfig(endpoint.url))
    manager = RewardManager(CustomRewardFunctionConfig(), cfg)
    try:
        scores = manager.submit(prompts, ["0", "1", "2", "3"]).result()
    finally:
        manager.close()
    assert [row.failure for row in scores] == ["endpoint", "endpoint", None, "invalid"]


def test_numbers_of_an_endpoint_are_bounded_and_the_bound_is_said_once(
    endpoint: Endpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    many = {f"k{i}": i for i in range(3000)}
    endpoint.answer = lambda path, request, headers: (
        200,
        json.dumps({**many, "acc": 1, "score": 0.5, "x\n\ud800": 1}),
    )
    [found] = ask(url=endpoint.url)
    assert found["score"] == 0.5 and found["acc"] == 1 and len(found) == MOST_NAMES + 3
    names = Names()
    scores = [
        Score(0.5, extra={f"{row}_{i}": i for i in range(40)} | {"acc": 1.0}) for row in range(4)
    ]
    limited = names.limit(scores) + names.limit(scores)
    metrics = reward_metrics(["mine"] * 8, limited)
    assert (
        sum(key.startswith("reward_extra/") for key in metrics) == MOST_NAMES + 1
        and limited[0] == scores[0]
    )
    assert all(score.accuracy == 1.0 for score in limited)
    [line] = capfd.readouterr().err.splitlines()
    assert "more than 100 different names of numbers; the others, such as '2_20'" in line
    endpoint.answer = lambda path, request, headers: (
        200,
        json.dumps({"score": 1, "a\nb\ud800\x1b": 2, "c" * 5000: 3}),
    )
    [found] = ask(url=endpoint.url)
    assert set(found) == {"score", "a b\\ud800\\x1b", "c" * 80 + "... (5,000 characters)"}


INVALID = "it must begin with http:// or https://, and have a valid host and port"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("htp://h", INVALID),
        ("user:PASS@h", f"'***@h'; {INVALID}"),
        ("http://", INVALID),
        ("http://:80/x", INVALID),
        ("http://h:x", INVALID),
        ("http://u:PASS/x@h", f"'***@h'; {INVALID}"),
        ("http://h/\n", INVALID),
        ("http://[::1", INVALID),
        ("http://xn--/", INVALID),
        ("http://\u2603.b", INVALID),
        ("http://256.1.1.1", INVALID),
        ("htp://h?api_key=PASS", "'htp://h?api_key=***'"),
    ],
)
def test_malformed_url_is_found_with_the_settings(url: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        check_config(remote_config(url=url), 1)
    assert words in str(caught.value) and str(caught.value).startswith("reward.remote.url is ")
    assert "PASS" not in str(caught.value) and "PA SS" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://h",
        "HTTPS://a_b.c.:8000/v1?k=1",
        "http://[::1]:80",
        "http://ex\u00e4mple.de",
        "http://u:p@10.0.0.1/x@y",
    ],
)
def test_url_that_can_be_used(url: str) -> None:
    check_config(remote_config(url=url), 1)
    remote.RemoteReward(RemoteRewardConfig(url), 1.0)


def remote_config(**settings: Any) -> Config:
    return load_config({**yaml.safe_load(MINIMAL), "reward": {"remote": settings}})


@pytest.mark.parametrize(
    ("settings", "environment", "words"),
    [
        (
            {},
            {"JUDGE_KEY": "sk-PASS\n"},
            "the key in JUDGE_KEY has 8 characters, and character 8 is white space",
        ),
        (
            {},
            {"JUDGE_KEY": "sk-P\u00c4SS"},
            "and character 5 is white space, a line break or no ASCII",
        ),
        ({}, {"JUDGE_KEY": ""}, "the environment variable JUDGE_KEY is not set"),
        ({"api_key_env": "sk-PASS"}, {}, "must be the name of an environment variable"),
        (
            {"url": "http://u:PASS@h"},
            {"JUDGE_KEY": "k"},
            "'***@h'; with reward.remote.api_key_env it may have no user",
        ),
        (
            {},
            {"JUDGE_KEY": "k", "HTTPS_PROXY": "htp://u:PASS@x"},
            "the proxies or certificates of the environment",
        ),
        (
            {},
            {"JUDGE_KEY": "k", "SSL_CERT_FILE": "/nowhere"},
            "the proxies or certificates of the environment",
        ),
    ],
)
def test_start_finds_what_the_endpoint_cannot_use_without_printing_it(
    settings: dict[str, Any],
    environment: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cfg = remote_config(**{"url": "http://h", "api_key_env": "JUDGE_KEY", **settings})
    with pytest.raises(UserError) as caught:
        check_config(cfg, 1)
        remote.RemoteReward(cfg.reward.remote, 1.0)
    text = str(caught.value)
    assert words in text and "\n" not in text and "PASS" not in text and "P\u00c4SS" not in text


def test_user_of_the_url_is_sent_and_never_shown(endpoint: Endpoint) -> None:
    seen = []

    def answer(path: str, request: dict[str, Any], headers: Any) -> tuple[int, str]:
        seen.append((path, headers["Authorization"]))
        return 500, "no"

    endpoint.answer = answer
    url = endpoint.url.replace("//", "//me:PA%2FSS@") + "/v1?token=T0"
    [failure] = ask(url=url, api="openai", model="judge", max_retries=0)
    assert seen == [
        ("/v1/chat/completions?token=T0", f"Basic {base64.b64encode(b'me:PA/SS').decode()}")
    ]
    assert (
        failure.origin == f"reward.remote.url {endpoint.url.replace('//', '//***@')}/v1?token=***"
    )


def test_key_that_the_endpoint_repeats_is_hidden(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-PASS")
    endpoint.answer = lambda path, request, headers: (
        401,
        f"no such key: {headers['Authorization']}",
    )
    [failure] = ask(url=endpoint.url, api_key_env="JUDGE_KEY")
    assert failure.problem == "HTTP status 401: no such key: Bearer *** (1 attempts)"


def test_missing_key_is_found_before_training(endpoint: Endpoint) -> None:
    cfg = RewardConfig(remote=RemoteRewardConfig(endpoint.url, api_key_env="NO_SUCH_KEY_HERE"))
    with pytest.raises(UserError, match="environment variable NO_SUCH_KEY_HERE is not set"):
        RewardManager(CustomRewardFunctionConfig(), cfg)


def test_endpoint_beside_a_rule_in_a_worker(
    endpoint: Endpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    """Score by both; a row for which the endpoint gives no number fails alone."""
    endpoint.answer = lambda path, request, headers: (
        200,
        '"high"' if request["solution_str"] == "5" else "0.5",
    )
    prompts = [
        Prompt(i, np.array([1], np.int32), "arithmetic", "4", {}, "t.parquet", i) for i in range(3)
    ]
    mixture = {"arithmetic": {"exact_match": 1.0, "remote": 2.0}}
    cfg = RewardConfig(mixture=mixture, default_score=-1.0, remote=RemoteRewardConfig(endpoint.url))
    manager = RewardManager(CustomRewardFunctionConfig(), cfg)
    try:
        assert manager.needs_prompts
        scores = manager.submit(prompts, ["4", "5", "6"], texts=["2+2="] * 3).result()
    finally:
        manager.close()
    assert [row.score for row in scores] == [2.0, -1.0, 1.0]
    assert scores[0].parts == {"exact_match": 1.0, "remote": 1.0}
    assert [row.failure for row in scores] == [None, "invalid", None]
    assert {request["prompt"] for request in endpoint.requests} == {"2+2="}
    [line] = capfd.readouterr().err.splitlines()
    assert (
        f"reward.remote.url {endpoint.url}: t.parquet, row 1 (data_source 'arithmetic'): returned "
        "'high'"
    ) in line


def test_endpoint_that_is_down_is_named_with_file_and_row(endpoint: Endpoint) -> None:
    endpoint.close()
    manager = RewardManager(
        CustomRewardFunctionConfig(),
        RewardConfig(remote=RemoteRewardConfig(endpoint.url, max_retries=0)),
    )
    try:
        with pytest.raises(UserError) as caught:
            manager.submit(
                [Prompt(0, np.array([1], np.int32), "mine", "4", {}, "t.parquet", 7)], ["4"]
            ).result()
    finally:
        manager.close()
    for word in (
        f"reward.remote.url {endpoint.url}",
        "t.parquet, row 7",
        "ConnectError",
        "1 attempts",
    ):
        assert word in str(caught.value)
