"""Types for the fields of the settings: numbers with their ranges, and the marker FreeOnResume.
Upper bounds exclude values on which a library fails, and no value of practical use. Checks of
several settings together are in checks.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar


@dataclass(frozen=True)
class Range:
    """Values from `low` to `high`, both included unless `open`, and `also`, a value with a special
    meaning."""

    low: float
    high: float
    open: bool = False
    also: int | None = None

    def violated_bound(self, value: float) -> str | None:
        """Return in words the bound that the value violates, or None if it is in the range."""
        if value == self.also:
            return None
        or_also = "" if self.also is None else f"{self.also} or "
        if value < self.low or (self.open and value == self.low):
            if self.low == 0 and self.also is None:
                return "above 0" if self.open else "0 or more"
            return f"{or_also}{'above' if self.open else 'at least'} {self.low:.15g}"
        if value > self.high or (self.open and value == self.high):
            return f"{or_also}{'below' if self.open else 'at most'} {self.high:.15g}"
        return None


MOST_SECONDS = 1e6
"""11 days. Libraries count milliseconds in 32 bits, at most 24 days."""
Count = Annotated[int, Range(1, 1_000_000_000)]
CountOrZero = Annotated[int, Range(0, 1_000_000_000)]
CountOrMinus1 = Annotated[int, Range(1, 1_000_000_000, also=-1)]
Tokens = Annotated[int, Range(1, 100_000_000)]
Sequences = Annotated[int, Range(1, 1_000_000)]
Ranks = Annotated[int, Range(1, 1_000_000)]
Layers = Annotated[int, Range(1, 100_000)]
Number = Annotated[float, Range(-1e6, 1e6)]
Positive = Annotated[float, Range(0, 1e6, open=True)]
PositiveOrZero = Annotated[float, Range(0, 1e6)]
Fraction = Annotated[float, Range(0, 1)]
FractionAbove0 = Annotated[float, Range(1e-9, 1)]
FractionBelow1 = Annotated[float, Range(0, 1 - 1e-9)]
InnerFraction = Annotated[float, Range(0, 1, open=True)]
Seconds = Annotated[int, Range(1, MOST_SECONDS)]
PositiveMinutes = Annotated[float, Range(0, MOST_SECONDS / 60, open=True)]
PositiveSeconds = Annotated[float, Range(0, MOST_SECONDS, open=True)]

T = TypeVar("T")
FREE_ON_RESUME = "free on a resume"
FreeOnResume = Annotated[T, FREE_ON_RESUME]
"""Type of a setting, or section, that may change on a resume and alters no step by itself. A resume
does not list it among the settings that differ from the checkpoint's."""
