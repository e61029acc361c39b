"""Validation: responses to the validation prompts, their scores, metrics, samples."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

from rlhf_mc.config.errors import UserError
from rlhf_mc.data.batch import Prompt, Responses
from rlhf_mc.rewards.manager import GroupScores, ScoreStream
from rlhf_mc.rewards.results import Score, turn_counts
from rlhf_mc.rollout.base import Sampling
from rlhf_mc.run_directory import ownership
from rlhf_mc.run_files import GENERATIONS
from rlhf_mc.runtime.console import print_line
from rlhf_mc.trainer.pool.generate import (
    VALIDATION,
    CallPlan,
    EngineCall,
    new_groups,
    repeat_prompts,
    sampling_seeds,
    update_weights,
)
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.samples import keep_samples
from rlhf_mc.trainer.step_state import StepState

CORE = "acc"
"""The number whose statistics are in val-core: a response's accuracy."""
RESAMPLES = 1000
SEED = 42
"""verl's number of bootstrap resamples, and their seed."""


@dataclass(frozen=True)
class Validation:
    """The responses of a validation and their scores, the same on every rank."""

    prompts: list[Prompt]
    """The prompt of each response."""
    generations: Responses
    scores: list[Score]

    @property
    def accuracy(self) -> float:
        """The mean accuracy over all responses."""
        return sum(score.accuracy for score in self.scores) / len(self.scores)

    def metrics(self) -> dict[str, float]:
        """Return validation_metrics, the turns of conversations, and
        val-aux/<data_source>/num_failed for data sources of which a response could not be
        scored."""
        answers = [
            Answer(
                prompt.data_source,
                prompt.index,
                {**score.extra, CORE: score.accuracy, "reward": score.score},
                score.pred,
            )
            for prompt, score in zip(self.prompts, self.scores, strict=True)
        ]
        rows = zip(self.prompts, self.scores, strict=True)
        failed = Counter(prompt.data_source for prompt, score in rows if score.failure is not None)
        turns = turn_counts([score.episode for score in self.scores if score.episode is not None])
        return {
            **validation_metrics(answers),
            **{f"val-aux/{name}": value for name, value in turns.items()},
            **{f"val-aux/{source}/num_failed": count for source, count in sorted(failed.items())},
        }


def evaluate(run: Run) -> Validation:
    """Generate rollout.val_kwargs.n responses to each validation prompt and score them. Every rank
    must call it."""
    cfg = run.config
    sampling = cfg.rollout.val_kwargs
    rows = repeat_prompts(run.val_prompts, sampling.n)
    # The same seeds at every validation: only the model differs between two.
    seeds = sampling_seeds(cfg.trainer.seed, VALIDATION, 0, run.val_prompts, sampling.n)
    parameters = Sampling(
        sampling.temperature,
        cfg.data.max_response_length,
        run.stop_token_ids,
        sampling.top_p,
        sampling.top_k,
    )
    stream = ScoreStream(run.rewards, run.tokenizer, rows, training=False)
    groups = new_groups(run.val_prompts, range(len(run.val_prompts)), seeds)
    plan = CallPlan.of_all(groups, is_training=False)
    generations = EngineCall(run, plan, parameters, GroupScores(stream, sampling.n)).sample()
    stream.submit({})  # those held back for a joint call
    return Validation(rows, generations, stream.collect())


