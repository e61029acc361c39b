"""The table of verl's settings (table.yaml), and the lookup of a key's row."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from rlhf_mc.config.yaml_reader import parse_yaml
from rlhf_mc.verl import adapters, correction, multi_turn, parallelism, values
from rlhf_mc.verl.keys import OFF, Kind, MappedSetting, Settings, plain_key

Converter = Callable[[str, Any, Settings], MappedSetting | None]
_MODULES = (values, adapters, correction, multi_turn, parallelism)


@dataclass(frozen=True)
class Row:
    """A row: the outcome of some settings of verl's. table.yaml describes the fields."""

    kind: Kind | None = None
    """None: the row has a converter alone."""
    text: str = ""
    """Our key (renamed), or the reason."""
    values: tuple[Any, ...] = OFF
    convert: Converter | None = None
    hint: str | None = None

    def advice(self) -> str | None:
        """Return what to do with the key in a config of ours, or None."""
        if self.hint is not None or self.kind is None:
            return self.hint
        if self.kind == "renamed":
            return f"use {self.text}"
        return self.text if self.kind == "not supported" else f"{self.text}: leave it out"


@functools.cache
def rows() -> dict[str, Row]:
    """Return the rows of table.yaml by key."""
    path = Path(__file__).with_name("table.yaml")
    entries = parse_yaml(path.read_text(), str(path))
    pairs = [(key, _row(entry)) for entry in entries for key in _split(entry["keys"])]
    table = dict(pairs)
    assert len(table) == len(pairs), "a key has two rows"
    return table


def find_rows(key: str) -> Iterator[Row]:
    """Yield the rows of verl's key, the most specific first. A renamed key has the key's role."""
    for name in _names(key):
        row = rows().get(name)
        if row is not None and row.text.startswith("role."):
            row = replace(row, text=key.partition(".")[0] + row.text.removeprefix("role"))
        if row is not None:
            yield row


def key_hint(key: str) -> str | None:
    """Return what to do with a key of verl's in a config of ours, or None if the table lacks it."""
    return next(filter(None, (row.advice() for row in find_rows(plain_key(key)))), None)


def _row(entry: dict[str, Any]) -> Row:
    kind = next((kind for kind in get_args(Kind) if kind in entry), None)
    convert = entry.get("convert")
    function = next(
        (getattr(m, convert) for m in _MODULES if convert and hasattr(m, convert)), None
    )
    assert (function is None) == (convert is None), convert
    return Row(
        kind,
        entry[kind] if kind is not None else "",
        tuple(entry.get("values", OFF)),
        function,
        entry.get("hint"),
    )


def _split(text: str) -> Iterator[str]:
    """Yield the keys of a text with blanks between them, and {a,b} groups in them."""
    for key in text.split():
        match = re.fullmatch(r"(.*?)\{(.*?)\}(.*)", key)
        if match is None:
            yield key
        else:
            yield from _split(" ".join(match[1] + name + match[3] for name in match[2].split(",")))


def _names(key: str) -> Iterator[str]:
    """Yield the names in the table that a key may have, the most specific first."""
    parts = key.split(".")
    yield key
    for start in range(1, len(parts)):
        yield f"*.{'.'.join(parts[start:])}"
    for end in range(len(parts), 0, -1):
        yield f"{'.'.join(parts[:end])}.*"
        for start in range(1, end):
            yield f"*.{'.'.join(parts[start:end])}.*"
