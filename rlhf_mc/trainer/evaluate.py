"""Validation: responses to the validation prompts, their scores, accuracy by data source, samples as text."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf_mc.config.schema import ValKwargsConfig
from rlhf_mc.data.batch import Generation, Prompt
from rlhf_mc.rewards.manager import RewardManager
from rlhf_mc.rewards.results import Score
from rlhf_mc.rollout.base import RolloutEngine, Sampling
from rlhf_mc.trainer.run_directory import GENERATIONS
from rlhf_mc.trainer.sampling import VALIDATION, generate, repeat_prompts, sampling_seeds
from rlhf_mc.trainer.scoring import collect_scores, submit_responses


def accuracy_metrics(prompts: Sequence[Prompt], scores: Sequence[Score], n: int) -> dict[str, float]:
    """Return {val-core/<data_source>/acc/mean@n: mean accuracy}, and val-aux/<data_source>/num_failed for data sources
    of which a response could not be scored. prompts, scores: one entry per response."""
    by_source: dict[str, list[Score]] = defaultdict(list)
    for prompt, score in zip(prompts, scores, strict=True):
        by_source[prompt.data_source].append(score)
    metrics = {}
    for source, found in sorted(by_source.items()):
        metrics[f"val-core/{source}/acc/mean@{n}"] = sum(score.accuracy for score in found) / len(found)
        if num_failed := sum(score.failure is not None for score in found):
            metrics[f"val-aux/{source}/num_failed"] = num_failed
    return metrics


def evaluate(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    rewards: RewardManager,
    tokenizer: PreTrainedTokenizerBase,
    cfg: ValKwargsConfig,
    max_tokens: int,
    stop_token_ids: tuple[int, ...],
    seed: int,
    num_texts: int,
) -> tuple[dict[str, float], float, list[str]]:
    """Return metrics, the mean accuracy over all responses, and the first `num_texts` responses as readable texts.
    Every rank must call it; num_texts may differ."""
    rows = repeat_prompts(prompts, cfg.n)
    # The same seeds at every validation: only the model differs between two.
    seeds = sampling_seeds(seed, VALIDATION, 0, prompts, cfg.n)
    generations = generate(engine, rows, seeds, Sampling(cfg.temperature, max_tokens, stop_token_ids))
    pending = submit_responses(rewards, tokenizer, rows, [g.token_ids for g in generations], training=False)
    scores = collect_scores(pending, len(rows))
    mean = sum(score.accuracy for score in scores) / len(scores)
    texts = [
        _as_text(prompt, tokenizer, generation, score.score)
        for prompt, generation, score in itertools.islice(zip(rows, generations, scores, strict=True), num_texts)
    ]
    return accuracy_metrics(rows, scores, cfg.n), mean, texts


def _as_text(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, generation: Generation, score: float) -> str:
    response = tokenizer.decode(generation.token_ids, skip_special_tokens=False)
    return f"[prompt] {prompt.text}\n[response] {response}\n[ground truth] {prompt.ground_truth}\n[score] {score}\n"


def write_generations(directory: Path, step: int, texts: Sequence[str]) -> None:
    """Write the samples to generations/step_<n>.txt."""
    path = directory / GENERATIONS / f"step_{step:06d}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(texts), encoding="utf-8")
