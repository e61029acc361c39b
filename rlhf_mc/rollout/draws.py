"""Arrays over all requests of one call of a rollout engine: log-probs of the drawn tokens, and on a
CPU the keys of the noise that draws them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from rlhf_mc.rollout.base import Request, Sampling

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


@functools.lru_cache(1 << 14)
def request_number(name: str) -> int:
    """Return a request's number from vLLM's request id, to which vLLM appends random characters."""
    return int(name.partition("-")[0])


class LogProbs:
    """Log-probs of all responses of one call, by the request's number."""

    def __init__(self, max_tokens: int) -> None:
        self._values = np.zeros((0, max_tokens), dtype=np.float32)
        self._lens = np.zeros(0, dtype=np.int64)

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests, with the log-probs of their partial responses."""
        self._values = _with_row(self._values, requests)
        self._lens = _with_row(self._lens, requests)
        for request in requests:
            partial = request.partial.log_probs
            self._values[request.number, : len(partial)] = partial
            self._lens[request.number] = len(partial)

    def append(self, requests: Sequence[int], log_probs: np.ndarray) -> None:
        """Append the log-probs [rows] float32 of the next tokens of these requests, each named
        once."""
        rows = np.asarray(requests)
        self._values[rows, self._lens[rows]] = log_probs
        self._lens[rows] += 1

    def of(self, request: int) -> list[float]:
        """Return the log-probs of a response."""
        log_probs: list[float] = self._values[request, : self._lens[request]].tolist()
        return log_probs


class Draws:
    """Random draws of one call, by the request's number."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._seeds = np.zeros(0, dtype=np.uint64)

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests."""
        self._seeds = _with_row(self._seeds, requests)
        for request in requests:
            self._seeds[request.number] = request.seed

    def keys(self, requests: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Return the key of each draw, [rows] int64: SplitMix64 of the request's seed at this
        position.

        requests: [rows] numbers of requests. positions: [rows] place of the drawn token in its
        sequence. A key depends on seed and position alone, so that neither the batch nor a repeated
        draw changes a token. The source of the function: Steele, Lea, Flood, "Fast splittable
        pseudorandom number generators" (2014)."""
        # Unsigned integers wrap around, as the function demands.
        key = self._seeds[requests] + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
        for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
            key = (key ^ (key >> shift)) * factor
        return torch.from_numpy((key ^ (key >> _SHIFTS[2])).view(np.int64))


def _with_row(rows: np.ndarray, requests: Sequence[Request]) -> np.ndarray:
    """Return the array with a row for each request's number; new rows are zeros. The number of rows
    at least doubles when it grows, since requests are added a few at a time, in the order of their
    numbers."""
    needed = 1 + max(request.number for request in requests)
    if needed <= len(rows):
        return rows
    grown = np.zeros((max(needed, 2 * len(rows)), *rows.shape[1:]), rows.dtype)
    grown[: len(rows)] = rows
    return grown
