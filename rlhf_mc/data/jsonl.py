"""JSONL files of prompts: one object in each line, in verl's schema. Blank lines are ignored. source.py makes rows of
them. No torch here.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from rlhf_mc import json_files
from rlhf_mc.config.errors import NodeError, UserError, error_reason


def parse(line: bytes) -> dict[str, Any]:
    """Return the object of a line. Raise UserError if it is not one."""
    try:
        row = json_files.parse(line)
    except ValueError as error:
        raise UserError(f"not valid JSON ({' '.join(str(error).split())})") from error
    if not isinstance(row, dict):
        raise UserError(f"expected an object, found {repr(row)[:60]}")
    return row


def check_columns(path: str, required: Sequence[str]) -> None:
    """Raise NodeError unless the file can be read and the first object in it has the columns. Lines before it, which
    are no objects, are bad rows."""
    for number, line in _lines(path):
        try:
            row = parse(line)
        except UserError:
            continue
        for name in required:
            if name not in row:
                raise NodeError(f"no column {name!r} in line {number}; it has {', '.join(row)[:1000] or 'none'}")
        return


def read_lines(path: str) -> tuple[pa.LargeBinaryArray, array[int]]:
    """Return the lines that are not blank, and the number of each, from 1. Raise NodeError if the file cannot be
    read."""
    numbers = array("q")
    lines = []
    for number, line in _lines(path):
        numbers.append(number)
        lines.append(line)
    return pa.array(lines, pa.large_binary()), numbers


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    if not os.path.isfile(path):
        raise NodeError("no such file")
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise NodeError(f"cannot be read ({error_reason(error)})") from error
