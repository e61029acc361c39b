"""The settings of the prompts. schema.py has the other sections. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rlhf_mc.config.numbers import CountOrMinus1, Positive, Range, Sequences


@dataclass
class DataConfig:
    """Prompts, their maximum lengths and the batch size."""

    train_files: list[str]
    """Files of training prompts, parquet or JSONL (.jsonl, .json): a list, or one string."""
    val_files: list[str] = field(default_factory=list)
    """Files of validation prompts; empty: no validation."""
    train_file_weights: list[Positive] = field(default_factory=list)
    """Sampling weights, one per training file: each batch has prompts of the files in these
    proportions, and a file is passed over at its own pace. []: every prompt once per epoch."""
    prompt_key: str = "prompt"
    """Column of the prompt: chat messages (list of {role, content}, of one or several turns) or a
    plain string."""
    reward_fn_key: str = "data_source"
    """Column with the name of the rule that scores the row. This column and reward_model may be
    absent with custom_reward_function.path, and from training files with a reward model."""
    train_max_samples: CountOrMinus1 = -1
    """Number of rows of the training set to use, from the first; -1: all."""
    val_max_samples: CountOrMinus1 = -1
    """Number of rows of the validation set to use, from the first; -1: all."""
    max_prompt_length: Annotated[int, Range(1, 10_000_000)] = 512
    """Maximum prompt length in tokens, after the chat template."""
    max_response_length: Annotated[int, Range(1, 10_000_000)] = 512
    """Maximum response length in tokens; generation stops there."""
    train_batch_size: Sequences = 1024
    """Prompts per step, over all ranks."""
    gen_batch_size: Sequences | None = None
    """algorithm.filter_groups: prompts that are generated for at once; null: train_batch_size. A
    larger number costs fewer calls of the engine where many groups are dropped, and drops more
    surplus ones."""
    shuffle: bool = True
    """Shuffle the training prompts in each epoch. The order is a function of trainer.seed and the
    epoch."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than max_prompt_length, with a warning that counts them. false: see
    truncation."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """Behaviour for a prompt longer than max_prompt_length, without filter_overlong_prompts. error:
    a line that names its row. left, right: its first or last tokens are cut. middle: those between
    the first and the last half."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Behaviour for a row that cannot be used: a null, empty or malformed prompt, invalid JSON, a
    chat template that fails, a data source without a rule, a rule without a reference answer.
    error: a line that names file and row.
    skip: such rows are left out, with a warning that counts them and names the first."""
    chat_template_path: str | None = None
    """File with a chat template (Jinja), used in place of the tokenizer's. Exports keep the
    tokenizer's. null: the tokenizer's."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments for the chat template."""
    cache_dir: str | None = None
    """Directory of tokenised prompts, for a quick start. An entry's name is a hash of the file's
    content, tokenizer, template and settings, so that several runs can share the directory. null:
    every start tokenises."""
