"""Scores by an HTTP endpoint: a service that returns a score, or a language model behind an OpenAI-style API."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.reward_schema import RemoteRewardConfig
from rlhf_mc.rewards.results import Row, RowFailure

if TYPE_CHECKING:
    import httpx

FIRST_WAIT_SECONDS = 0.5
"""Time before the first repetition of a request; it doubles for each further one."""
_LONGEST_WAIT_SECONDS = 30.0
_REPEATED = (408, 409, 425, 429, 500, 502, 503, 504)
"""HTTP statuses after which a request is repeated."""
_PLACEHOLDER = re.compile(r"\{(prompt|response|ground_truth)\}")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class RemoteReward:
    """Scores rows by requests to reward.remote.url."""

    def __init__(self, cfg: RemoteRewardConfig, limit_seconds: float) -> None:
        """limit_seconds: time limit of a row, over all repetitions of its request. Raise UserError if the environment
        variable of the key is not set."""
        self._cfg = cfg
        self._limit = limit_seconds
        self._headers = {"Content-Type": "application/json"}
        self.name = f"reward.remote.url {cfg.url}"
        """The endpoint, for messages."""
        if cfg.api_key_env is not None:
            if not (key := os.environ.get(cfg.api_key_env)):
                raise UserError(f"reward.remote.api_key_env: the environment variable {cfg.api_key_env} is not set")
            self._headers["Authorization"] = f"Bearer {key}"

    async def score(self, rows: Sequence[Row], answered: Callable[[], None]) -> list[Any]:
        """Return for each row what the endpoint answered (a number, or a dict with "score"), or a RowFailure. Call
        `answered` after each. At most max_concurrency requests are under way."""
        import httpx  # only runs with an endpoint need it

        places = asyncio.Semaphore(self._cfg.max_concurrency)

        async def score_one(row: Row) -> Any:
            async with places:
                try:
                    async with asyncio.timeout(self._limit):
                        return await self._score_one(client, row)
                except RowFailure as failure:
                    return failure
                except TimeoutError:
                    return self._failure(f"no score after {self._limit:g} s (reward.timeout_seconds)")
                finally:
                    answered()

        timeout = self._cfg.timeout_seconds
        async with httpx.AsyncClient(timeout=timeout, limits=httpx.Limits(max_connections=None)) as client:
            return await asyncio.gather(*map(score_one, rows))

    async def _score_one(self, client: httpx.AsyncClient, row: Row) -> Any:
        answer = await self._post(client, json.dumps(self._request(row), default=str))
        if self._cfg.api == "http":
            return answer
        try:
            reply = str(answer["choices"][0]["message"]["content"])
        except (LookupError, TypeError):
            raise self._failure(f"the answer {_shortened(answer)} is no chat completion") from None
        numbers = _NUMBER.findall(reply)
        if not numbers:
            raise self._failure(f"the reply {_shortened(reply)} has no number")
        return float(numbers[-1])

    def _request(self, row: Row) -> dict[str, Any]:
        if self._cfg.api == "http":
            return {"prompt": row.prompt, **row.arguments()}
        texts = {"prompt": row.prompt, "response": row.response, "ground_truth": str(row.ground_truth)}
        question = _PLACEHOLDER.sub(lambda match: texts[match[1]], self._cfg.template)
        return {
            "model": self._cfg.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0.0,
        }

    async def _post(self, client: httpx.AsyncClient, body: str) -> Any:
        """Return the JSON of the endpoint's answer. Raise RowFailure if it has none after max_retries repetitions."""
        import httpx

        url = str(self._cfg.url)
        if self._cfg.api == "openai":
            url = f"{url.rstrip('/')}/chat/completions"
        wait = FIRST_WAIT_SECONDS
        for attempt in range(self._cfg.max_retries + 1):
            try:
                answer = await client.post(url, content=body, headers=self._headers)
                if answer.is_success:
                    return answer.json()
                problem = f"HTTP status {answer.status_code}: {_shortened(answer.text)}"
                is_final = answer.status_code not in _REPEATED
            except ValueError as error:
                raise self._failure(f"the answer is not JSON: {_shortened(str(error))}") from error
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__} {_shortened(str(error))}"
                is_final = False
            if is_final or attempt == self._cfg.max_retries:
                raise self._failure(f"{problem} ({attempt + 1} attempts)")
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
        raise AssertionError("the last attempt returns or raises")

    def _failure(self, problem: str) -> RowFailure:
        return RowFailure("endpoint", problem, self.name)


def _shortened(value: Any) -> str:
    text = " ".join((value if isinstance(value, str) else repr(value)).split())
    return text if len(text) <= 120 else f"{text[:117]}..."
