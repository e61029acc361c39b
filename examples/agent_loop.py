"""An agent loop of verl's as an agent: `run` is verl's `run()`, with a call of a client in place of
each of the server's.

python examples/grpo_gsm8k.py rollout.environment.name=openai \\
    rollout.environment.path=examples/agent_loop.py ...

`verl` is this project's stand-in where verl is not installed.
"""

from typing import Any

from openai import AsyncOpenAI
from verl.utils.reward_score import gsm8k


async def run(
    task: dict[str, Any], client_settings: dict[str, str], num_reviews: int = 1
) -> dict[str, float]:
    """Let the model answer, and review its answer. Return the score, and numbers for the
    metrics."""
    settings = dict(client_settings)
    model = settings.pop("model")
    messages: list[Any] = [*task["prompt"]]  # verl's raw_prompt
    numbers = {}
    async with AsyncOpenAI(**settings) as client:
        for review in range(num_reviews + 1):
            answer = await client.chat.completions.create(model=model, messages=messages)
            turn = answer.choices[0].message
            if review == num_reviews:
                break
            has_answer = gsm8k.extract_solution(turn.content or "") is not None
            numbers[f"answered/{review}"] = float(has_answer)
            text = (
                "Check your answer, and give it again."
                if has_answer
                else "Give the answer after ####."
            )
            messages += [turn, {"role": "user", "content": text}]
    score = gsm8k.compute_score(turn.content or "", task["ground_truth"])
    return {"score": score, "acc": score, **numbers}
