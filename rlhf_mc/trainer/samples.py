"""Generations on disk as JSONL, one file for each step or validation: for reading, and for training something else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf_mc import json_files
from rlhf_mc.data.batch import Prompt
from rlhf_mc.rewards.results import Score


def some_of_each_prompt(num_responses: int, n: int, count: int) -> list[int]:
    """Return the indices of `count` responses of a batch, or of all if it has fewer: the first response of each prompt,
    then the second of each, and so on. n: responses per prompt, which are consecutive."""
    return [i for first in range(n) for i in range(first, num_responses, n)][:count]


def write_samples(
    directory: Path,
    step: int,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    responses: Sequence[Sequence[int]],
    scores: Sequence[Score],
) -> None:
    """Write <step>.jsonl, one line per response: input, output, gts, score and step as verl names them; data_source,
    length in tokens, parts (each part's contribution to the score), extra (further numbers of the reward functions)
    and failure (why there is no score, or null). Only one rank calls it.

    A file of the same step, from before a resume, is replaced."""
    inputs = tokenizer.batch_decode([list(prompt.token_ids) for prompt in prompts], skip_special_tokens=True)
    outputs = tokenizer.batch_decode([list(response) for response in responses], skip_special_tokens=True)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{step}.jsonl"
    unfinished = path.with_suffix(".jsonl.part")
    with unfinished.open("w", encoding="utf-8") as file:
        for prompt, text, output, response, score in zip(prompts, inputs, outputs, responses, scores, strict=True):
            row = {
                "input": text,
                "output": output,
                "gts": prompt.ground_truth,
                "score": score.score,
                "step": step,
                "data_source": prompt.data_source,
                "length": len(response),
                "parts": dict(score.parts),
                "extra": dict(score.extra),
                "failure": score.failure,
            }
            file.write(json_files.readable_text(row) + "\n")
    unfinished.replace(path)
