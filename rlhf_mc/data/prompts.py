"""The tokenised prompts of files: each rank makes a part of them, and every rank has all. source.py
reads the files, tokenise.py makes tokens of a row, order.py decides which prompts a step draws.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf_mc.config.errors import NodeError, UserError, error_prefix
from rlhf_mc.config.schema import DataConfig
from rlhf_mc.data.dataset import FilePrompts, Prompts
from rlhf_mc.data.source import AGENT, EXTRA, REFERENCE, ColumnError, Rows, digest, open_rows
from rlhf_mc.data.tokenise import RowTokenizer, TooLongError
from rlhf_mc.runtime.console import global_rank
from rlhf_mc.runtime.work import counted
from rlhf_mc.topology.consensus import (
    gather_objects,
    my_share,
    on_every_rank,
)

logger = logging.getLogger(__name__)

_Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
NAMED = 3
"""Bad rows that a warning names; the others are counted."""


@dataclass
class Counts:
    """Numbers of rows of a file: all, and those that are dropped, truncated or skipped."""

    num_rows: int = 0
    num_overlong: int = 0
    """Dropped: longer than data.max_prompt_length."""
    num_truncated: int = 0
    num_bad: int = 0
    """Skipped: cannot be used."""
    problems: list[str] = field(default_factory=list)
    """Problems of the first bad rows: "row 3: ...", without the file's name."""


def load_prompts(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    cfg: DataConfig,
    max_samples: int,
    key: str = "data.train_files",
    by_rule: bool = True,
    with_messages: bool = False,
    teacher_columns: Mapping[str | None, str] | None = None,
) -> Prompts:
    """Return the prompts of all files, in order: of the first `max_samples` rows, or of all rows if
    it is -1.

    Chat messages are rendered by the tokenizer's chat template, with the generation prompt added. A
    plain string is one user message if the tokenizer has a chat template, else it is encoded as it
    is. Prompts of more than cfg.max_prompt_length tokens are dropped with a warning
    (cfg.filter_overlong_prompts), truncated (cfg.truncation) or refused. An unusable row is skipped
    with a warning, or a UserError that names `key` (the setting that lists the files), file and row
    (cfg.on_bad_row). by_rule: require the columns that rules need (source.scored_by_rule).

    Each rank renders and tokenises a consecutive part of each file's rows, and the tokens are
    gathered: every rank must call it, and has the same prompts, or raises the same error, as a
    process alone. with_messages: Prompt.messages is kept. teacher_columns: the columns of
    Prompt.teacher_ids, by data source; None: of all rows."""
    rows_to_tokens = RowTokenizer(tokenizer, cfg, by_rule, teacher_columns)
    prompts: list[FilePrompts] = []
    total = Counts()
    for file in files:
        most_rows = None if max_samples < 0 else max_samples - total.num_rows
        where = f"{key} {file}"
        rows = _open(where, file, cfg, by_rule, (teacher_columns or {}).values()).first(most_rows)
        share = _tokenised_share(where, rows, rows_to_tokens, cfg)
        arrays, counts = _gathered(share, len(rows))
        _warn(where, counts, cfg)
        total.num_rows += counts.num_rows
        total.num_bad += counts.num_bad
        messages_key = cfg.prompt_key if with_messages else None
        source = rows.keep(
            (cfg.reward_fn_key, REFERENCE, EXTRA, *([messages_key, AGENT] if messages_key else []))
        )
        prompts.append(FilePrompts(*arrays, source, cfg.reward_fn_key, where, messages_key))
    _check_any(f"{key} {', '.join(files)}", sum(len(file.lens) for file in prompts), total, cfg)
    return Prompts(prompts)


def _check_any(where: str, num_prompts: int, total: Counts, cfg: DataConfig) -> None:
    """Raise UserError if there is no prompt."""
    if total.num_rows == 0:
        raise UserError(f"{where}: no rows")
    if num_prompts == 0:
        skipped = f", and {total.num_bad} bad rows are skipped" if total.num_bad else ""
        raise UserError(
            f"{where}: all {total.num_rows - total.num_bad} prompts are longer than"
            f" data.max_prompt_length {cfg.max_prompt_length} tokens{skipped}"
        )


def _warn(where: str, counts: Counts, cfg: DataConfig) -> None:
    """Warn, on rank 0, of the rows of a file that are no prompts, or no whole ones."""
    if global_rank() != 0:
        return
    for count, what in (
        (counts.num_overlong, f"dropped: longer than {cfg.max_prompt_length} tokens"),
        (counts.num_truncated, f"truncated to {cfg.max_prompt_length} tokens"),
    ):
        if count:
            logger.warning("%s: %d of %d prompts %s", where, count, counts.num_rows, what)
    if counts.num_bad:
        more = "; ..." if counts.num_bad > len(counts.problems) else ""
        logger.warning(
            "%s: %d of %d rows skipped (data.on_bad_row): %s%s",
            where, counts.num_bad, counts.num_rows, "; ".join(counts.problems), more,
        )  # fmt: skip


