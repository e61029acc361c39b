"""An agent loop of verl's as an environment: `run` is verl's `run()`, with a `yield` for each call
of the server.

python examples/grpo_gsm8k.py rollout.environment.path=examples/agent_loop.py ...

`verl` is this project's stand-in where verl is not installed.
"""

from collections.abc import AsyncGenerator
from typing import Any

from verl.utils.reward_score import gsm8k

Answer = tuple[list[dict[str, str]], float, bool, dict[str, float]]
"""Messages for the model, the reward of its last turn, whether the conversation ends, numbers for
the metrics."""


class Environment:
    """A conversation in which the model reviews its answer."""

    def __init__(self, num_reviews: int = 1) -> None:
        self._num_reviews = num_reviews
        self._conversation: AsyncGenerator[Answer | None, str] | None = None

    async def run(self, row: dict[str, Any]) -> AsyncGenerator[Answer | None, str]:
        """Take the model's turns one by one, and yield the answer to each. The first follows the
        row's prompt."""
        turn = yield None
        for review in range(self._num_reviews):
            has_answer = gsm8k.extract_solution(turn) is not None
            text = (
                "Check your answer, and give it again."
                if has_answer
                else "Give the answer after ####."
            )
            turn = yield (
                [{"role": "user", "content": text}],
                0.0,
                False,
                {f"answered/{review}": float(has_answer)},
            )
        score = gsm8k.compute_score(turn, row["ground_truth"])
        yield [], score, True, {"acc": score}

    async def reset(self, row: dict[str, Any]) -> None:
        """Begin the loop: up to the first turn."""
        self._conversation = self.run(row)
        await anext(self._conversation)

    async def step(self, response: str) -> Answer | None:
        """Continue the loop with a turn, up to the next one."""
        assert self._conversation is not None
        return await self._conversation.asend(response)

    async def close(self) -> None:
        """End the loop, wherever it is: its `finally` blocks run."""
        if self._conversation is not None:
            await self._conversation.aclose()
