"""Metrics of one step by key: means over mini-batches, summaries of tensors, seconds by phase.

Nothing here communicates: values that need a reduction over ranks are reduced before.
docs/metrics.md lists the keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from rlhf_mc.observability import phase_work
from rlhf_mc.runtime.rank_status import RankStatus


def mean_by_key(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return each key's mean over the rows that have it, in the order in which the keys first
    occur."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            values.setdefault(key, []).append(float(value))
    return {key: sum(column) / len(column) for key, column in values.items()}


def summarize(prefix: str, values: torch.Tensor) -> dict[str, float]:
    """Return `{prefix/mean, prefix/max, prefix/min}` of a tensor of any shape and type, on the
    host. The mean is taken in float64. All are NaN if the tensor is empty."""
    if values.numel() == 0:
        return {f"{prefix}/{name}": float("nan") for name in ("mean", "max", "min")}
    numbers = values.detach().double().numpy()  # on so few numbers torch takes three times as long
    return {
        f"{prefix}/mean": float(numbers.mean()),
        f"{prefix}/max": float(numbers.max()),
        f"{prefix}/min": float(numbers.min()),
    }


def summarize_lengths(
    prefix: str, lengths: torch.Tensor, limit: int, limited: torch.Tensor | None = None
) -> dict[str, float]:
    """Return `summarize` of lengths in tokens, and `prefix/clip_ratio`: the share of them that
    reached `limit`. limited: lengths with other tokens, of which it is the share; None: the
    lengths."""
    # NaN if empty
    clip_ratio = ((lengths if limited is None else limited) >= limit).double().mean().item()
    return {**summarize(prefix, lengths), f"{prefix}/clip_ratio": clip_ratio}


class PhaseTimer:
    """Wall-clock seconds by phase of one step. The times of a phase that is entered twice add up;
    phases may nest."""

    def __init__(
        self, synchronize: Callable[[], None] | None = None, status: RankStatus | None = None
    ) -> None:
        """synchronize: waits for the device, so that a phase's time includes the kernels that it
        launched. status: kept up to date with the current phase."""
        self._synchronize = synchronize or (lambda: None)
        self._status = status or RankStatus()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the body's time to `name`, also if it raises. The exception then has the note "in
        phase <name>", the innermost phase first."""
        self._synchronize()
        start = time.perf_counter()
        self._status.enter(name)
        try:
            with phase_work.observed(name):
                yield
                self._synchronize()
            self._status.leave()
        except Exception as error:  # raised again, with a note
            error.add_note(f"in phase {name}")
            raise
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def set(self, name: str, seconds: float) -> None:
        """Set the time of a phase to that of other ranks."""
        self._seconds[name] = seconds

    def result(self) -> dict[str, float]:
        """Return `{timing_s/<phase>: seconds}` of the phases that have ended."""
        return {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
