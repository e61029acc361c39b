"""Tokenizers, the tokenised prompts of parquet rows, and the order in which training draws them. parquet.py reads the
files.
"""

from __future__ import annotations

import json
import logging
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pyarrow as pa
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf_mc.config.errors import UserError, about
from rlhf_mc.config.schema import DataConfig
from rlhf_mc.data.dataset import FilePrompts, Prompts
from rlhf_mc.data.parquet import column_values, columns_of, read_table
from rlhf_mc.data.template import render
from rlhf_mc.topology.consensus import gather_objects, my_share

logger = logging.getLogger(__name__)

_RESERVED = {"conversation", "tokenize", "add_generation_prompt", "return_dict"}
"""Arguments of apply_chat_template that the program sets."""


# ---------------------------------------------------------------- tokenizer


def load_tokenizer(path: str, key: str = "tokenizer") -> PreTrainedTokenizerBase:
    """Return the tokenizer of a Hugging Face directory. Only local files are read and no code of the checkpoint is run.

    Raise UserError, beginning with `key` (the setting that names the directory), if the directory is missing, contains
    no tokenizer, or one without an end-of-sequence token.
    """
    if not os.path.isdir(path):
        raise UserError(f"{key} {path}: no such directory")
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any(os.path.isfile(os.path.join(path, name)) for name in names):
        raise UserError(f"{key} {path}: holds no tokenizer (none of {', '.join(names)})")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        _check_json(key, os.path.join(path, name))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library has no narrower type for a corrupt file
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{key} {path}: cannot be loaded ({type(error).__name__}: {reason})") from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"{key} {path}: the tokenizer has no end-of-sequence token (eos_token)")
    return tokenizer


def _check_json(key: str, path: str) -> None:
    if os.path.isfile(path):
        try:
            with open(path, encoding="utf-8") as file:
                json.load(file)
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{key}: tokenizer file {path}: not valid JSON ({error})") from error


# ---------------------------------------------------------------- prompts


def load_prompts(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    cfg: DataConfig,
    max_samples: int,
    key: str = "data.train_files",
    num_texts: int | None = None,
) -> Prompts:
    """Return the prompts of all files, in order: those of the first `max_samples` rows, or of all rows if it is -1.

    Chat messages are rendered by the tokenizer's chat template, with the generation prompt added. A plain string is
    one user message if the tokenizer has a chat template, else it is encoded as it is. Prompts of more than
    cfg.max_prompt_length tokens are dropped with a warning, or refused, by cfg.filter_overlong_prompts. Raise
    UserError, naming `key` (the setting that lists the files), file and row, for an unusable row.

    Each rank renders and tokenises a consecutive part of each file's rows, and the tokens are gathered: every rank must
    call it, and has the same prompts, or raises the same error, as a process alone. num_texts: Prompt.text is kept for
    that many prompts from the first on; None: for all.
    """
    _check_template_arguments(cfg)
    most_characters = cfg.max_prompt_length * _most_characters_of_a_token(tokenizer)
    found: list[FilePrompts] = []
    num_rows = num_prompts = 0
    for file in files:
        most_rows = None if max_samples < 0 else max_samples - num_rows
        most_texts = None if num_texts is None else max(0, num_texts - num_prompts)
        share, table = _tokenised_share(f"{key} {file}", file, tokenizer, cfg, most_rows, most_characters, most_texts)
        found.append(_gathered(f"{key} {file}", share, table, cfg, most_texts))
        num_rows += share.num_rows
        num_prompts += len(found[-1].lens)
    if num_rows == 0:
        raise UserError(f"{key} {', '.join(files)}: no rows")
    if num_prompts == 0:
        raise UserError(
            f"{key} {', '.join(files)}: all {num_rows} prompts are longer than"
            f" data.max_prompt_length {cfg.max_prompt_length} tokens"
        )
    if num_prompts < num_rows:
        num_dropped = num_rows - num_prompts
        logger.warning("%d of %d prompts dropped: longer than %d tokens", num_dropped, num_rows, cfg.max_prompt_length)
    return Prompts(found)


