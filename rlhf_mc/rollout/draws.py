"""The random draws of one call of a rollout engine on a CPU: keys of the noise, and log-probs of the drawn tokens, as
arrays over all requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlhf_mc.rollout.base import Request, Sampling

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


class Draws:
    """The requests of one call, by their numbers."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._seeds = np.zeros(0, dtype=np.uint64)
        self._prompt_lens = np.zeros(0, dtype=np.int64)
        self._log_probs = np.zeros((0, sampling.max_tokens), dtype=np.float32)

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests."""
        more = max(0, 1 + max(request.number for request in requests) - len(self._seeds))
        for name in ("_seeds", "_prompt_lens", "_log_probs") if more else ():
            rows = getattr(self, name)
            setattr(self, name, np.concatenate([rows, np.zeros((more, *rows.shape[1:]), rows.dtype)]))
        for request in requests:
            self._seeds[request.number] = request.seed
            self._prompt_lens[request.number] = len(request.prompt)
            self._log_probs[request.number, : len(request.begun.log_probs)] = request.begun.log_probs

    def keys(self, requests: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Return the key of each draw, [rows] int64: SplitMix64 of the request's seed at this position.

        requests: [rows] numbers of requests. positions: [rows] place of the drawn token in its sequence. A key depends
        on seed and position alone, so that neither the batch nor a repeated draw changes a token. The source of the
        function: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014)."""
        # Unsigned integers wrap around, as the function demands.
        key = self._seeds[requests] + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
        for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
            key = (key ^ (key >> shift)) * factor
        return torch.from_numpy((key ^ (key >> _SHIFTS[2])).view(np.int64))

    def record(self, requests: np.ndarray, positions: np.ndarray, log_probs: np.ndarray) -> None:
        """Store the log-probs [rows] float32 of tokens drawn at these positions."""
        self._log_probs[requests, positions - self._prompt_lens[requests]] = log_probs

    def log_probs(self, request: int, num_tokens: int) -> list[float]:
        """Return the log-probs of the first num_tokens tokens of a response."""
        log_probs: list[float] = self._log_probs[request, :num_tokens].tolist()
        return log_probs
