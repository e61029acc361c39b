"""Scores by an HTTP endpoint, against a server on this machine: both APIs, repetitions, time limits, bad answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.reward_schema import CustomRewardFunctionConfig, RemoteRewardConfig, RewardConfig
from rlhf_mc.data.batch import Prompt
from rlhf_mc.rewards import remote
from rlhf_mc.rewards.manager import RewardManager
from rlhf_mc.rewards.results import Row, RowFailure

Answer = Callable[[str, dict[str, Any], Any], tuple[int, str]]


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a client that does not wait for its answer closes the connection."""


class Endpoint:
    """A server whose answers a test chooses: answer(path, request, headers) returns the status and the body."""

    def __init__(self) -> None:
        self.answer: Answer = lambda path, request, headers: (200, "1.0")
        self.requests: list[dict[str, Any]] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.requests.append(request)
                status, body = endpoint.answer(self.path, request, self.headers)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

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
        Row(f"row {i}", "mine", str(i), "4", {"level": i}, {"remote": 1.0}, "2+2={response}?") for i in range(num_rows)
    ]
    answered: list[None] = []
    asked = remote.RemoteReward(RemoteRewardConfig(**settings), limit)
    results = asyncio.run(asked.score(rows, lambda: answered.append(None)))
    assert len(answered) == num_rows
    return results


def test_http_endpoint_gets_the_arguments_of_a_reward_function(endpoint: Endpoint) -> None:
    endpoint.answer = lambda path, request, headers: (200, json.dumps({"score": float(request["solution_str"])}))
    assert ask(num_rows=3, url=f"{endpoint.url}/score") == [{"score": 0.0}, {"score": 1.0}, {"score": 2.0}]
    assert {"prompt", "data_source", "solution_str", "ground_truth", "extra_info"} == endpoint.requests[0].keys()
    assert sorted(request["extra_info"]["level"] for request in endpoint.requests) == [0, 1, 2]


def test_openai_endpoint_judges_by_the_template(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    seen = []

    def answer(path: str, request: dict[str, Any], headers: Any) -> tuple[int, str]:
        seen.append((path, request["model"], request["messages"], headers["Authorization"]))
        return 200, json.dumps({"choices": [{"message": {"content": "Of 10 points: 0.75."}}]})

    endpoint.answer = answer
    template = "{prompt} {response} of {ground_truth} {other}"
    settings = {"api": "openai", "model": "judge", "template": template, "api_key_env": "JUDGE_KEY"}
    assert ask(url=f"{endpoint.url}/v1/", **settings) == [0.75]
    message = {"role": "user", "content": "2+2={response}? 0 of 4 {other}"}
    assert seen == [("/v1/chat/completions", "judge", [message], "Bearer secret")]


def test_overloaded_endpoint_is_asked_again(endpoint: Endpoint) -> None:
    endpoint.answer = lambda path, request, headers: (503, "busy") if len(endpoint.requests) < 3 else (200, "0.5")
    assert ask(url=endpoint.url, max_retries=2) == [0.5]
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
        (503, "busy", {"max_retries": 1}, "HTTP status 503: busy (2 attempts)"),
        (404, "no such page", {}, "HTTP status 404: no such page (1 attempts)"),
        (200, "<html>", {}, "the answer is not JSON"),
        (200, "[1]", {"api": "openai"}, "the answer [1] is no chat completion"),
        (200, '{"choices": [{"message": {"content": "good"}}]}', {"api": "openai"}, "the reply good has no number"),
    ],
)
def test_answer_without_a_score(
    endpoint: Endpoint, status: int, body: str, settings: dict[str, Any], words: str
) -> None:
    endpoint.answer = lambda path, request, headers: (status, body)
    [failure] = ask(url=endpoint.url, **settings)
    assert isinstance(failure, RowFailure) and failure.failure.kind == "endpoint"
    assert words in failure.failure.problem and failure.failure.origin == f"reward.remote.url {endpoint.url}"


def test_slow_endpoint_is_limited_by_request_and_by_response(endpoint: Endpoint) -> None:
    may_answer = threading.Event()
    endpoint.answer = lambda path, request, headers: (may_answer.wait(), (200, "1"))[1]
    [failure] = ask(url=endpoint.url, timeout_seconds=0.05, max_retries=1)
    assert "Timeout" in str(failure) and "(2 attempts)" in str(failure)  # of connecting, on a busy machine
    [failure] = ask(url=endpoint.url, limit=0.1)
    may_answer.set()
    assert "no score after 0.1 s (reward.timeout_seconds)" in str(failure)


def test_missing_key_is_found_before_training(endpoint: Endpoint) -> None:
    cfg = RewardConfig(remote=RemoteRewardConfig(endpoint.url, api_key_env="NO_SUCH_KEY_HERE"))
    with pytest.raises(UserError, match="environment variable NO_SUCH_KEY_HERE is not set"):
        RewardManager(CustomRewardFunctionConfig(), cfg)


def test_endpoint_beside_a_rule_in_a_worker(endpoint: Endpoint, capfd: pytest.CaptureFixture[str]) -> None:
    """Score by both; a row for which the endpoint gives no number fails alone."""
    endpoint.answer = lambda path, request, headers: (200, '"high"' if request["solution_str"] == "5" else "0.5")
    prompts = [Prompt(i, [1], "", "arithmetic", "4", {}, "t.parquet", i) for i in range(3)]
    mixture = {"arithmetic": {"exact_match": 1.0, "remote": 2.0}}
    cfg = RewardConfig(
        mixture=mixture, on_error="default_score", default_score=-1.0, remote=RemoteRewardConfig(endpoint.url)
    )
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
    assert f"reward.remote.url {endpoint.url}: t.parquet, row 1 (data_source 'arithmetic'): returned 'high'" in line


def test_endpoint_that_is_down_is_named_with_file_and_row(endpoint: Endpoint) -> None:
    endpoint.close()
    manager = RewardManager(
        CustomRewardFunctionConfig(), RewardConfig(remote=RemoteRewardConfig(endpoint.url, max_retries=0))
    )
    try:
        with pytest.raises(UserError) as caught:
            manager.submit([Prompt(0, [1], "", "mine", "4", {}, "t.parquet", 7)], ["4"]).result()
    finally:
        manager.close()
    for word in (f"reward.remote.url {endpoint.url}", "t.parquet, row 7", "ConnectError", "1 attempts"):
        assert word in str(caught.value)
