"""Files of prompts in verl's schema, parquet or JSONL: their rows, and the columns that a run
needs. No torch here."""

from __future__ import annotations

import contextlib
import hashlib
import os
from array import array
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_mc import json_files
from rlhf_mc.config.errors import NodeError, UserError, error_reason
from rlhf_mc.config.masking import one_line
from rlhf_mc.config.schema import Config, DataConfig, reward_models

REFERENCE = "reward_model"
"""Column of the reference answer: {"ground_truth": ...}."""
EXTRA = "extra_info"
AGENT = "agent_name"
"""Column of the agent: whether a row's conversation has tools."""
_MEDIA_READ_TOGETHER = 16
_NO_MEDIA = ": prompts and models are of text alone"
UNREAD = {
    **dict.fromkeys(("images", "image", "videos", "video", "audios", "audio"), _NO_MEDIA),
    "tools": (
        ": the tools of all rows are those of rollout.environment or "
        "data.apply_chat_template_kwargs"
    ),
}
"""Columns that other trainers read and this one does not, and why."""


def is_filled(value: Any) -> bool:
    """Return whether a column of UNREAD has a value in this row."""
    return json_files.without_nulls(value) not in (
        None,
        False,
        "",
        [],
        {},
        [None],
        [{}],
        "[]",
        "{}",
        "null",
    )


class ColumnError(NodeError):
    """A column that cannot be read."""

    def __init__(self, message: str, number: int = 0) -> None:
        """number: the column's place in the file's order."""
        super().__init__(message)
        self.number = number


# ---------------------------------------------------------------- parquet


class ParquetRows:
    """The rows of a parquet file."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def first(self, count: int | None) -> ParquetRows:
        """Return the first `count` rows; None: all."""
        return ParquetRows(self._table.slice(0, count))

    def read(self, numbers: range) -> Iterator[dict[str, Any] | UserError]:
        """Yield these rows, or the error of a row that cannot be read. Raise ColumnError for a
        column that cannot be read."""
        names = self._table.column_names
        part = self._table.slice(numbers.start, len(numbers))
        columns = [_column_values(part, number) for number in range(len(names))]
        for values in zip(*columns, strict=True):
            yield dict(zip(names, values, strict=True))

    def rows(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return these rows, without the columns that `keep` dropped."""
        # Table.take would join all chunks of a large file first; one row at a time takes three
        # times as long.
        slices = [self._table.slice(number, 1) for number in numbers]
        if not slices or self._table.num_columns == 0:
            return [{} for _ in slices]
        rows: list[dict[str, Any]] = pa.concat_tables(slices).combine_chunks().to_pylist()
        return rows

    def row_name(self, number: int) -> str:
        """Return the name of a row, for messages."""
        return f"row {number}"

    def keep(self, columns: Sequence[str]) -> ParquetRows:
        """Return the rows with at least these columns, in less memory where the format allows
        it."""
        return ParquetRows(
            self._table.select([name for name in self._table.column_names if name in columns])
        )


def _column_values(table: pa.Table, number: int) -> list[Any]:
    """Return a column as Python values. Raise ColumnError if a value has no Python form, such as a
    text that is not UTF-8 or a date out of Python's range."""
    try:
        values: list[Any] = table.column(number).to_pylist()
    except (pa.ArrowException, ValueError, ArithmeticError, LookupError, TypeError) as error:
        column = table.schema.field(number)
        reason = one_line(str(error))
        raise ColumnError(
            f"column {column.name!r} of type {column.type} cannot be read ({reason})", number
        ) from error
    return values


@contextlib.contextmanager
def _parquet_file(path: str, required: Sequence[str]) -> Iterator[pq.ParquetFile]:
    """Open a parquet file and read its footer. Raise NodeError if it cannot be read, or a required
    column is missing or not unique."""
    if not os.path.isfile(path):
        raise NodeError("no such file")
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            for name in required:
                if name not in names:
                    raise NodeError(
                        f"no column {name!r}; its columns are {', '.join(names)[:1000] or 'none'}"
                    )
                if names.count(name) > 1:
                    raise NodeError(f"{names.count(name)} columns {name!r}; one is expected")
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        reason = one_line(str(error), 300)
        raise NodeError(f"not a readable parquet file ({reason})") from error


def write_prompts(path: str | os.PathLike[str], rows: Sequence[dict[str, Any]]) -> None:
    """Write rows to a parquet file. A missing directory is created.

    Each row: prompt (list of {role, content}), usually data_source (str), ability (str),
    reward_model {style, ground_truth} and extra_info {split, index, ...}, and any others; the same
    in all rows. Parquet has one type per field, so ground_truth must be of one type in all rows.
    """
    assert rows, f"{path}: no rows to write"
    for i, row in enumerate(rows):
        assert row.keys() == rows[0].keys(), (
            f"row {i} has keys {sorted(row)}, row 0 has {sorted(rows[0])}"
        )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


