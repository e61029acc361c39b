"""From responses to scores: the rule of each row's data_source, or the user's own function.

The boundary to the user's code: whatever it raises or returns becomes a score or one clear line.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import CustomRewardFunctionConfig
from rlhf_mc.data.batch import Prompt
from rlhf_mc.rewards import arithmetic, gsm8k
from rlhf_mc.rewards import math as math_rule
from rlhf_mc.rewards.custom import RewardFunction, describe_error, load_reward_function

RULES: dict[str, RewardFunction] = {
    "openai/gsm8k": gsm8k.compute_score,
    "arithmetic": arithmetic.compute_score,
    "lighteval/MATH": math_rule.compute_score,
    "DigitalLearningGmbH/MATH-lighteval": math_rule.compute_score,
    "HuggingFaceH4/MATH-500": math_rule.compute_score,
}
"""data_source -> the rule that scores it."""

_NUMBER = (numbers.Real, np.bool_)
"""What counts as a score; bool and NumPy's floats and integers are numbers.Real."""


class RewardManager:
    """Scores responses. Holds no state but the user's function, so every rank may have one."""

    def __init__(self, cfg: CustomRewardFunctionConfig) -> None:
        self._custom = None if cfg.path is None else load_reward_function(cfg.path, cfg.name)
        self._custom_name = f"custom_reward_function {cfg.name} of {cfg.path}"

    def check(self, prompts: Sequence[Prompt]) -> None:
        """UserError unless every prompt can be scored; called before training starts."""
        if self._custom is not None:
            return
        for prompt in prompts:
            self._rule(prompt)
            if prompt.ground_truth is None:
                raise UserError(
                    f"row {prompt.index} (data_source {prompt.data_source!r}): reward_model.ground_truth is null;"
                    " the built-in rule needs an answer to compare with"
                )

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[dict[str, float]]:
        """Per response: "score", and whatever further numbers the reward function gave by name.

        prompts[i] is the prompt of responses[i] (repeated where a prompt has several responses).
        """
        assert len(prompts) == len(responses)
        if self._custom is not None and _is_async(self._custom):
            return asyncio.run(self._score_all_async(self._custom, prompts, responses))
        return [self._score_one(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]

    def _rule(self, prompt: Prompt) -> RewardFunction:
        if prompt.data_source not in RULES:
            raise UserError(
                f"row {prompt.index}: no reward rule for data_source {prompt.data_source!r};"
                f" known: {', '.join(RULES)}; for others set custom_reward_function.path"
            )
        return RULES[prompt.data_source]

    def _score_one(self, prompt: Prompt, response: str) -> dict[str, float]:
        if self._custom is None:
            return {"score": self._rule(prompt)(**_arguments(prompt, response))}
        try:
            result = self._custom(**_arguments(prompt, response))
        except Exception as error:  # the user's code: anything may come
            raise self._error(prompt, f"raised {describe_error(error)}") from error
        return self._checked(prompt, result)

    async def _score_all_async(
        self, function: RewardFunction, prompts: Sequence[Prompt], responses: Sequence[str]
    ) -> list[dict[str, float]]:
        """All responses at once: such functions wait for a server rather than compute."""

        async def score_one(prompt: Prompt, response: str) -> dict[str, float]:
            try:
                result = await function(**_arguments(prompt, response))
            except Exception as error:  # the user's code: anything may come
                raise self._error(prompt, f"raised {describe_error(error)}") from error
            return self._checked(prompt, result)

        return await asyncio.gather(*(score_one(p, r) for p, r in zip(prompts, responses, strict=True)))

    def _checked(self, prompt: Prompt, result: Any) -> dict[str, float]:
        """The function's result as numbers. Entries that are not numbers (texts for a reader) are left out."""
        if not isinstance(result, dict):
            return {"score": self._number(prompt, "", result)}
        if "score" not in result:
            raise self._error(prompt, f"returned a dict without 'score'; its keys are {sorted(map(str, result))}")
        return {
            str(key): self._number(prompt, f"{key}: ", value)
            for key, value in result.items()
            if key == "score" or isinstance(value, _NUMBER)
        }

    def _number(self, prompt: Prompt, key: str, value: Any) -> float:
        if not isinstance(value, _NUMBER):
            raise self._error(prompt, f"returned {key}{_shorten(value)}, expected a number")
        if not math.isfinite(value):
            raise self._error(prompt, f"returned {key}{float(value)}, expected a finite number")
        return float(value)

    def _error(self, prompt: Prompt, what: str) -> UserError:
        return UserError(f"{self._custom_name}: row {prompt.index} (data_source {prompt.data_source!r}): {what}")


def _arguments(prompt: Prompt, response: str) -> dict[str, Any]:
    return {
        "data_source": prompt.data_source,
        "solution_str": response,
        "ground_truth": prompt.ground_truth,
        "extra_info": dict(prompt.extra_info),
    }


def _is_async(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _shorten(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
