"""Parquet files of prompts in verl's schema, written and read as plain rows: one dict per prompt.
What a row means (chat template, tokens, lengths) is prompts.py's subject, not this file's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_mc.config.errors import UserError

ROW_KEYS = ("data_source", "prompt", "ability", "reward_model", "extra_info")


def write_prompts(path: str | os.PathLike[str], rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows to a parquet file; the directory is made where it is missing.

    Each row: data_source (str), prompt (list of {role, content}), ability (str),
    reward_model {style, ground_truth}, extra_info {split, index, ...}. Parquet has one type per
    field, so ground_truth must be of one type in all rows.
    """
    assert rows, f"{path}: no rows to write"
    for i, row in enumerate(rows):
        assert set(row) == set(ROW_KEYS), f"row {i} has keys {sorted(row)}, expected {sorted(ROW_KEYS)}"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def read_rows(path: str, required: Sequence[str], optional: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Rows of one parquet file, with the required columns and those optional ones that it has.

    UserError where the file is missing, not readable as parquet, or lacks a required column.
    """
    if not os.path.isfile(path):
        raise UserError(f"data file {path}: no such file")
    try:
        with pq.ParquetFile(path) as file:
            found = file.schema_arrow.names
            missing = [name for name in required if name not in found]
            if missing:
                raise UserError(f"data file {path}: no column {missing[0]!r}; its columns are {', '.join(found)}")
            columns = [*required, *(name for name in optional if name in found)]
            return file.read(columns=columns).to_pylist()
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"data file {path}: not a readable parquet file ({reason})") from error
