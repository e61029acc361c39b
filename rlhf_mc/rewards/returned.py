"""The numbers that reward functions and endpoints return: checked, and bounded in their count and
names. Neither torch nor numpy is imported.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from rlhf_mc.config.masking import one_line
from rlhf_mc.rewards.results import Failure, Score
from rlhf_mc.runtime.console import print_line

MAX_FLOAT32 = 3.4028234663852886e38
"""Scores become float32 tensors."""
MOST_NAMES = 100
"""Names of further numbers in a run: each becomes a metric of each data source."""
_MOST_CHARACTERS = 120
"""Length of a name, and of a value in a message."""
_SCORE_KEYS = ("score", "acc")
"""Numbers that are the score and the accuracy."""


class Names:
    """The names of the further numbers in a run: the first MOST_NAMES, and "acc". Ranks that see
    the same scores have the same."""

    def __init__(self) -> None:
        self._known = {"acc"}
        self._is_full = False

    def limit(self, scores: Sequence[Score]) -> list[Score]:
        """Return the scores without the numbers of further names. The first time, warn on rank
        0."""
        return [self._limited(score) for score in scores]

    def _limited(self, score: Score) -> Score:
        new = [name for name in score.extra if name not in self._known]
        room = MOST_NAMES + 1 - len(self._known)
        self._known.update(new[:room])
        if len(new) <= room:
            return score
        if not self._is_full:
            self._is_full = True
            print_line(
                f"warning: the reward functions have returned more than {MOST_NAMES} different "
                f"names of numbers; the others, such as {new[room]!r}, are dropped from the "
                "metrics",
                rank_0_only=True,
            )
        return replace(
            score, extra={name: value for name, value in score.extra.items() if name in self._known}
        )


def checked(result: Any) -> dict[str, float]:
    """Return a function's result as numbers, without the entries that are not numbers (texts for a
    reader), and without those beyond MOST_NAMES + 1: with one too many, Names.limit says that there
    are too many."""
    if not isinstance(result, dict):
        return {"score": _finite_number("", result)}
    if "score" not in result:
        keys = one_line(str(sorted(map(str, result))), _MOST_CHARACTERS)
        raise Failure("invalid", f"returned a dict without 'score'; its keys are {keys}")
    first = sorted(result, key=lambda key: key not in _SCORE_KEYS)
    numeric = [key for key in first if key == "score" or _is_number(result[key])][
        : MOST_NAMES + 1 + len(_SCORE_KEYS)
    ]
    names = [one_line(str(key), _MOST_CHARACTERS) for key in numeric]
    checked_numbers: dict[str, float] = {}
    for name, key in zip(names, numeric, strict=True):
        # "score " is not the score
        checked_numbers.setdefault(name, _finite_number(f"{name}: ", result[key]))
    return checked_numbers


def _finite_number(key: str, value: Any) -> float:
    if not _is_number(value):
        refuse(key, value, "expected a number")
    try:
        number = float(value)
    except (OverflowError, ValueError) as error:
        refuse(key, value, f"expected a number: {error}")
    if not abs(number) <= MAX_FLOAT32:
        raise Failure("invalid", f"returned {key}{number}, expected a finite number (of 32 bits)")
    return number


def refuse(key: str, value: Any, expected: str) -> NoReturn:
    raise Failure("invalid", f"returned {key}{one_line(repr(value), _MOST_CHARACTERS)}, {expected}")


def _is_number(value: Any) -> bool:
    """Return whether the value is a number or a bool. NumPy's bool, unlike its other numbers, is no
    numbers.Real."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, numbers.Real) or (numpy is not None and isinstance(value, numpy.bool_))
