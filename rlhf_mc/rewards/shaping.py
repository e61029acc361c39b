"""Shaping of scores by the length of the response, in training."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_mc.config.reward_schema import OverlongBufferConfig
from rlhf_mc.rewards.results import Score

OVERLONG = "overlong"
"""The part of a score that is the penalty of a long response."""


def overlong_penalty(length: int, max_length: int, buffer_len: int, penalty_factor: float) -> float:
    """Return DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, equation 13), times penalty_factor: 0
    up to max_length - buffer_len tokens, then linear, -penalty_factor at max_length. Lengths are in tokens."""
    excess = length - (max_length - buffer_len)
    return -penalty_factor * min(excess, buffer_len) / buffer_len if excess > 0 else 0.0


def penalize_overlong(
    scores: Sequence[Score], response_lens: Sequence[int], max_response_length: int, cfg: OverlongBufferConfig
) -> list[Score]:
    """Return the scores with the part `overlong`. response_lens: tokens of each response."""
    return [
        score.plus(OVERLONG, overlong_penalty(length, max_response_length, cfg.len, cfg.penalty_factor))
        for score, length in zip(scores, response_lens, strict=True)
    ]
