"""The metrics that a run logs, as metrics.yaml declares them. No torch."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rlhf_mc.config.yaml_reader import parse_yaml

_PLACEHOLDER = r"<\w+>|(?<=@)[Nk]\b"


@dataclass(frozen=True)
class Metric:
    """One metric, or several that differ in a part of the key."""

    keys: str
    """Patterns of the keys, with spaces between them. {a,b} are alternatives; <name> is any text; N
    and k after @ are numbers."""
    meaning: str
    """Markdown, as all texts here."""
    unit: str
    """Unit of the value. "share": from 0 to 1; "count": a number of things; "–": a number without a
    unit."""
    reduction: str = "–"
    """Reduction to one number over tokens, responses, mini-batches or ranks. "–": there is one
    number."""
    watch_for: str = ""
    """The values that call for attention, and what to do."""
    is_users_own: bool = False
    """The keys are named by a function of the user. Such a row explains keys and declares none: a
    key that no other row has is undeclared."""

    def matches(self, key: str) -> bool:
        """Return whether the key is one of this metric's."""
        return self._pattern.fullmatch(key) is not None

    @property
    def num_literal(self) -> int:
        """The number of characters of the patterns that are no placeholders: more of them are more
        specific."""
        return max(len(re.sub(_PLACEHOLDER, "", key)) for key in self._spellings)

    @cached_property
    def _spellings(self) -> list[str]:
        return [spelling for key in self.keys.split() for spelling in expanded(key)]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(_regular_expression, self._spellings)))


@dataclass(frozen=True)
class Section:
    """The metrics of one part of docs/metrics.md."""

    title: str
    metrics: Sequence[Metric]
    text: str = ""
    """Paragraphs before the table."""


def expanded(text: str) -> list[str]:
    """Return each spelling of a text with alternatives: "a/{b,c}" -> ["a/b", "a/c"]."""
    parts = [part.split(",") for part in re.split(r"\{([^}]*)\}", text)]
    return ["".join(choice) for choice in itertools.product(*parts)]


def _regular_expression(key: str) -> str:
    """Return the regular expression of a key with placeholders."""
    values = [
        ".+" if placeholder.startswith("<") else r"\d+"
        for placeholder in re.findall(_PLACEHOLDER, key)
    ]
    literals = map(re.escape, re.split(_PLACEHOLDER, key))
    return "".join(literal + value for literal, value in zip(literals, [*values, ""], strict=True))


@functools.cache
def sections() -> tuple[Section, ...]:
    """Return the sections of metrics.yaml, in the order of the page."""
    path = Path(__file__).with_name("metrics.yaml")
    return tuple(
        Section(row["title"], [Metric(**metric) for metric in row["metrics"]], row.get("text", ""))
        for row in parse_yaml(path.read_text(encoding="utf-8"), str(path))
    )


@functools.lru_cache(maxsize=4096)
def find(key: str) -> Metric | None:
    """Return the declaration of a logged key, the most specific one; None if there is none."""
    rows = (row for section in sections() for row in section.metrics)
    fitting = [row for row in rows if not row.is_users_own and row.matches(key)]
    return max(fitting, key=lambda row: row.num_literal, default=None)


def undeclared(keys: Iterable[str]) -> list[str]:
    """Return the keys without a declaration, in order."""
    return sorted(key for key in keys if find(key) is None)
