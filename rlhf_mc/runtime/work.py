"""The work of this process, counted by whoever does it: responses generated, micro-batches run,
rows read, tokens. observability/phase_progress.py shows the pieces that it is doing, phase_work.py
the totals by phase of a profiled step.

As with logging, the counts belong to the process: code that works need not know who shows them, and
a tool counts as a run does. Counting costs an addition. The thread of the loop counts, other
threads read.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from rlhf_mc.runtime.garbage_collector import without_garbage_collector

T = TypeVar("T")


@dataclass(eq=False)
class Work:
    """One piece of work. A piece inside another piece is one unit of it, as a micro-batch of a
    mini-batch."""

    name: str
    """Name of the work; empty where the phase's name says it."""
    total: float
    """Units of the whole; 0: unknown."""
    unit: str
    """Name of the units, in the plural."""
    done: float = 0.0
    tokens: int = 0
    """Tokens generated so far; 0 where tokens are no measure of the work."""
    start: float = field(default_factory=time.monotonic)

    def advance(self, units: float = 1, tokens: int = 0) -> None:
        """Count units that are done."""
        self.done += units
        self.tokens += tokens


WAITING = "waiting for the other pool"
"""Name of the work of a rank that waits, without a time limit, for ranks of another pool."""

_stack: list[Work] = []
totals: dict[str, float] = defaultdict(float)
"""Amounts of work since the process began, by kind, as `count` names them."""


def count(**amounts: float) -> None:
    """Add to the totals: tokens, responses, expert_bytes, file_seconds, reward_seconds."""
    for kind, amount in amounts.items():
        totals[kind] += amount


@contextmanager
def working(name: str = "", total: float = 0, unit: str = "") -> Iterator[Work]:
    """Let the body be a piece of work of this process, which it counts by `advance`."""
    work = Work(name, total, unit)
    _stack.append(work)
    try:
        yield work
    finally:
        _stack.remove(work)


@contextmanager
def importing(name: str) -> Iterator[None]:
    """Let the body import large libraries, as a piece of work. Garbage collections, a sixth of the
    time, are off, and later ones leave out what has been imported: vLLM makes eight at its
    start."""
    with without_garbage_collector():
        try:
            with working(name):
                yield
        finally:
            gc.freeze()


def counted(items: Iterable[T], total: int, unit: str, name: str = "") -> Generator[T]:
    """Yield the items, each counted when the next one is asked for. All must be taken, or the
    iterator closed."""
    with working(name, total, unit) as work:
        for item in items:
            yield item
            work.advance()


def current() -> tuple[Work, ...]:
    """Return the pieces of work that this process is doing, each inside the one before."""
    return tuple(_stack)


def share_done(works: Sequence[Work]) -> float | None:
    """Return the share from 0 to 1 of the outermost counted piece that is done, with the pieces
    inside it; None if none is counted."""
    counted_works = [work for work in works if work.total > 0]
    share = 0.0
    unit = 1.0
    for work in counted_works:
        share += unit * min(work.done / work.total, 1.0)
        unit /= work.total
    return min(share, 1.0) if counted_works else None
