"""Checkpoints of models that read the actor's tokens: requirements of the critic's start, of a
reward model and of a teacher."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint.hf_format import HFReader
from rlhf_mc.config.errors import UserError, error_prefix
from rlhf_mc.config.schema import Config, DataConfig, get_setting
from rlhf_mc.data.conversations import ConversationTokenizer
from rlhf_mc.data.tokenizer import has_tokenizer, load_tokenizer
from rlhf_mc.reshard.model_checks import check_length
from rlhf_mc.runtime.console import print_line

HEAD = "score.weight"
BIAS = "score.bias"


def check_value_head(key: str, reader: HFReader) -> None:
    """Raise UserError if the checkpoint has a value head of several outputs, or one with a bias
    other than 0."""
    where = f"{key} {reader.directory}"
    if HEAD in reader.names:
        labels = reader.slices([HEAD])[HEAD].get_shape()[0]
        if labels != 1:
            raise UserError(
                f"{where}: {HEAD} has {labels} rows, a classifier of {labels} labels; a value has "
                "one"
            )
    if BIAS in reader.names:
        bias: Any = reader.slices([BIAS])[BIAS][:]
        if bias.any():
            raise UserError(
                f"{where}: {BIAS} is {bias.tolist()}; a value head has no bias, so it must be 0"
            )


def reward_model_checkpoint(
    cfg: Config,
    role: str,
    tokenizer: PreTrainedTokenizerBase,
    conversations: ConversationTokenizer | None,
) -> HFReader:
    """Return the checkpoint of the reward model of that role. Raise UserError if it has no value
    head, or another vocabulary than its tokenizer: that of `conversations`, or without them the
    actor's, `tokenizer`."""
    key = f"{role}.model_path"
    path = str(get_setting(cfg, key))
    if conversations is None:
        reader = token_checkpoint(key, path, cfg.data, tokenizer, f"{role}.tokenizer_path")
    else:
        reader = _read_checkpoint(key, path)
        shape = reader.shape(value_head=True)
        check_vocabulary(conversations.key, conversations.tokenizer, shape, f"{key} {path}")
    if HEAD not in reader.names:
        raise UserError(
            f"{key} {path}: no tensor {HEAD}; a reward model is a sequence classifier of one label"
        )
    return reader


def token_checkpoint(
    key: str,
    path: str,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    own_key: str | None = None,
    value_head: bool = True,
) -> HFReader:
    """Return the checkpoint of the setting `key`, which may have a value head, or of a model
    without one. Raise UserError if the actor's prompts and responses are too long for it or of
    another vocabulary, or if its head is not a value head. own_key: the setting that would give the
    model a tokenizer of its own, if there is one."""
    reader = _read_checkpoint(key, path, value_head)
    shape = reader.shape(value_head)
    where = f"{key} {path}"
    check_length(where, shape, data)
    check_vocabulary("the actor's", tokenizer, shape, where)
    _check_same_tokens(key, path, tokenizer, own_key)
    return reader


def _read_checkpoint(key: str, path: str, value_head: bool = True) -> HFReader:
    """Return a checkpoint whose value head, if it has one, is checked. value_head: of the model."""
    with error_prefix(f"{key}:"):
        reader = HFReader(path)
    check_value_head(key, reader)
    with error_prefix(f"{key}:"):
        reader.check(reader.shape(value_head))
    return reader


def check_vocabulary(
    owner: str, tokenizer: PreTrainedTokenizerBase, shape: ModelShape, where: str
) -> None:
    """Raise UserError if the tokenizer has more tokens than the model. owner: of the tokenizer.
    where: the model's setting and path."""
    if len(tokenizer) > shape.vocab_size:
        raise UserError(
            f"{where}: vocab_size is {shape.vocab_size}, the tokenizer ({owner}) has "
            f"{len(tokenizer)} tokens"
        )


def _check_same_tokens(
    key: str, path: str, tokenizer: PreTrainedTokenizerBase, own_key: str | None
) -> None:
    """Raise UserError if the tokenizer in the model's directory, if any, has another vocabulary
    than the actor's: the model reads the actor's tokens unchanged. own_key: as in token_checkpoint;
    with it, warn if the chat template differs."""
    if not has_tokenizer(path):
        return
    model_tokenizer = load_tokenizer(path, key)
    vocabulary = model_tokenizer.get_vocab()
    different = next(
        (token for token, i in tokenizer.get_vocab().items() if vocabulary.get(token) != i), None
    )
    hint = "" if own_key is None else f"; set {own_key} to {path} and it reads its own tokens"
    if different is not None:
        raise UserError(
            f"{key} {path}: its tokenizer has {different!r} as {vocabulary.get(different)}, the "
            f"actor's as {tokenizer.get_vocab()[different]}; it needs the actor's tokenizer{hint}"
        )
    if own_key is not None and model_tokenizer.chat_template not in (None, tokenizer.chat_template):
        print_line(
            f"warning: {key} {path}: it reads the actor's chat template, and has another{hint}",
            rank_0_only=True,
        )
