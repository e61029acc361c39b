"""The rows of one file of prompts, parquet or JSONL, and the columns that a run needs. No torch here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa

from rlhf_mc.config.errors import NodeError, UserError, error_reason
from rlhf_mc.config.schema import Config, DataConfig, reward_models
from rlhf_mc.data import jsonl, parquet

REFERENCE = "reward_model"
"""Column of the reference answer: {"ground_truth": ...}."""
EXTRA = "extra_info"


class Rows(Protocol):
    """The rows of one file."""

    def __len__(self) -> int: ...

    def first(self, count: int | None) -> Rows:
        """Return the first `count` rows; None: all."""
        ...

    def read(self, numbers: range) -> Iterator[dict[str, Any] | UserError]:
        """Yield these rows, or the error of a row that cannot be read. Raise ColumnError for a column that cannot be
        read."""
        ...

    def rows(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return these rows, without the columns that `keep` dropped."""
        ...

    def place(self, number: int) -> str:
        """Return the name of a row, for messages."""
        ...

    def keep(self, columns: Sequence[str]) -> Rows:
        """Return the rows with at least these columns, in less memory where the format allows it."""
        ...


class ColumnError(NodeError):
    """A column that cannot be read. number: its place in the file's order."""

    number = 0


class ParquetRows:
    """The rows of a parquet file."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def first(self, count: int | None) -> Rows:
        return ParquetRows(self._table.slice(0, count))

    def read(self, numbers: range) -> Iterator[dict[str, Any] | UserError]:
        names = self._table.column_names
        part = self._table.slice(numbers.start, len(numbers))
        columns = []
        for number, name in enumerate(names):
            try:
                columns.append(parquet.column_values(part, name))
            except NodeError as error:
                column_error = ColumnError(str(error))
                column_error.number = number
                raise column_error from error
        for values in zip(*columns, strict=True):
            yield dict(zip(names, values, strict=True))

    def rows(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        # Table.take would join all chunks of a large file first; one row at a time takes three times as long.
        slices = [self._table.slice(number, 1) for number in numbers]
        if not slices or self._table.num_columns == 0:
            return [{} for _ in slices]
        rows: list[dict[str, Any]] = pa.concat_tables(slices).combine_chunks().to_pylist()
        return rows

    def place(self, number: int) -> str:
        return f"row {number}"

    def keep(self, columns: Sequence[str]) -> Rows:
        return ParquetRows(self._table.select([name for name in self._table.column_names if name in columns]))


class JsonlRows:
    """The rows of a JSONL file. A line is parsed when its row is read."""

    def __init__(self, lines: pa.LargeBinaryArray, numbers: Sequence[int]) -> None:
        """lines: the lines that are not blank. numbers: of each, from 1."""
        self._lines = lines
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._lines)

    def first(self, count: int | None) -> Rows:
        return JsonlRows(self._lines.slice(0, count), self._numbers[:count])

    def read(self, numbers: range) -> Iterator[dict[str, Any] | UserError]:
        for number in numbers:
            try:
                yield self._row(number)
            except UserError as error:
                yield error

    def rows(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        return [self._row(number) for number in numbers]

    def _row(self, number: int) -> dict[str, Any]:
        return jsonl.parse(self._lines[number].as_py())

    def place(self, number: int) -> str:
        return f"row {number} (line {self._numbers[number]})"

    def keep(self, columns: Sequence[str]) -> Rows:
        return self


def is_jsonl(path: str) -> bool:
    """Return whether the file's name is that of a JSONL file; any other is read as parquet."""
    return path.endswith((".jsonl", ".json"))


def needed_columns(cfg: DataConfig, by_rule: bool = True) -> tuple[str, ...]:
    """Return the required columns of a file of prompts. by_rule: as `scored_by_rule` returns."""
    return (cfg.prompt_key, cfg.reward_fn_key, REFERENCE) if by_rule else (cfg.prompt_key,)


def scored_by_rule(cfg: Config, key: str) -> bool:
    """Return whether rules score the rows of the setting `key` (data.train_files, data.val_files): they need
    data_source and reward_model. A function of the user's own, and in training a reward model, may do without."""
    if cfg.custom_reward_function.path is not None:
        return False
    return key != "data.train_files" or not reward_models(cfg)


def check_columns(path: str, required: Sequence[str]) -> None:
    """Raise NodeError unless the file can be read and has the columns. Of a parquet file the footer is read, of a JSONL
    file the first line."""
    if is_jsonl(path):
        jsonl.check_columns(path, required)
    else:
        parquet.check_columns(path, required)


def open_rows(path: str, cfg: DataConfig, by_rule: bool) -> Rows:
    """Return the rows of a file. Raise NodeError if it is missing, cannot be read, or lacks a required column."""
    required = needed_columns(cfg, by_rule)
    if is_jsonl(path):
        jsonl.check_columns(path, required)
        return JsonlRows(*jsonl.read_lines(path))
    optional = [name for name in (*needed_columns(cfg), EXTRA) if name not in required]
    return ParquetRows(parquet.read_table(path, required, optional))


def digest(path: str) -> str:
    """Return the SHA-256 of a file. Raise NodeError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise NodeError(f"cannot be read ({error_reason(error)})") from error
