"""Numbers of one step by key: accumulated over mini-batches, summarised from tensors, timed by phase.

Nothing here communicates; values that need a reduction over ranks arrive reduced. docs/metrics.md lists the keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch

from rlhf_mc.runtime.rank_status import RankStatus

Reduction = Literal["mean", "sum", "max", "min", "last"]


class Metrics:
    """Floats by key. A key that is added several times within a step is reduced to one number."""

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[float, float]]] = {}
        self._reductions: dict[str, Reduction] = {}

    def add(self, key: str, value: float | torch.Tensor, reduction: Reduction = "mean", weight: float = 1.0) -> None:
        """Add one value (a number or a tensor of one element). `weight` counts for "mean" alone: sum(w v) / sum(w)."""
        known = self._reductions.setdefault(key, reduction)
        assert known == reduction, f"metric {key} is reduced by {known} and by {reduction}"
        self._values.setdefault(key, []).append((float(value), weight))

    def update(self, values: Mapping[str, float | torch.Tensor], reduction: Reduction = "mean") -> None:
        """Add each item of a dict."""
        for key, value in values.items():
            self.add(key, value, reduction)

    def result(self) -> dict[str, float]:
        """One float per key, in the order in which the keys came."""
        return {key: _reduce(self._reductions[key], pairs) for key, pairs in self._values.items()}


def _reduce(reduction: Reduction, pairs: list[tuple[float, float]]) -> float:
    values = [value for value, _ in pairs]
    match reduction:
        case "mean":
            total_weight = sum(weight for _, weight in pairs)
            return sum(value * weight for value, weight in pairs) / total_weight if total_weight else float("nan")
        case "sum":
            return sum(values)
        case "max":
            return max(values)
        case "min":
            return min(values)
        case "last":
            return values[-1]


def summarize(prefix: str, values: torch.Tensor) -> dict[str, float]:
    """`{prefix/mean, prefix/max, prefix/min}` of a tensor of any shape and type, the mean in float64; of an empty
    tensor NaN."""
    if values.numel() == 0:
        return {f"{prefix}/{name}": float("nan") for name in ("mean", "max", "min")}
    values = values.detach().double()
    return {
        f"{prefix}/mean": values.mean().item(),
        f"{prefix}/max": values.max().item(),
        f"{prefix}/min": values.min().item(),
    }


def summarize_lengths(prefix: str, lengths: torch.Tensor, limit: int) -> dict[str, float]:
    """As summarize, for lengths in tokens, and `prefix/clip_ratio`: the share of them that reached `limit`."""
    clip_ratio = (lengths >= limit).double().mean().item()  # of no lengths: NaN, as the others
    return {**summarize(prefix, lengths), f"{prefix}/clip_ratio": clip_ratio}


class PhaseTimer:
    """Wall-clock seconds by phase of one step. A phase entered twice adds up; phases may nest."""

    def __init__(self, synchronize: Callable[[], None] | None = None, place: RankStatus | None = None) -> None:
        """`synchronize` waits for the device, so that a phase is charged for the kernels it started. `place` is told
        of each phase."""
        self._synchronize = synchronize or (lambda: None)
        self._place = place or RankStatus()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the body's time to `name`, also when it raises; the exception then carries the note "in phase <name>",
        the innermost phase first."""
        self._synchronize()
        start = time.perf_counter()
        self._place.enter(name)
        try:
            yield
            self._synchronize()
            self._place.leave()
        except Exception as error:
            error.add_note(f"in phase {name}")
            raise
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def result(self) -> dict[str, float]:
        """`{timing_s/<phase>: seconds}` of the phases left so far."""
        return {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
