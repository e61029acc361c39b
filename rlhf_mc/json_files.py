"""JSON text, and the regular files that hold it. Whatever a file contains, a reader gets a value,
an OSError or a ValueError. No torch here.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file. Raise OSError for anything else: a reader of a FIFO
    waits for a writer, and a device may have no end."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        return file.read()


def parse(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raise ValueError if it is no JSON, or its brackets are
    nested too deep."""
    try:
        return json.loads(text)  # noqa: TID251
    except RecursionError:
        raise ValueError("brackets are nested too deep") from None


def read(path: str | os.PathLike[str]) -> Any:
    """Return the value of a JSON file. Raise OSError if it cannot be read, ValueError if it is no
    JSON."""
    return parse(read_bytes(path))


def readable_text(value: Any) -> str:
    """Return JSON on one line for people to read: only what UTF-8 cannot encode, a lone surrogate,
    is escaped."""
    return json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()


def without_nulls(value: Any) -> Any:
    """Return a value without the fields of objects that are null, at all depths; elements of lists
    stay. Parquet has the fields of any row in all rows."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value
