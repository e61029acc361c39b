"""The game of guess_number.py as an agent: a program written with the openai package, which knows
nothing of this trainer, plays one game and returns its score.

python tools/make_guessing_game.py --output runs/guessing  (once: it makes model and prompts)
torchrun --standalone --nproc-per-node 2 -m rlhf_mc configs/quickstart_agent.yaml

As a program of its own it takes the row from its standard input, and posts its score:
... rollout.environment.path=null rollout.environment.command='[python, examples/guess_agent.py]'
"""

import asyncio
import json
import os
import sys
from functools import cache
from typing import Any

import httpx
from openai import AsyncOpenAI

FEWEST = 1
MOST = 15


@cache
def client() -> AsyncOpenAI:
    """Return the connections that all games of a process share."""
    return AsyncOpenAI(base_url="http://localhost", api_key="none", max_retries=0)


async def run(
    task: dict[str, Any], client_settings: dict[str, str], num_guesses: int = 4
) -> dict[str, float]:
    """Play a game about the row's number. Return 1 for the number, and numbers for the metrics."""
    settings = {name: client_settings[name] for name in ("base_url", "api_key")}
    model = client().with_options(**settings)
    secret = int(task["ground_truth"])
    messages: list[Any] = [*task["prompt"]]
    for left in reversed(range(num_guesses)):
        completion = await model.chat.completions.create(
            model=client_settings["model"], messages=messages
        )
        text = completion.choices[0].message.content or ""
        is_number = text.strip().isdecimal()
        guess = int(text) if is_number else 0
        if guess == secret:
            return {"score": 1.0, "guesses_left": left}
        hint = "higher" if guess < secret else "lower"
        content = hint if is_number else f"a number from {FEWEST} to {MOST}"
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": content},
        ]
    return {"score": 0.0, "guesses_left": 0}


if __name__ == "__main__":
    variables = {
        "base_url": "OPENAI_BASE_URL",
        "api_key": "OPENAI_API_KEY",
        "model": "OPENAI_MODEL",
    }
    settings = {name: os.environ[variable] for name, variable in variables.items()}
    row = json.load(sys.stdin)  # noqa: TID251 (an agent imports nothing of the trainer)
    score = asyncio.run(run(row, settings))
    headers = {"Authorization": f"Bearer {settings['api_key']}"}
    httpx.post(f"{settings['base_url']}/score", json=score, headers=headers).raise_for_status()
