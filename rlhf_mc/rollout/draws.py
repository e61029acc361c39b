"""The random draws of one call of a rollout engine on a CPU: keys of the noise, and log-probs of the drawn tokens, as
arrays over all requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlhf_mc.rollout.base import Sampling

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


class Draws:
    """The requests of one call, numbered in their order."""

    def __init__(self, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: Sampling) -> None:
        """seeds: of each request, from 0 to 2^64 - 1."""
        self.sampling = sampling
        self._seeds = np.array(seeds, dtype=np.uint64)
        self._prompt_lens = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        self._log_probs = np.zeros((len(prompts), sampling.max_tokens), dtype=np.float32)

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

    def log_probs(self, num_tokens: np.ndarray) -> np.ndarray:
        """Return the log-probs of the first num_tokens [requests] tokens of each response, end to end: float32."""
        is_drawn = np.arange(self._log_probs.shape[1]) < num_tokens[:, None]
        drawn: np.ndarray = self._log_probs[is_drawn]
        return drawn
