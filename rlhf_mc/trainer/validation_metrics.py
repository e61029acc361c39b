"""Statistics of a validation over several responses per prompt, by data source: mean@n, best@k, worst@k, maj@k, pass@k.

The keys are verl's, and so are the numbers, to the bit: the bootstrap draws the same resamples. pass@k is added.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from rlhf_mc.runtime.console import say

CORE = "acc"
"""The number whose statistics are in val-core: a response's accuracy."""
RESAMPLES = 1000
SEED = 42
"""verl's number of bootstrap resamples, and their seed."""


@dataclass(frozen=True)
class Answer:
    """One scored response of a validation."""

    data_source: str
    prompt: int
    """Identifies the prompt within its data source."""
    numbers: Mapping[str, float]
    """CORE, "reward" (the score), and what else the reward function returned. A number counts for a prompt all of whose
    responses have it."""
    vote: str | None = None
    """The answer that maj@k counts; None: the reward function names none."""


def validation_metrics(answers: Sequence[Answer]) -> dict[str, float]:
    """Return {val-core|val-aux/<data_source>/<number>/<statistic>: value}, each statistic the mean over prompts.

    With n responses to each prompt, and k = 2, 4, 8, ..., n:
    - mean@n; std@n, the population's deviation among the n responses;
    - best@k/mean, worst@k/mean: the expected maximum and minimum of k responses drawn with replacement; best@k/std,
      worst@k/std: the deviation over the draws;
    - maj@k/mean, maj@k/std: the same of the number of the most frequent vote (the first of equally frequent ones);
    - pass@k, where the number is 0 or 1 for all responses of the data source: the probability that one of k responses
      drawn without replacement is 1, 1 - C(n - c, k) / C(n, k) with c ones (arXiv 2107.03374, equation 1).

    val-core has mean@n, best@n and maj@n of CORE; the rest is val-aux.
    """
    prompts: dict[tuple[str, int], list[Answer]] = defaultdict(list)
    for answer in answers:
        prompts[answer.data_source, answer.prompt].append(answer)
    values: dict[str, list[float]] = defaultdict(list)
    graded = {(one.data_source, name) for one in answers for name, value in one.numbers.items() if value not in (0, 1)}
    for (source, _), responses in prompts.items():
        # A response that could not be scored has fewer numbers.
        for name in set(responses[0].numbers).intersection(*(response.numbers for response in responses)):
            for statistic, value in _statistics(responses, name, (source, name) not in graded).items():
                is_core = name == CORE and statistic.partition("/")[0] in _core(len(responses))
                section = "val-core" if is_core else "val-aux"
                values[f"{section}/{source}/{name}/{statistic}"].append(value)
        if len(responses) > 1 and (source, CORE) in graded:
            _say_no_pass(source)
    return {key: float(np.mean(found)) for key, found in sorted(values.items())}


@cache
def _say_no_pass(source: str) -> None:
    """Say, once for each data source, that it has no pass@k."""
    say(
        f"val-aux/{source}/{CORE}/pass@k is left out: the accuracy of some responses is neither 0 nor 1; best@k is the"
        " expected best of k",
        rank_0_only=True,
    )


def _core(n: int) -> tuple[str, ...]:
    return (f"mean@{n}", f"best@{n}", f"maj@{n}")


def _statistics(responses: Sequence[Answer], name: str, is_binary: bool) -> dict[str, float]:
    """Return the statistics of one number over the responses to one prompt. is_binary: it is 0 or 1 for all prompts."""
    numbers = np.array([response.numbers[name] for response in responses], dtype=np.float64)
    n = len(numbers)
    found = {f"mean@{n}": float(np.mean(numbers))}
    if n == 1:
        return found
    found[f"std@{n}"] = float(np.std(numbers))
    votes = [response.vote for response in responses]
    for k in _sizes(n):
        draws = _draws(n, k)
        drawn = numbers[draws]
        resampled = {"best": drawn.max(axis=1), "worst": drawn.min(axis=1)}
        if None not in votes:
            resampled["maj"] = numbers[_majority(_codes(votes)[draws], draws)]
        for statistic, sample in resampled.items():
            found[f"{statistic}@{k}/mean"] = float(np.mean(sample))
            found[f"{statistic}@{k}/std"] = float(np.std(sample))
        if is_binary:
            found[f"pass@{k}"] = 1.0 - math.comb(n - int(numbers.sum()), k) / math.comb(n, k)
    return found


def _sizes(n: int) -> list[int]:
    """Return 2, 4, 8, ... below n, and n."""
    return [*(2**i for i in range(1, n.bit_length()) if 2**i < n), n]


@lru_cache
def _draws(n: int, k: int) -> np.ndarray:
    """Return [RESAMPLES, k] indices below n, drawn with replacement; those that verl draws one resample at a time."""
    return np.random.RandomState(SEED).choice(n, size=(RESAMPLES, k), replace=True)


def _codes(votes: Sequence[str | None]) -> np.ndarray:
    """Return [n] a number for each vote, the same for equal votes."""
    numbers = {vote: i for i, vote in enumerate(dict.fromkeys(votes))}
    return np.array([numbers[vote] for vote in votes])


def _majority(votes: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return [RESAMPLES] the response that stands for each resample: the first with its most frequent vote. Of equally
    frequent votes the one drawn first counts. votes, draws: [RESAMPLES, k]."""
    counts = (votes[:, :, None] == votes[:, None, :]).sum(axis=2)
    first = counts.argmax(axis=1)  # the first of the largest counts
    return draws[np.arange(len(draws)), first]
