"""Parquet files of prompts in verl's schema. source.py makes rows of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_mc.config.errors import NodeError


def write_prompts(path: str | os.PathLike[str], rows: Sequence[dict[str, Any]]) -> None:
    """Write rows to a parquet file. A missing directory is created.

    Each row: prompt (list of {role, content}), usually data_source (str), ability (str), reward_model {style,
    ground_truth} and extra_info {split, index, ...}, and any others; the same in all rows. Parquet has one type per
    field, so ground_truth must be of one type in all rows.
    """
    assert rows, f"{path}: no rows to write"
    for i, row in enumerate(rows):
        assert row.keys() == rows[0].keys(), f"row {i} has keys {sorted(row)}, row 0 has {sorted(rows[0])}"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def check_columns(path: str, required: Sequence[str]) -> None:
    """Raise NodeError unless the file is parquet and has the columns. Only its footer is read."""
    with _opened(path) as file:
        _require(file, required)


def read_table(path: str, required: Sequence[str], optional: Sequence[str] = ()) -> pa.Table:
    """Return one parquet file's required columns and the optional ones that exist. Raise NodeError if the file is
    missing, not readable as parquet, or lacks a required column."""
    with _opened(path) as file:
        _require(file, required)
        return file.read(columns=[*required, *(name for name in optional if name in file.schema_arrow.names)])


def column_values(table: pa.Table, name: str) -> list[Any]:
    """Return a column as Python values. Raise NodeError if a value has no Python form, such as a text that is not UTF-8
    or a date out of Python's range."""
    try:
        values: list[Any] = table.column(name).to_pylist()
    except (pa.ArrowException, ValueError, ArithmeticError, LookupError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise NodeError(f"column {name!r} of type {table.column(name).type} cannot be read ({reason})") from error
    return values


@contextlib.contextmanager
def _opened(path: str) -> Iterator[pq.ParquetFile]:
    if not os.path.isfile(path):
        raise NodeError("no such file")
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        reason = " ".join(str(error).split())[:300]
        raise NodeError(f"not a readable parquet file ({reason})") from error


def _require(file: pq.ParquetFile, columns: Sequence[str]) -> None:
    found = file.schema_arrow.names
    for name in columns:
        if name not in found:
            raise NodeError(f"no column {name!r}; its columns are {', '.join(found)[:1000] or 'none'}")
        if found.count(name) > 1:
            raise NodeError(f"{found.count(name)} columns {name!r}; one is expected")
