"""An interaction of verl's as an environment: it answers each turn as a user, until it ends the
conversation.

python examples/grpo_gsm8k.py rollout.environment.path=examples/interaction.py ...
... rollout.environment.kwargs='{class_name: my_module.MyInteraction, config: {...}}'
    (an interaction of your own)

`extra_info.interaction_kwargs` of a row are arguments of start_interaction, as in verl. `verl` is
this project's stand-in where verl is not installed.
"""

import importlib
from typing import Any

from verl.interactions.base import BaseInteraction
from verl.utils.reward_score import gsm8k

Messages = list[dict[str, str]]


class SecondChance(BaseInteraction):
    """Ask again until the answer is right."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._truths: dict[str, str] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str = "", **kwargs: Any
    ) -> str:
        name: str = await super().start_interaction(instance_id)
        self._truths[name] = ground_truth
        return name

    async def generate_response(
        self, instance_id: str, messages: Messages, **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, float]]:
        """Return whether the conversation ends, the answer, the score of the turn, and numbers."""
        score = gsm8k.compute_score(
            messages[-1]["content"], self._truths[instance_id], method="flexible"
        )
        is_right = score == 1.0
        return (
            is_right,
            "This is right." if is_right else "This is wrong. Try again.",
            score,
            {"acc": score},
        )

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self._truths[instance_id]


class Environment:
    """One conversation with an interaction."""

    def __init__(self, class_name: str | None = None, config: dict[str, Any] | None = None) -> None:
        module, _, name = (class_name or "").rpartition(".")
        kind = getattr(importlib.import_module(module), name) if class_name else SecondChance
        self._interaction = kind(config or {})
        self._messages: Messages = []
        self._instance: str | None = None

    async def reset(self, row: dict[str, Any]) -> None:
        """Start the interaction."""
        self._messages = list(row["prompt"])
        arguments = {
            "ground_truth": row["ground_truth"],
            **(row["extra_info"].get("interaction_kwargs") or {}),
        }
        self._instance = await self._interaction.start_interaction(**arguments)

    async def step(self, response: str) -> tuple[Messages, float, bool, dict[str, float]]:
        """Answer a turn."""
        self._messages.append({"role": "assistant", "content": response})
        done, text, score, numbers = await self._interaction.generate_response(
            self._instance, self._messages
        )
        answer = {"role": "user", "content": text}
        self._messages.append(answer)
        return [answer], score, done, numbers

    async def close(self) -> None:
        """End the interaction."""
        if self._instance is not None:
            await self._interaction.finalize_interaction(self._instance)
