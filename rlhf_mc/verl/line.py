"""One line of the report on verl's settings, for the converters in values.py, correction.py and parallelism.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_mc.verl.keys import Kind


@dataclass(frozen=True)
class Line:
    """One line of the report: what becomes of a setting of verl's."""

    kind: Kind
    text: str = ""
    """The reason, or what has changed."""
    ours: str | None = None
    """Our key; None: there is nothing to set."""
    value: Any = None
    """Our value."""


Settings = Mapping[str, Any]
"""verl's settings by key, without actor_rollout_ref."""


def same(key: str, value: Any, text: str = "") -> Line:
    """Return the line of a setting that keeps its name."""
    return Line("same", text, key, value)


def renamed(key: str, value: Any, text: str = "") -> Line:
    """Return the line of a setting that has another name here."""
    return Line("renamed", text, key, value)


def number(verl: Settings, key: str, default: int = 0) -> int:
    """Return a number of verl's settings, or the default where it is null, absent or no number."""
    value = verl.get(key)
    return value if type(value) is int else default
