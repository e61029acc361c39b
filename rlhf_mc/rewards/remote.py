"""Scores by an HTTP endpoint: a service that returns a score, or a language model behind an
OpenAI-style API.

The endpoint may be broken, or hostile: time, bytes and depth of an answer are limited, and its
texts are cut.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_mc import json_files
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.masking import HIDDEN, masked, one_line
from rlhf_mc.config.reward_schema import RemoteRewardConfig
from rlhf_mc.rewards.results import REMOTE, Failure, RewardRow
from rlhf_mc.rewards.returned import checked
from rlhf_mc.runtime.user_function import describe_error

if TYPE_CHECKING:
    import httpx

MOST_BYTES = 4 << 20
"""Size of an answer: far more than the longest reply of a language model."""
_SHOWN = 160
"""Characters of an answer in a message."""
FIRST_WAIT_SECONDS = 0.5
"""Time before the first repetition of a request; it doubles for each further one."""
_LONGEST_WAIT_SECONDS = 30.0
_REPEATED = (None, 408, 409, 425, 429, 500, 502, 503, 504)
"""HTTP statuses after which a request is repeated. None: there was no answer."""
_PLACEHOLDER = re.compile(r"\{(prompt|response|ground_truth)\}")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class RemoteReward:
    """Scores rows by requests to reward.remote.url."""

    def __init__(self, cfg: RemoteRewardConfig, limit_seconds: float) -> None:
        """limit_seconds: time limit of a row, over all repetitions of its request. Raise UserError
        if the environment's key, proxies or certificates cannot be used. config/algorithm_checks.py
        has checked the settings."""
        import httpx  # only runs with an endpoint need it

        self._cfg = cfg
        self._limit = limit_seconds
        self.name = f"reward.remote.url {masked(str(cfg.url))}"
        """The endpoint, for messages."""
        self._key = None if cfg.api_key_env is None else _read_key(cfg.api_key_env)
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._key is not None:
            self._headers["Authorization"] = f"Bearer {self._key}"
        base, mark, query = str(cfg.url).partition("?")
        url = httpx.URL(
            base if cfg.api == "http" else f"{base.rstrip('/')}/chat/completions"
        ).copy_with(userinfo=b"")
        self._url = f"{url}{mark}{query}"
        given = httpx.URL(base)
        self._login = httpx.BasicAuth(given.username, given.password) if given.userinfo else None
        try:
            self._client()
        except (ValueError, OSError, ImportError, httpx.InvalidURL) as error:
            what = "HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY, SSL_CERT_FILE, SSL_CERT_DIR"
            raise UserError(
                f"{self.name}: the proxies or certificates of the environment ({what}) cannot be "
                f"used: {one_line(str(error), _SHOWN)}"
            ) from None

    def _client(self) -> httpx.AsyncClient:
        import httpx

        # The time is limited by _attempt: httpx limits the time between two pieces of an answer.
        return httpx.AsyncClient(
            timeout=None,
            limits=httpx.Limits(max_connections=None),
            headers=self._headers,
            auth=self._login,
        )

    async def score(
        self, rows: Sequence[RewardRow], answered: Callable[[], None]
    ) -> list[dict[str, float] | Failure]:
        """Return for each row the endpoint's numbers with "score", or a Failure. Call `answered`
        after each. At most max_concurrency requests are under way."""
        slots = asyncio.Semaphore(self._cfg.max_concurrency)

        async def score_one(row: RewardRow) -> dict[str, float] | Failure:
            async with slots:
                try:
                    async with asyncio.timeout(self._limit):
                        return await self._score_one(client, row)
                except Failure as failure:
                    return Failure(failure.kind, self._without_key(failure.problem), self.name)
                except TimeoutError:
                    problem = f"no score after {self._limit:g} s (reward.timeout_seconds)"
                    return Failure("endpoint", problem, self.name)
                except Exception as error:
                    # the endpoint chooses the answer: a library may raise anything
                    problem = self._without_key(f"raised {describe_error(error)}")
                    return Failure("endpoint", problem, self.name)
                finally:
                    answered()

        async with self._client() as client:
            return await asyncio.gather(*map(score_one, rows))

    async def _score_one(self, client: httpx.AsyncClient, row: RewardRow) -> dict[str, float]:
        body = await self._post(client, json.dumps(self._request(row), default=str))
        try:
            return self._numbers(json_files.parse(body))
        except ValueError as error:
            raise _failure(f"the answer is not JSON: {one_line(str(error), _SHOWN)}") from None

    def _numbers(self, answer: Any) -> dict[str, float]:
        """Return the numbers of an answer."""
        if self._cfg.api == "http":
            return checked(answer)
        try:
            reply = str(answer["choices"][0]["message"]["content"])
        except (LookupError, TypeError):
            raise _failure(
                f"the answer {one_line(repr(answer), _SHOWN)} is no chat completion"
            ) from None
        numbers = _NUMBER.findall(reply)
        if not numbers:
            raise _failure(f"the reply {one_line(reply, _SHOWN)} has no number")
        return checked(float(numbers[-1]))

    def _request(self, row: RewardRow) -> dict[str, Any]:
        if self._cfg.api == "http":
            return {"prompt": row.prompt, **row.arguments(REMOTE)}
        texts = {
            "prompt": row.prompt,
            "response": row.response,
            "ground_truth": str(row.ground_truth),
        }
        question = _PLACEHOLDER.sub(lambda match: texts[match[1]], self._cfg.template)
        return {
            "model": self._cfg.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0.0,
        }

    async def _post(self, client: httpx.AsyncClient, body: str) -> bytes:
        """Return the endpoint's answer. Raise Failure if it has none after max_retries
        repetitions."""
        wait = FIRST_WAIT_SECONDS
        for attempt in range(self._cfg.max_retries + 1):
            status, text = await self._attempt(client, body)
            if status is not None and 200 <= status < 300:
                return text
            problem = one_line(text.decode(errors="replace"), _SHOWN)
            problem = problem if status is None else f"HTTP status {status}: {problem}"
            if status not in _REPEATED or attempt == self._cfg.max_retries:
                raise _failure(f"{problem} ({attempt + 1} attempts)")
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, client: httpx.AsyncClient, body: str) -> tuple[int | None, bytes]:
        """Return status and body of the answer to one request; None and the problem if there is no
        answer in time. Raise Failure if the answer is too large."""
        import httpx

        seconds = self._cfg.timeout_seconds
        try:
            async with (
                asyncio.timeout(seconds),
                client.stream("POST", self._url, content=body) as answer,
            ):
                return answer.status_code, await _read_body(answer)
        except TimeoutError:
            return (
                None,
                f"no complete answer after {seconds:g} s (reward.remote.timeout_seconds)".encode(),
            )
        except (httpx.HTTPError, OSError) as error:
            return None, f"{type(error).__name__} {error}".encode()

    def _without_key(self, problem: str) -> str:
        """Return the problem without the key, which an endpoint may repeat in its answer."""
        return problem if self._key is None else problem.replace(self._key, HIDDEN)


def _read_key(variable: str) -> str:
    """Return the key in an environment variable. Raise UserError if there is none, or none that a
    header may have."""
    key = os.environ.get(variable)
    if not key:
        raise UserError(
            f"reward.remote.api_key_env: the environment variable {variable} is not set"
        )
    wrong = [i for i, c in enumerate(key) if not "!" <= c <= "~"]
    if wrong:
        raise UserError(
            f"reward.remote.api_key_env: the key in {variable} has {len(key)} characters, and "
            f"character {wrong[0] + 1} is white space, a line break or no ASCII, which no key may "
            "have"
        )
    return key


async def _read_body(answer: httpx.Response) -> bytes:
    """Return the body of an answer. Raise Failure if it is compressed, which no request allows, or
    larger than MOST_BYTES."""
    encoding = answer.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding != "identity":
        raise _failure(f"the answer has the Content-Encoding {one_line(encoding, _SHOWN)}")
    body = bytearray()
    async for piece in answer.aiter_raw():
        body += piece
        if len(body) > MOST_BYTES:
            raise _failure(f"the answer has more than {MOST_BYTES >> 20} MiB")
    return bytes(body)


def _failure(problem: str) -> Failure:
    return Failure("endpoint", problem)
