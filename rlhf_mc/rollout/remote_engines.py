"""The rollout engines as seen by a rank of another pool, which has none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_mc.rollout.base import KV_CACHE, WEIGHTS, Request, RolloutEngine, Sampling

if TYPE_CHECKING:
    import torch

    from rlhf_mc.data.batch import Generation


class RemoteEngines(RolloutEngine):
    """Engines without a part on this rank: it generates nothing, and no weight is written here."""

    max_running = 0
    cached_token_cost = 0.0
    awake = frozenset({WEIGHTS, KV_CACHE})
    """Engines with ranks of their own never sleep."""
    summary = ""
    num_parameters = 0
    weight_bytes = 0
    num_unfinished = 0
    num_running = 0

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        """groups: the ranks of each engine, in the order of their tensor-parallel ranks."""
        self.groups = groups

    @property
    def params(self) -> dict[str, torch.Tensor]:
        """Return no parameter."""
        return {}

    def weights_updated(self) -> None:
        """Do nothing."""

    def add(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Raise AssertionError: this rank has no engine."""
        raise AssertionError("this rank has no engine")

    def step(self) -> dict[int, Generation]:
        """Return no response."""
        return {}

    def abort(self) -> dict[int, Generation]:
        """Return no response."""
        return {}

    def sleep(self) -> None:
        """Do nothing."""

    def wake_up(self, part: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
