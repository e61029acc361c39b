"""Named ranges of Megatron-Core's schedules in traces: forward and backward of each micro-batch, messages between
pipeline stages, the reduction of gradients. Megatron-Core offers them as timers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from rlhf_mc import platform

_NAMES = {"forward-compute": "forward", "backward-compute": "backward"}


class _Timers:
    """Stands for Megatron-Core's Timers: what is timed becomes a named range."""

    def __init__(self) -> None:
        self._open: dict[str, Any] = {}
        self._name = ""

    def __call__(self, name: str, log_level: int | None = None) -> _Timers:
        """Choose the timer that the next call starts or stops. log_level: Megatron-Core's, unused."""
        self._name = name
        return self

    def start(self, barrier: bool = False) -> None:
        """Enter the range. barrier: unused, so that a trace shows how long ranks wait for others, and where."""
        self._open[self._name] = platform.named_range(_NAMES.get(self._name, self._name))
        self._open[self._name].__enter__()

    def stop(self, barrier: bool = False) -> None:
        """Leave the range."""
        self._open.pop(self._name).__exit__(None, None, None)

    def close(self) -> None:
        """Leave the ranges that an error has left open, the last first."""
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)


@contextlib.contextmanager
def schedule_ranges(config: Any) -> Iterator[None]:
    """Let Megatron-Core's schedule of a model with this config (TransformerConfig) mark its parts, where ranges are
    recorded."""
    if not platform.ranges_are_recorded():
        yield
        return
    config.timers = timers = _Timers()
    try:
        yield
    finally:
        timers.close()
        config.timers = None
