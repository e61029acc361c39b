"""Agents in real worker processes, with openai's and httpx's clients: conversations through turns.py
without an engine, what the endpoint refuses, and hostile programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_environments import Letters, begun, played, user_file  # noqa: F401

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.data.batch import OBSERVED, Generation
from rlhf_mc.environments.environment_manager import EnvironmentManager
from rlhf_mc.environments.turns import Conversations

PROGRAM = """
import asyncio, json, os, sys
import httpx
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
    with open(os.environ["RLHF_MC_SCORE_FILE"], "w") as file:
        print(json.dumps({"score": score, "acc": 1}), file=file)
"""


@pytest.fixture
def agent(tmp_path: Path, user_file: str) -> Any:  # noqa: F811
    """Return play(body, turns, **settings): the ended conversations of an agent of this body, and
    their episodes."""

    def play(
        body: str, turns: tuple[str, ...] = ("a", "b", "c"), as_program: bool = False, **settings: Any
    ) -> tuple[dict[int, Generation], Conversations]:
        path = tmp_path / "agent.py"
        lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
        path.write_text(PROGRAM + lines + REST)
        place = {"command": [sys.executable, str(path)]} if as_program else {"path": str(path)}
        limit = settings.pop("limit", 200)
        cfg = EnvironmentConfig(name="openai", **place, **settings)
        environments, conversations = begun(cfg, limit, directory=tmp_path)
        try:
            return played(conversations, turns), conversations
        finally:
            environments.close()

    return play


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
