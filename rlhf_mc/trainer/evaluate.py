"""Validation: responses to the validation prompts, their scores, metrics, samples as text."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf_mc.config.schema import ValKwargsConfig
from rlhf_mc.data.batch import Generation, Prompt, Responses
from rlhf_mc.rewards.manager import RewardManager
from rlhf_mc.rewards.results import Score
from rlhf_mc.rollout.base import RolloutEngine, Sampling
from rlhf_mc.trainer import run_directory
from rlhf_mc.trainer.sampling import VALIDATION, generate, repeat_prompts, sampling_seeds
from rlhf_mc.trainer.scoring import collect_scores, submit_responses
from rlhf_mc.trainer.validation_metrics import CORE, Answer, validation_metrics


@dataclass(frozen=True)
class Validation:
    """The responses of a validation and their scores, the same on every rank."""

    prompts: list[Prompt]
    """Of each response."""
    generations: Responses
    scores: list[Score]

    @property
    def accuracy(self) -> float:
        """The mean accuracy over all responses."""
        return sum(score.accuracy for score in self.scores) / len(self.scores)

    def metrics(self) -> dict[str, float]:
        """Return validation_metrics, and val-aux/<data_source>/num_failed for data sources of which a response could
        not be scored."""
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
        return {
            **validation_metrics(answers),
            **{f"val-aux/{source}/num_failed": count for source, count in sorted(failed.items())},
        }

    def texts(self, tokenizer: PreTrainedTokenizerBase, count: int) -> list[str]:
        """Return the first `count` responses as readable texts."""
        rows = zip(self.prompts, self.generations, self.scores, strict=True)
        return [_as_text(*row, tokenizer) for row in itertools.islice(rows, count)]


def evaluate(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    rewards: RewardManager,
    tokenizer: PreTrainedTokenizerBase,
    cfg: ValKwargsConfig,
    max_tokens: int,
    stop_token_ids: tuple[int, ...],
    seed: int,
) -> Validation:
    """Generate cfg.n responses to each prompt and score them. Every rank must call it."""
    rows = repeat_prompts(prompts, cfg.n)
    # The same seeds at every validation: only the model differs between two.
    seeds = sampling_seeds(seed, VALIDATION, 0, prompts, cfg.n)
    parameters = Sampling(cfg.temperature, max_tokens, stop_token_ids, cfg.top_p, cfg.top_k)
    generations = generate(engine, rows, seeds, parameters)
    pending = submit_responses(rewards, tokenizer, rows, generations.token_ids(), training=False)
    return Validation(rows, generations, collect_scores(pending, len(rows)))


def _as_text(prompt: Prompt, generation: Generation, score: Score, tokenizer: PreTrainedTokenizerBase) -> str:
    response = tokenizer.decode(generation.token_ids, skip_special_tokens=False)
    return (
        f"[prompt] {prompt.text}\n[response] {response}\n[ground truth] {prompt.ground_truth}\n[score] {score.score}\n"
    )


def write_generations(directory: Path, step: int, texts: Sequence[str]) -> None:
    """Write the samples to generations/step_<n>.txt."""
    path = directory / run_directory.GENERATIONS / f"step_{step:06d}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(texts), encoding="utf-8", errors="backslashreplace")


def write_metrics(directory: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Write the metrics of a validation without training (trainer.val_only) to validation/step_<n>.json."""
    path = directory / run_directory.VALIDATION / f"step_{step:06d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(metrics, indent=1, sort_keys=True) + "\n", encoding="utf-8")