# ---------------------------------------------------------------- one file


def _open(where: str, file: str, cfg: DataConfig, by_rule: bool, columns: Collection[str]) -> Rows:
    """Return the rows of a file. Raise the same UserError on every rank if one cannot read it, or
    has another file. Every rank must call it."""

    def read() -> tuple[Rows, str]:
        with error_prefix(f"{where}:"):
            return open_rows(file, cfg, by_rule, columns), digest(file)

    rows, content = on_every_rank(read)
    sizes, contents = zip(*gather_objects((len(rows), content)), strict=True)
    for rank, (num_rows, other) in enumerate(zip(sizes, contents, strict=True)):
        if other != contents[0]:
            raise UserError(
                f"{where}: {sizes[0]} rows on rank 0 and {num_rows} on rank {rank}, SHA-256"
                f" {contents[0][:8]} and {other[:8]}; every node must have the same file"
            )
    return rows


@dataclass
class _Share:
    """A rank's part of the prompts of one file, or the first error in it."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    """The tokens of its prompts, end to end."""
    lens: array[int] = field(default_factory=lambda: array("i"))
    rows: array[int] = field(default_factory=lambda: array("i"))
    """Row of each prompt."""
    teacher_lens: array[int] = field(default_factory=lambda: array("i"))
    counts: Counts = field(default_factory=Counts)
    error: UserError | None = None
    order: tuple[int, int] = (0, 0)
    """Order of the error: the lowest of all ranks is raised, a column's before a row's."""


def _tokenised_share(
    where: str, rows: Rows, rows_to_tokens: RowTokenizer, cfg: DataConfig
) -> _Share:
    """Return this rank's share of a file's prompts."""
    share = _Share()
    numbers = my_share(len(rows))
    read = counted(
        zip(numbers, rows.read(numbers), strict=True),
        len(numbers),
        "rows",
        f"tokenising {Path(where).name}",
    )
    try:
        for number, row in read:
            share.order = (1, number)
            _add_row(share, number, row, f"{where}, {rows.row_name(number)}", rows_to_tokens, cfg)
    except ColumnError as error:
        return _Share(error=NodeError(f"{where}: {error}"), order=(0, error.number))
    except UserError as error:
        return _Share(error=error, order=share.order)
    finally:
        read.close()
    prefix = f"{where}, "
    share.counts.problems = [problem.removeprefix(prefix) for problem in share.counts.problems]
    return share


def _add_row(
    share: _Share,
    number: int,
    row: dict[str, Any] | UserError,
    where: str,
    rows_to_tokens: RowTokenizer,
    cfg: DataConfig,
) -> None:
    """Add a row's prompt to the share, or count it. Raise UserError for one that is neither usable
    nor dropped."""
    try:
        if isinstance(row, UserError):
            raise UserError(f"{where}: {row}")
        token_ids, is_truncated = rows_to_tokens.tokens(row, where)
        teacher_ids, is_cut = rows_to_tokens.teacher_tokens(row, where)
    except TooLongError as error:
        if not cfg.filter_overlong_prompts:
            raise UserError(str(error)) from None
        share.counts.num_overlong += 1
        return
    except UserError as error:
        if cfg.on_bad_row == "error":
            raise
        share.counts.num_bad += 1
        if share.counts.num_bad <= NAMED:
            share.counts.problems.append(str(error))
        return
    share.counts.num_truncated += is_truncated or is_cut
    share.tokens.extend([*token_ids, *teacher_ids])
    share.lens.append(len(token_ids) + len(teacher_ids))
    share.rows.append(number)
    share.teacher_lens.append(len(teacher_ids))


def _gathered(share: _Share, num_rows: int) -> tuple[_Arrays, Counts]:
    """Return the prompts of all ranks' shares of one file, as in FilePrompts: tokens, lens,
    rows and teacher_lens. Every rank must call it."""
    shares = gather_objects(share)
    if failed := [other for other in shares if other.error is not None]:
        raise cast(UserError, min(failed, key=lambda other: other.order).error)

    def joined(name: str) -> np.ndarray:
        return np.concatenate([np.frombuffer(getattr(other, name), np.int32) for other in shares])

    counts = Counts(
        num_rows,
        sum(other.counts.num_overlong for other in shares),
        sum(other.counts.num_truncated for other in shares),
        sum(other.counts.num_bad for other in shares),
        [problem for other in shares for problem in other.counts.problems][:NAMED],
    )
    return (joined("tokens"), joined("lens"), joined("rows"), joined("teacher_lens")), counts