@dataclass
class _Share:
    """A rank's part of the prompts of one file, or the error that it found first."""

    num_rows: int = 0
    """Rows of the whole file, of those that are asked for."""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    """The tokens of its prompts, end to end."""
    lens: array[int] = field(default_factory=lambda: array("i"))
    rows: array[int] = field(default_factory=lambda: array("i"))
    """Row of each prompt."""
    texts: list[str] = field(default_factory=list)
    error: UserError | None = None
    order: tuple[int, int] = (0, 0)
    """Of the errors of all ranks, that of the lowest order is raised: the file's, then a column's, then a row's."""


def _tokenised_share(
    where: str,
    file: str,
    tokenizer: PreTrainedTokenizerBase,
    cfg: DataConfig,
    most_rows: int | None,
    most_characters: int,
    most_texts: int | None,
) -> tuple[_Share, pa.Table | None]:
    """Return this rank's share of a file's prompts, and the columns of the file that a Prompt reads."""
    share = _Share()
    try:
        with about(f"{where}:"):
            table = read_table(file, columns_of(cfg), ("extra_info",)).slice(0, most_rows)
            share.num_rows = len(table)
            mine = my_share(len(table))
            columns = []
            for number, name in enumerate(table.column_names):
                share.order = (1, number)
                columns.append(column_values(table.slice(mine.start, len(mine)), name))
        for row_number, values in zip(mine, zip(*columns, strict=True), strict=True):
            share.order = (2, row_number)
            row = dict(zip(table.column_names, values, strict=True))
            try:
                text, token_ids = _tokens(row, f"{where}, row {row_number}", tokenizer, cfg, most_characters)
            except _TooLong as too_long:
                if not cfg.filter_overlong_prompts:
                    raise UserError(
                        f"{where}, row {row_number}: the prompt has {too_long} data.max_prompt_length"
                        f" {cfg.max_prompt_length}; raise that, or set data.filter_overlong_prompts: true"
                    ) from None
                continue
            share.tokens.extend(token_ids)
            share.lens.append(len(token_ids))
            share.rows.append(row_number)
            if most_texts is None or len(share.texts) < most_texts:
                share.texts.append(text)
    except UserError as error:
        return _Share(error=error, order=share.order), None
    kept = (cfg.reward_fn_key, "reward_model", "extra_info")
    return share, table.select([name for name in table.column_names if name in kept])


def _gathered(
    where: str, share: _Share, table: pa.Table | None, cfg: DataConfig, most_texts: int | None
) -> FilePrompts:
    """Return the prompts of all ranks' shares of one file. Every rank must call it."""
    shares = gather_objects(share)
    if failed := [other for other in shares if other.error is not None]:
        raise cast(UserError, min(failed, key=lambda other: other.order).error)
    for rank, other in enumerate(shares):
        if other.num_rows != shares[0].num_rows:
            raise UserError(
                f"{where}: {shares[0].num_rows} rows on rank 0 and {other.num_rows} on rank {rank};"
                " every node must have the same file"
            )
    assert table is not None

    def joined(name: str) -> np.ndarray:
        return np.concatenate([np.frombuffer(getattr(other, name), np.int32) for other in shares])

    texts = [text for other in shares for text in other.texts][:most_texts]
    return FilePrompts(joined("tokens"), joined("lens"), joined("rows"), table, cfg.reward_fn_key, texts, where)


class _TooLong(Exception):
    """A prompt of more than data.max_prompt_length tokens. The message states its length."""