def write_metrics(directory: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Write the metrics of a validation without training (trainer.val_only) to
    validation/step_<n>.json."""
    path = directory / ownership.VALIDATION / f"step_{step:06d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(metrics, indent=1, sort_keys=True) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Answer:
    """One scored response of a validation."""

    data_source: str
    prompt: int
    """Identifies the prompt within its data source."""
    numbers: Mapping[str, float]
    """CORE, "reward" (the score), and what else the reward function returned. A number counts for a
    prompt all of whose responses have it."""
    vote: str | None = None
    """The answer that maj@k counts; None: the reward function names none."""


def validation_metrics(answers: Sequence[Answer]) -> dict[str, float]:
    """Return {val-core|val-aux/<data_source>/<number>/<statistic>: value}, each statistic the mean
    over prompts.

    With n responses to each prompt, and k = 2, 4, 8, ..., n:
    - mean@n; std@n, the population's deviation among the n responses;
    - best@k/mean, worst@k/mean: the expected maximum and minimum of k responses drawn with
      replacement; best@k/std, worst@k/std: the deviation over the draws;
    - maj@k/mean, maj@k/std: the same of the number of the most frequent vote (the first of equally
      frequent ones);
    - pass@k, where the number is 0 or 1 for all responses of the data source: the probability that
      one of k responses drawn without replacement is 1, 1 - C(n - c, k) / C(n, k) with c ones
      (arXiv 2107.03374, equation 1).

    val-core has mean@n, best@n and maj@n of CORE; the rest is val-aux.
    """
    prompts: dict[tuple[str, int], list[Answer]] = defaultdict(list)
    for answer in answers:
        prompts[answer.data_source, answer.prompt].append(answer)
    values: dict[str, list[float]] = defaultdict(list)
    graded = {
        (answer.data_source, name)
        for answer in answers
        for name, value in answer.numbers.items()
        if value not in (0, 1)
    }
    for (source, _), responses in prompts.items():
        n = len(responses)
        core = (f"mean@{n}", f"best@{n}", f"maj@{n}")
        # A response that could not be scored has fewer numbers.
        for name in set.intersection(*(set(response.numbers) for response in responses)):
            statistics = _statistics(responses, name, (source, name) not in graded)
            for statistic, value in statistics.items():
                is_core = name == CORE and statistic.partition("/")[0] in core
                section = "val-core" if is_core else "val-aux"
                values[f"{section}/{source}/{name}/{statistic}"].append(value)
        if n > 1 and (source, CORE) in graded:
            _print_no_pass(source)
    return {key: float(np.mean(numbers)) for key, numbers in sorted(values.items())}


@cache
def _print_no_pass(source: str) -> None:
    """Print, once for each data source, that it has no pass@k."""
    print_line(
        f"val-aux/{source}/{CORE}/pass@k is left out: the accuracy of some responses is neither 0 "
        "nor 1; best@k is the expected best of k",
        rank_0_only=True,
    )


def _statistics(responses: Sequence[Answer], name: str, is_binary: bool) -> dict[str, float]:
    """Return the statistics of one number over the responses to one prompt. is_binary: it is 0 or 1
    for all prompts."""
    numbers = np.array([response.numbers[name] for response in responses], dtype=np.float64)
    n = len(numbers)
    statistics = {f"mean@{n}": float(np.mean(numbers))}
    if n == 1:
        return statistics
    statistics[f"std@{n}"] = float(np.std(numbers))
    votes = np.array([response.vote for response in responses], dtype=object)
    has_votes = None not in votes
    # the same number for equal votes
    codes = np.unique(votes, return_inverse=True)[1] if has_votes else votes
    for k in _sizes(n):
        draws = _draws(n, k)
        samples = numbers[draws]
        resampled = {"best": samples.max(axis=1), "worst": samples.min(axis=1)}
        if has_votes:
            resampled["maj"] = numbers[_majority(codes[draws], draws)]
        for statistic, sample in resampled.items():
            statistics[f"{statistic}@{k}/mean"] = float(np.mean(sample))
            statistics[f"{statistic}@{k}/std"] = float(np.std(sample))
        if is_binary:
            statistics[f"pass@{k}"] = 1.0 - math.comb(n - int(numbers.sum()), k) / math.comb(n, k)
    return statistics


def _sizes(n: int) -> list[int]:
    """Return 2, 4, 8, ... below n, and n."""
    return [*(2**i for i in range(1, n.bit_length()) if 2**i < n), n]


@lru_cache
def _draws(n: int, k: int) -> np.ndarray:
    """Return [RESAMPLES, k] indices below n, drawn with replacement: the same as verl's, which
    draws one resample at a time."""
    return np.random.RandomState(SEED).choice(n, size=(RESAMPLES, k), replace=True)


def _majority(votes: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return [RESAMPLES] the response that stands for each resample: the first with its most
    frequent vote. Of equally frequent votes the one drawn first counts. votes, draws: [RESAMPLES,
    k]."""
    counts = (votes[:, :, None] == votes[:, None, :]).sum(axis=2)
    first = counts.argmax(axis=1)  # the first of the largest counts
    return draws[np.arange(len(draws)), first]


def validate(run: Run, state: StepState) -> float:
    """Validate with the current weights. Return the mean accuracy. Raise UserError if
    trainer.best_metric is none of the metrics."""
    cfg = run.config
    update_weights(run, state.timer)
    with run.offload_schedule.phase(state.timer, "testing"):
        result = evaluate(run)
        metrics = result.metrics()
    state.metrics.update(metrics)
    best = cfg.trainer.best_metric
    if best is not None and best not in metrics:  # the same on every rank
        raise UserError(
            f"trainer.best_metric is {best!r}, no metric of the validation; it has "
            f"{', '.join(metrics)}"
        )
    directory = Path(cfg.trainer.default_local_dir) / (
        ownership.VALIDATION if cfg.trainer.val_only else ""
    )
    if run.groups.rank == 0:
        responses = result.generations.token_ids()
        some = slice(cfg.trainer.log_val_generations)
        for folder, rows in (
            (str(directory / GENERATIONS), some),
            (cfg.trainer.validation_data_dir, slice(None)),
        ):
            keep_samples(
                run.tokenizer,
                folder,
                state.step,
                result.prompts[rows],
                responses[rows],
                result.scores[rows],
            )
    return result.accuracy