# ---------------------------------------------------------------- JSONL


class JsonlRows:
    """The rows of a JSONL file: one object in each line. A line is parsed when its row is read. The
    methods are those of ParquetRows."""

    def __init__(self, lines: pa.LargeBinaryArray, numbers: Sequence[int]) -> None:
        """lines: the lines that are not blank. numbers: of each, from 1."""
        self._lines = lines
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._lines)

    def first(self, count: int | None) -> JsonlRows:
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
        return _parsed(self._lines[number].as_py())

    def row_name(self, number: int) -> str:
        return f"row {number} (line {self._numbers[number]})"

    def keep(self, columns: Sequence[str]) -> JsonlRows:
        return self


def _parsed(line: bytes) -> dict[str, Any]:
    """Return the object of a line. Raise UserError if it is not one."""
    try:
        row = json_files.parse(line)
    except ValueError as error:
        raise UserError(f"not valid JSON ({one_line(str(error))})") from error
    if not isinstance(row, dict):
        raise UserError(f"expected an object, found {repr(row)[:60]}")
    return row


def _check_first_object(path: str, required: Sequence[str]) -> None:
    """Raise NodeError unless the file can be read and the first object in it has the columns. Lines
    before it, which are no objects, are bad rows."""
    for number, line in _lines(path):
        try:
            row = _parsed(line)
        except UserError:
            continue
        for name in required:
            if name not in row:
                raise NodeError(
                    f"no column {name!r} in line {number}; it has {', '.join(row)[:1000] or 'none'}"
                )
        return


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the content of each line that is not blank. Raise NodeError if
    the file cannot be read."""
    if not os.path.isfile(path):
        raise NodeError("no such file")
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise NodeError(f"cannot be read ({error_reason(error)})") from error


# ---------------------------------------------------------------- either format


Rows = ParquetRows | JsonlRows
"""The rows of one file."""


def is_jsonl(path: str) -> bool:
    """Return whether the name is a JSONL file's; any other file is read as parquet."""
    return path.endswith((".jsonl", ".json"))


def needed_columns(cfg: DataConfig, by_rule: bool = True) -> tuple[str, ...]:
    """Return the required columns of a file of prompts. by_rule: as `scored_by_rule` returns."""
    return (cfg.prompt_key, cfg.reward_fn_key, REFERENCE) if by_rule else (cfg.prompt_key,)


def scored_by_rule(cfg: Config, key: str) -> bool:
    """Return whether rules score the rows of the setting `key` (data.train_files, data.val_files):
    they need data_source and reward_model. A function or an environment of the user's own, and in
    training a reward model, may do without."""
    if cfg.custom_reward_function.path is not None or cfg.rollout.environment.path is not None:
        return False
    return key != "data.train_files" or not reward_models(cfg)


def check_columns(path: str, required: Sequence[str]) -> None:
    """Raise NodeError unless the file can be read and has the columns. Of a parquet file the footer
    is read, of a JSONL file the lines up to the first object."""
    if is_jsonl(path):
        _check_first_object(path, required)
        return
    with _parquet_file(path, required):
        pass


def open_rows(path: str, cfg: DataConfig, by_rule: bool, columns: Collection[str] = ()) -> Rows:
    """Return the rows of a file, with these columns if it has them. Raise NodeError if it is
    missing, cannot be read, or lacks a required column."""
    required = needed_columns(cfg, by_rule)
    if is_jsonl(path):
        _check_first_object(path, required)
        numbers = array("q")
        lines = []
        for number, line in _lines(path):
            numbers.append(number)
            lines.append(line)
        return JsonlRows(pa.array(lines, pa.large_binary()), numbers)
    with _parquet_file(path, required) as file:
        others = dict.fromkeys((*needed_columns(cfg), EXTRA, AGENT, *columns))
        names = [name for name in others if name not in required]
        optional = [name for name in names if name in file.schema_arrow.names]
        table = file.read(columns=[*required, *optional])
        for name in UNREAD:
            if name in file.schema_arrow.names and name not in table.column_names:
                # Whether each row has some, since images may not fit into memory.
                batches = file.iter_batches(_MEDIA_READ_TOGETHER, columns=[name])
                filled = [
                    is_filled(value) for batch in batches for value in batch.column(0).to_pylist()
                ]
                table = table.append_column(name, pa.array(filled, pa.bool_()))
        return ParquetRows(table)


def digest(path: str) -> str:
    """Return the SHA-256 of a file. Raise NodeError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise NodeError(f"cannot be read ({error_reason(error)})") from error