def _most_characters_of_a_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return an upper bound of a prompt's average characters per token: four times the longest vocabulary entry.

    Tokenizers of the supported families fall back to bytes, so a token has at most the characters of its entry. The
    factor of four allows for normalisation that composes accents and for special tokens that absorb spaces."""
    return 4 * max(16, max(map(len, tokenizer.get_vocab())))


def _check_template_arguments(cfg: DataConfig) -> None:
    for name in cfg.apply_chat_template_kwargs:
        if name in _RESERVED:
            raise UserError(f"data.apply_chat_template_kwargs: {name!r} is set by the program; remove it")


def _tokens(
    row: dict[str, Any], where: str, tokenizer: PreTrainedTokenizerBase, cfg: DataConfig, most_characters: int
) -> tuple[str, list[int]]:
    """Return the text and the tokens of the row's prompt. Raise _TooLong if it has too many tokens. A text of more than
    `most_characters` has too many, and is not tokenised. Raise UserError if a column of the row is not as expected."""
    data_source = row[cfg.reward_fn_key]
    if not isinstance(data_source, str):
        raise UserError(f"{where}: column {cfg.reward_fn_key!r} is {repr(data_source)[:60]}, expected a string")
    reward_model = row["reward_model"]
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        raise UserError(f"{where}: column 'reward_model' has no field 'ground_truth'")
    extra_info = row.get("extra_info") or {}
    if not isinstance(extra_info, dict):
        raise UserError(f"{where}: column 'extra_info' is not a struct but {type(extra_info).__name__}")
    text, add_special_tokens = _text(row[cfg.prompt_key], where, tokenizer, cfg)
    if len(text) > most_characters:
        raise _TooLong(f"{len(text)} characters, too many for")
    token_ids = _tokenised(tokenizer, text, add_special_tokens, where)
    if not token_ids:
        raise UserError(f"{where}: the prompt has no tokens")
    if len(token_ids) > cfg.max_prompt_length:
        raise _TooLong(f"{len(token_ids)} tokens, more than")
    return text, token_ids


def _text(prompt: Any, where: str, tokenizer: PreTrainedTokenizerBase, cfg: DataConfig) -> tuple[str, bool]:
    """Return the text, and whether the tokenizer has to add special tokens: the text of a template has them."""
    if isinstance(prompt, str) and prompt and tokenizer.chat_template is None:
        return prompt, True
    messages = _messages(prompt, where, cfg.prompt_key)
    if tokenizer.chat_template is None:
        raise UserError(
            f"{where}: the prompt is chat messages, but the tokenizer of {tokenizer.name_or_path} has no chat template;"
            " give plain strings, or a tokenizer with a template"
        )
    return render(tokenizer, messages, cfg.apply_chat_template_kwargs, where), False


def _tokenised(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool, where: str) -> list[int]:
    try:
        return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    except Exception as error:  # as in load_tokenizer
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{where}: the prompt cannot be tokenised ({type(error).__name__}: {reason})") from error


def _messages(prompt: Any, where: str, column: str) -> list[dict[str, Any]]:
    """Return the chat messages of a prompt, without the fields that parquet filled with null."""
    if isinstance(prompt, str) and prompt:
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        found = "null" if prompt is None else repr(prompt)[:60]
        raise UserError(f"{where}: column {column!r} is {found}, expected chat messages or a non-empty string")
    for message in prompt:
        fields = message if isinstance(message, dict) else {}
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            raise UserError(
                f"{where}: column {column!r} has the message {repr(message)[:60]}, expected a role and a text content"
            )
    return [{name: value for name, value in message.items() if value is not None} for message in prompt]


# ---------------------------------------------------------------- order


def steps_per_epoch(num_prompts: int, batch_size: int) -> int:
    """Return the number of whole batches in one pass over the prompts. The remainder is not used in that pass."""
    if batch_size > num_prompts:
        raise UserError(f"data.train_batch_size is {batch_size}; there are only {num_prompts} training prompts")
    return num_prompts // batch_size


def prompt_indices(num_prompts: int, batch_size: int, step: int, seed: int, shuffle: bool) -> list[int]:
    """Return the indices of the prompts of a step (from 0), a function of the arguments alone, so that a resumed run
    continues with the next batch.

    The order of each epoch is drawn from (seed, epoch); without shuffle it is that of the files.
    """
    epoch, batch = divmod(step, steps_per_epoch(num_prompts, batch_size))
    order = np.random.default_rng((seed, epoch)).permutation(num_prompts) if shuffle else np.arange(num_prompts)
    return [int(i) for i in order[batch * batch_size : (batch + 1) * batch_size]]
