"""Generations on disk as JSONL, one file for each step or validation: for reading, and for training
something else."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_mc import json_files
from rlhf_mc.config.schema import Config
from rlhf_mc.data.batch import Prompt, RaggedBatch
from rlhf_mc.observability.sinks import append_line, best_effort
from rlhf_mc.rewards.results import MASKED, Episode, Score
from rlhf_mc.run_files import HISTOGRAMS_FILE

FEW_OF_PROMPT = 4
"""Responses to one prompt that can be compared, before those to other prompts."""
RESPONSE = "response"
OBSERVATION = "observation"
CONTEXT = "context"
"""Kinds of parts of a response (`split_turns`)."""
MAX_TOKENS = 512
"""Tokens of a response that `token_columns` has."""
TOKEN_FIELDS = (
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "values",
    "advantages",
    "loss_mask",
)
"""Fields of RaggedBatch that `token_columns` has."""
MAX_BINS = 64
"""Bins of a histogram of lengths, at most."""


def some_of_each_prompt(num_responses: int, n: int, count: int) -> list[int]:
    """Return the indices of `count` responses of a batch, or of all if it has fewer: the first
    FEW_OF_PROMPT responses of each prompt, prompt by prompt, then the next of each. n: responses
    per prompt, which are consecutive."""
    return sorted(range(num_responses), key=lambda i: (i % n // FEW_OF_PROMPT, i))[:count]


def samples_path(directory: Path, step: int) -> Path:
    """Return the file of all generations of a step."""
    return directory / f"{step}.jsonl"


def write_samples(
    directory: Path,
    step: int,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    responses: Sequence[Sequence[int]],
    scores: Sequence[Score],
    batch: RaggedBatch | None = None,
) -> None:
    """Write <step>.jsonl, one line per response: input, output, gts, score and step as verl names
    them; data_source, length in tokens, parts (each part's contribution to the score), extra
    (further numbers of the reward functions) and failure (why there is no score, or why the
    response is not trained on, or null); row, as `row_digest` has it; weights_step, the step after
    which the weights drew the first token; prompt_ids and response_ids; of a conversation turns, as
    `split_turns` has them, and observations, the token ranges of the response that the model has
    not drawn, and contexts, the indices of those with which a new context begins. batch: of these
    responses, in training; with its advantages also tokens, as `token_columns` has them. One rank
    calls it.

    A file of the same step, from before a resume, is replaced."""
    inputs = tokenizer.batch_decode(
        [list(prompt.token_ids) for prompt in prompts], skip_special_tokens=True
    )
    outputs = tokenizer.batch_decode(
        [list(response) for response in responses], skip_special_tokens=True
    )
    tokens = (
        [{}] * len(prompts)
        if batch is None or batch.advantages is None
        else [{"tokens": columns} for columns in token_columns(tokenizer, batch)]
    )
    steps = [step] * len(prompts) if batch is None else weights_steps(step, batch)
    directory.mkdir(parents=True, exist_ok=True)
    path = samples_path(directory, step)
    unfinished = path.with_suffix(".jsonl.part")
    with unfinished.open("w", encoding="utf-8") as file:
        columns = zip(prompts, inputs, outputs, responses, scores, tokens, steps, strict=True)
        for prompt, text, output, response, score, more, weights_step in columns:
            # an agent's first request has the messages
            if len(prompt.token_ids) == 1 and prompt.messages:
                text = "\n".join(str(message["content"]) for message in prompt.messages)
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
                "failure": MASKED if score.is_masked else score.failure,
                "row": row_digest(prompt),
                "weights_step": weights_step,
                "prompt_ids": prompt.token_ids.tolist(),
                "response_ids": [*response],
            }
            if score.episode is not None:
                row["turns"] = split_turns(tokenizer, response, score.episode)
                row["observations"] = score.episode.observations
                row["contexts"] = score.episode.contexts
            file.write(json_files.readable_text(row | more) + "\n")
    unfinished.replace(path)


def row_digest(prompt: Prompt) -> str:
    """Return the SHA-256 of a row of the dataset: of its data source, prompt, ground truth and
    extra info."""
    chat = [dict(message) for message in prompt.messages] or prompt.token_ids.tolist()
    fields = (prompt.data_source, chat, prompt.ground_truth, prompt.extra_info)
    return hashlib.sha256(repr(fields).encode(errors="backslashreplace")).hexdigest()


def weights_steps(step: int, batch: RaggedBatch) -> list[int]:
    """Return for each response of a training step the step after which the weights drew its first
    token."""
    if batch.token_ages is None:
        return [step - 1] * batch.num_sequences
    ages = batch.token_ages.split(batch.response_lens.tolist())
    return [step - 1 - int(part.max()) for part in ages]


def split_turns(
    tokenizer: PreTrainedTokenizerBase, response: Sequence[int], episode: Episode | None
) -> list[tuple[str, str]]:
    """Return the parts of a response as pairs: RESPONSE, OBSERVATION or, of an observation that is
    a new context, CONTEXT, and the text. Without an environment there is one."""
    observations = () if episode is None else episode.observations
    bounds = [0, *itertools.chain.from_iterable(observations), len(response)]
    kinds = [RESPONSE]
    for i in range(len(observations)):
        is_context = episode is not None and i in episode.contexts
        kinds += [CONTEXT if is_context else OBSERVATION, RESPONSE]
    parts = [
        (kind, response[start:end])
        for kind, (start, end) in zip(kinds, itertools.pairwise(bounds), strict=False)
    ]
    return [
        (kind, tokenizer.decode(part, skip_special_tokens=False)) for kind, part in parts if part
    ]


def token_columns(
    tokenizer: PreTrainedTokenizerBase, batch: RaggedBatch
) -> list[dict[str, list[Any]]]:
    """Return the first MAX_TOKENS tokens of each response as columns of one length: text (see
    `token_texts`); response_mask, 0 for tokens of observations; the fields of TOKEN_FIELDS that the
    batch has, with 6 decimals, None for tokens of observations and for values that are not
    finite."""
    numbers = {
        name: [round(value, 6) if math.isfinite(value) else None for value in field.tolist()]
        for name in TOKEN_FIELDS
        if (field := getattr(batch, name)) is not None
    }
    mask = (
        [True] * len(batch.tokens) if batch.response_mask is None else batch.response_mask.tolist()
    )
    positions = itertools.count()
    rows: list[dict[str, list[Any]]] = []
    for response, end in zip(batch.responses(), batch.seq_lens.cumsum(0).tolist(), strict=True):
        indices = [
            next(positions) if is_sampled else None
            for is_sampled in mask[end - len(response) : end]
        ][:MAX_TOKENS]
        columns = {
            name: [None if i is None else values[i] for i in indices]
            for name, values in numbers.items()
        }
        texts = token_texts(tokenizer, response[:MAX_TOKENS])
        rows.append(
            {
                "text": texts,
                "response_mask": [int(i is not None) for i in indices],
                **columns,
            }
        )
    return rows


def token_texts(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds to the text before it, special tokens included. A
    character of several tokens is at its last one, and the others are empty."""
    decode = functools.partial(
        tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    texts = [""] * len(token_ids)
    # tokens whose text is complete, decoded anew: a space may depend on the token before it
    start = end = 0
    for i in range(len(token_ids)):
        text = decode(token_ids[start : i + 1])
        if not text.endswith("\ufffd") or i + 1 == len(token_ids):
            texts[i] = text[len(decode(token_ids[start:end])) :]
            start, end = end, i + 1
    return texts


def record_histograms(cfg: Config, rank: int, run_id: str, step: int, batch: RaggedBatch) -> None:
    """Add the step's histogram of response lengths to histograms.jsonl. Any rank may call it; rank
    0 writes. An error is a warning."""
    if rank == 0:
        lengths = histogram(batch.response_lens, length_edges(cfg.data.max_response_length))
        row = {"step": step, "run_id": run_id, "response_length": lengths}
        path = Path(cfg.trainer.default_local_dir) / HISTOGRAMS_FILE
        append_line(path, json.dumps(row) + "\n")


def length_edges(longest: int) -> list[int]:
    """Return the edges of at most MAX_BINS bins of one width for lengths in tokens from 1 to
    `longest`, the same in every step: bin i holds the lengths above edges[i], up to edges[i +
    1]."""
    width = -(-longest // MAX_BINS)
    return list(range(0, longest + width, width))


def histogram(lengths: torch.Tensor, edges: Sequence[int]) -> dict[str, list[int]]:
    """Return {"edges", "counts"} of lengths in tokens; [S] integers from 1 to edges[-1]."""
    bins = torch.bucketize(lengths, torch.tensor(edges[1:], dtype=lengths.dtype))
    return {"edges": list(edges), "counts": torch.bincount(bins, minlength=len(edges) - 1).tolist()}


def keep_samples(
    tokenizer: PreTrainedTokenizerBase,
    directory: str | None,
    step: int,
    prompts: list[Prompt],
    responses: list[list[int]],
    scores: list[Score],
    batch: RaggedBatch | None = None,
) -> None:
    """Write generations, if there are any, to <directory>/<step>.jsonl; None: nowhere. Only rank 0
    calls it."""
    if directory is not None and prompts:
        root = Path(directory)
        best_effort(
            directory,
            lambda: write_samples(root, step, tokenizer, prompts, responses, scores, batch),
        )
