"""Sums of a loss's statistics: over micro-batches, on the device, and over ranks, by one exchange
for all mini-batches of an update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlhf_mc import platform
from rlhf_mc.topology.consensus import gather_objects, gather_vectors
from rlhf_mc.topology.groups import ProcessGroups

LOG_PROBS = "log_probs"
"""The statistic of a loss that is not summed: the log-probs [r] of the micro-batch's tokens."""


class StatisticSums:
    """One rank's sums over the micro-batches of a mini-batch, in their order."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        """The names that the losses have returned; none on a rank without the output layer."""
        self.sums: torch.Tensor | None = None
        """[names] float64, on the device."""
        self.log_probs: torch.Tensor | None = None
        """[R] float32, on the device: the log-probs that the loss has returned, 0 for the tokens of
        other ranks; None: none were returned."""

    def add(self, stats: Mapping[str, torch.Tensor]) -> None:
        """Add one micro-batch's scalars. The host does not wait for them."""
        if not stats:
            return
        values = torch.stack(list(stats.values())).detach().double()
        if self.sums is None:
            self.names = tuple(stats)
            self.sums = values
        else:
            assert tuple(stats) == self.names, f"statistics {tuple(stats)} after {self.names}"
            self.sums += values

    def keep_log_probs(self, log_probs: torch.Tensor, index: torch.Tensor, size: int) -> None:
        """Keep one micro-batch's log-probs [r] at `index` [r] of `size` numbers."""
        if self.log_probs is None:
            self.log_probs = torch.zeros(size, device=log_probs.device)
        self.log_probs[index] = log_probs.float()

    def zero_if_finite(self) -> torch.Tensor | float:
        """Return 0 where all sums are finite, else NaN: a scalar float32 on the device."""
        return 0.0 if self.sums is None else (self.sums * 0.0).sum().float()


@dataclass(frozen=True)
class OptimizerStep:
    """The result of ModelEngine.train_step."""

    grad_norm: float
    """The norm of the gradient before clipping, the same on every rank."""
    lr: float
    """The learning rate of the step."""
    sums: StatisticSums
    """This rank's sums of the loss's statistics."""

    @property
    def skipped(self) -> bool:
        """True where loss, statistics or gradient were not finite on any rank: weights and
        optimizer state have not changed."""
        return not math.isfinite(self.grad_norm)


class Exchange:
    """The exchange of sums between ranks, of one engine."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self._agreed: tuple[str, ...] = ()
        """The names of the statistics, the same on every rank: ranks without the output layer see
        no loss."""

    def over_ranks(
        self, mini_batches: Sequence[StatisticSums], contributes: bool
    ) -> list[dict[str, float]]:
        """Return for each mini-batch the sums over the ranks that contribute, added in the order of
        the ranks. Every rank of the mesh must call it, with the same number of mini-batches."""
        if not mini_batches:
            return []
        names = {sums.names for sums in mini_batches if sums.names and contributes}
        rows = gather_vectors(self._rows(mini_batches, names), self._groups.members).tolist()
        if not all(row[0] for row in rows):
            # A rank has statistics whose names the others do not know: in the first update, and
            # with another loss.
            (self._agreed, *others) = set().union(*gather_objects(names, self._groups.members))
            assert not others, (
                f"ranks or mini-batches have different statistics: {self._agreed}, {others}"
            )
            rows = gather_vectors(self._rows(mini_batches, names), self._groups.members).tolist()
        totals = iter([sum(column) for column in zip(*rows, strict=True)][1:])
        return [{name: next(totals) for name in self._agreed} for _ in mini_batches]

    def _rows(
        self, mini_batches: Sequence[StatisticSums], names: set[tuple[str, ...]]
    ) -> torch.Tensor:
        """Return [1 + mini-batches x agreed names] float64: 1 where this rank's names are those
        agreed, and the sums, which are 0 where this rank contributes none."""
        known = names <= {self._agreed}
        device = platform.device()
        # Filled by kernels: a tensor of Python numbers is a copy that the host waits for.
        head = torch.full((1,), float(known), dtype=torch.float64, device=device)
        none = torch.zeros(len(self._agreed), dtype=torch.float64, device=device)
        rows = [
            sums.sums if known and names and sums.sums is not None else none
            for sums in mini_batches
        ]
        return torch.cat([head, *rows])
