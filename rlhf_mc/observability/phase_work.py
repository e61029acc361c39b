"""The waiting of this rank for others, and the amounts of its work, in each phase of a profiled
step.

profile.py decides which steps are profiled. In other steps nothing is recorded here.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from rlhf_mc import platform
from rlhf_mc.runtime.work import totals
from rlhf_mc.torch_patches import watched_communication

WHOLE = "profiled_step"
"""The phase around all others of a step that is recorded."""
_NOT_RECORDED = contextlib.nullcontext()
_current: PhaseWork | None = None


class PhaseWork:
    """Sums by phase of one step. A phase includes the phases inside it."""

    def __init__(self) -> None:
        self.waiting: dict[str, float] = defaultdict(float)
        """Seconds inside collectives and messages, in which a rank waits for others, and the
        transfers themselves. On a GPU: seconds for which they hold up the stream of the
        computation."""
        self.amounts: dict[str, dict[str, float]] = defaultdict(dict)
        """Amounts of work by phase, as runtime/work.py counts them."""
        self._waits: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the body as a phase. It ends with the device synchronised."""
        first = len(self._waits)
        before = dict(totals)
        with platform.named_range(name):
            yield
        for kind, total in totals.items():
            if total != before.get(kind):
                self.amounts[name][kind] = (
                    self.amounts[name].get(kind, 0.0) + total - before.get(kind, 0.0)
                )
        self.waiting[name] += sum(platform.seconds_between(*wait) for wait in self._waits[first:])

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """Record the body as waiting for other ranks."""
        start = platform.time_mark()
        yield
        self._waits.append((start, platform.time_mark()))


@contextlib.contextmanager
def recorded() -> Iterator[PhaseWork]:
    """Record the work of the phases in the body."""
    global _current
    work = PhaseWork()
    _current = work
    try:
        with platform.recorded_ranges(), watched_communication(work.wait), work.phase(WHOLE):
            yield work
            platform.synchronize()
    finally:
        _current = None


def observed(phase: str) -> contextlib.AbstractContextManager[None]:
    """Return a context that records its body as a phase, if work is recorded."""
    return _NOT_RECORDED if _current is None else _current.phase(phase)
