"""Sums of a loss's statistics over micro-batches, on the device, and over ranks: one copy to the host for each
mini-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from rlhf_mc import platform
from rlhf_mc.topology.consensus import gather_objects, gather_vectors


class StatisticSums:
    """The sums of one mini-batch after another. They are float64, and each is added in the order of the micro-batches
    and then of the ranks."""

    def __init__(self) -> None:
        self._agreed: tuple[str, ...] = ()
        """The names of the statistics, the same on every rank: ranks without the output layer see no loss."""
        self._names: tuple[str, ...] = ()
        """The names that the losses of this mini-batch have returned on this rank."""
        self._sums: torch.Tensor | None = None
        """[names] float64, on the device."""

    def clear(self) -> None:
        """Begin a mini-batch."""
        self._names = ()
        self._sums = None

    def add(self, stats: Mapping[str, torch.Tensor]) -> None:
        """Add one micro-batch's scalars. The host does not wait for them."""
        if not stats:
            return
        values = torch.stack(list(stats.values())).detach().double()
        if self._sums is None:
            self._names = tuple(stats)
            self._sums = values
        else:
            assert tuple(stats) == self._names, f"statistics {tuple(stats)} after {self._names}"
            self._sums += values

    def over_ranks(self, contributes: bool, number: float) -> tuple[dict[str, float], bool]:
        """Return the sums over the ranks that contribute, and True where these sums' parts and the `number` of each
        rank are finite. Both are the same on all ranks. Every rank must call it."""
        names = self._names if contributes else ()
        rows = gather_vectors(self._row(names, number)).tolist()
        if not all(row[0] for row in rows):
            # A rank has statistics whose names the others do not know: in the first mini-batch, and with another loss.
            found = {names for names in gather_objects(names) if names}
            assert len(found) == 1, f"ranks have different statistics: {found}"
            self._agreed = found.pop()
            rows = gather_vectors(self._row(names, number)).tolist()
        finite = all(math.isfinite(value) for row in rows for value in row)
        sums = dict.fromkeys(self._agreed, 0.0)
        for row in rows:
            for name, value in zip(self._agreed, row[2:], strict=True):
                sums[name] += value
        return sums, finite

    def _row(self, names: tuple[str, ...], number: float) -> torch.Tensor:
        """Return [2 + agreed names] float64: 1 where this rank's names are those agreed, `number`, and the sums, which
        are 0 on a rank that contributes none."""
        known = names in ((), self._agreed)
        device = platform.device()
        # Filled by kernels: a tensor of Python numbers is a copy that the host waits for.
        head = [torch.full((1,), value, dtype=torch.float64, device=device) for value in (float(known), number)]
        if names and known and self._sums is not None:
            return torch.cat([*head, self._sums])
        return torch.cat([*head, torch.zeros(len(self._agreed), dtype=torch.float64, device=device)])
