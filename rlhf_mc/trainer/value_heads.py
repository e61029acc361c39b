"""Checkpoints with a value head: requirements of the critic's start and of a reward model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint.hf_format import HFReader
from rlhf_mc.config.errors import UserError, about
from rlhf_mc.config.schema import Config, DataConfig
from rlhf_mc.data.tokenizer import load_tokenizer

HEAD = "score.weight"
BIAS = "score.bias"


@dataclass(frozen=True)
class ValueCheckpoint:
    """A checkpoint whose value head has been checked."""

    reader: HFReader
    shape: ModelShape


def check_value_head(key: str, reader: HFReader) -> None:
    """Raise UserError if the checkpoint has a value head of several outputs, or one with a bias other than 0."""
    where = f"{key} {reader.directory}"
    if HEAD in reader.names:
        labels = reader.slices([HEAD])[HEAD].get_shape()[0]
        if labels != 1:
            raise UserError(f"{where}: {HEAD} has {labels} rows, a classifier of {labels} labels; a value has one")
    if BIAS in reader.names:
        bias: Any = reader.slices([BIAS])[BIAS][:]
        if bias.any():
            raise UserError(f"{where}: {BIAS} is {bias.tolist()}; a value head has no bias, so it must be 0")


def reward_model_checkpoint(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> ValueCheckpoint:
    """Return the reward model's checkpoint. Raise UserError if it has no value head, or another vocabulary than the
    actor."""
    path = cfg.reward_model.model_path
    assert path is not None
    found = value_checkpoint("reward_model.model_path", path, cfg.data, tokenizer)
    if HEAD not in found.reader.names:
        raise UserError(
            f"reward_model.model_path {path}: no tensor {HEAD}; a reward model is a sequence classifier of one label"
        )
    return found


def value_checkpoint(key: str, path: str, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> ValueCheckpoint:
    """Return the checkpoint of the setting `key`, with or without a value head. Raise UserError if the actor's prompts
    and responses are too long for it or of another vocabulary, or if its head is not a value head."""
    with about(f"{key}:"):
        reader = HFReader(path)
    where = f"{key} {path}"
    check_value_head(key, reader)
    with about(f"{key}:"):
        shape = reader.shape(value_head=True)
        reader.check(shape)
    longest = data.max_prompt_length + data.max_response_length
    if longest > shape.max_position_embeddings:
        raise UserError(
            f"{where}: max_position_embeddings is {shape.max_position_embeddings}, fewer than the {longest} tokens of "
            "data.max_prompt_length + data.max_response_length"
        )
    _check_tokenizer(key, path, shape, tokenizer)
    return ValueCheckpoint(reader, shape)


def _check_tokenizer(key: str, path: str, shape: ModelShape, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError unless the model has the actor's vocabulary: it reads the actor's tokens unchanged."""
    where = f"{key} {path}"
    if len(tokenizer) > shape.vocab_size:
        raise UserError(f"{where}: vocab_size is {shape.vocab_size}, the tokenizer has {len(tokenizer)} tokens")
    if not os.path.isfile(os.path.join(path, "tokenizer.json")):
        return
    own = load_tokenizer(path, key).get_vocab()
    different = next((token for token, i in tokenizer.get_vocab().items() if own.get(token) != i), None)
    if different is not None:
        raise UserError(
            f"{where}: its tokenizer has {different!r} as {own.get(different)}, the actor's as "
            f"{tokenizer.get_vocab()[different]}; it needs the actor's tokenizer"
        )
