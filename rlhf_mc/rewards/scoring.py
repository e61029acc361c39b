"""Scores of rows, by the rule of each row's data_source or by the user's own function. Neither torch nor numpy is
imported, so that a worker process (worker.py) starts fast.

This is the boundary to the user's code: its result becomes a score, its exception a UserError of one line.
"""

from __future__ import annotations

import asyncio
import inspect
import numbers
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import CustomRewardFunctionConfig
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

MAX_FLOAT32 = 3.4028234663852886e38
"""Scores become float32 tensors."""


@dataclass(frozen=True)
class Row:
    """One response, with the arguments of its reward function."""

    index: int
    """Row of the dataset, for messages."""
    data_source: str
    response: str
    ground_truth: Any
    extra_info: dict[str, Any]

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of a RewardFunction."""
        return {
            "data_source": self.data_source,
            "solution_str": self.response,
            "ground_truth": self.ground_truth,
            "extra_info": dict(self.extra_info),
        }


Done = Callable[[int, dict[str, float]], None]
"""Callback for each scored row, with its index among the given rows and its scores."""


def name_of(cfg: CustomRewardFunctionConfig) -> str:
    """Return the name of the rule or function, for messages."""
    return "reward rule" if cfg.path is None else f"custom_reward_function {cfg.name} of {cfg.path}"


def row_error(cfg: CustomRewardFunctionConfig, row: Row, problem: str) -> UserError:
    """Return the error for a row that could not be scored."""
    return UserError(f"{name_of(cfg)}: row {row.index} (data_source {row.data_source!r}): {problem}")


class Scorer:
    """Scores rows in this process. Its only state is the user's function."""

    def __init__(self, cfg: CustomRewardFunctionConfig) -> None:
        self._cfg = cfg
        self._custom = None if cfg.path is None else load_reward_function(cfg.path, cfg.name)

    def score(self, rows: Sequence[Row], done: Done) -> None:
        """Call `done` for each row with its "score" and the further numbers that the reward function returned by
        name."""
        if self._custom is not None and _is_async(self._custom):
            asyncio.run(self._score_all_async(self._custom, rows, done))
            return
        for i, row in enumerate(rows):
            done(i, self._score_one(row))

    def _score_one(self, row: Row) -> dict[str, float]:
        if self._custom is None:
            return {"score": RULES[row.data_source](**row.arguments())}
        try:
            result = self._custom(**row.arguments())
        except BaseException as error:  # the user's code may raise anything, SystemExit included
            raise self._error(row, f"raised {describe_error(error)}") from error
        return self._checked(row, result)

    async def _score_all_async(self, function: RewardFunction, rows: Sequence[Row], done: Done) -> None:
        """Score all rows concurrently: such functions wait for a server rather than compute."""

        async def score_one(i: int, row: Row) -> None:
            try:
                result = await function(**row.arguments())
            except BaseException as error:  # as in _score_one
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise  # another row has failed
                raise self._error(row, f"raised {describe_error(error)}") from error
            done(i, self._checked(row, result))

        await asyncio.gather(*(score_one(i, row) for i, row in enumerate(rows)))

    def _checked(self, row: Row, result: Any) -> dict[str, float]:
        """Return the function's result as numbers, without the entries that are not numbers (texts for a reader)."""
        if not isinstance(result, dict):
            return {"score": self._number(row, "", result)}
        if "score" not in result:
            raise self._error(row, f"returned a dict without 'score'; its keys are {sorted(map(str, result))}")
        return {
            str(key): self._number(row, f"{key}: ", value)
            for key, value in result.items()
            if key == "score" or _is_number(value)
        }

    def _number(self, row: Row, key: str, value: Any) -> float:
        if not _is_number(value):
            raise self._error(row, f"returned {key}{_shorten(value)}, expected a number")
        try:
            number = float(value)
        except (OverflowError, ValueError) as error:
            raise self._error(row, f"returned {key}{_shorten(value)}, expected a number: {error}") from error
        if not abs(number) <= MAX_FLOAT32:
            raise self._error(row, f"returned {key}{number}, expected a finite number (of 32 bits)")
        return number

    def _error(self, row: Row, problem: str) -> UserError:
        return row_error(self._cfg, row, problem)


def _is_number(value: Any) -> bool:
    """Return whether the value is a number or a bool. NumPy's bool, unlike its other numbers, is no numbers.Real."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, numbers.Real) or (numpy is not None and isinstance(value, numpy.bool_))


def _is_async(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _shorten(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
