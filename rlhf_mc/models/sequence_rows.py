"""Rows of sequences that not every rank holds: their exchange, and the most probable tokens of the
teachers of distillation, which trainer/teachers.py computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.data.batch import RaggedBatch, ragged_indices
from rlhf_mc.models.forward import MicroBatch
from rlhf_mc.topology.consensus import gather_vectors
from rlhf_mc.topology.groups import ProcessGroups


def flags_of_ranks(own: Sequence[np.ndarray], groups: ProcessGroups) -> Sequence[np.ndarray]:
    """Return each of these vectors of flags, [S] bool, of all ranks: [ranks, S]. Every rank of the
    mesh must call it."""
    packed = torch.from_numpy(np.packbits(own, axis=1).ravel())
    bits = gather_vectors(packed, groups.members).numpy().reshape(groups.mesh.world, len(own), -1)
    flags = np.unpackbits(bits, axis=2, count=len(own[0])).astype(np.bool_)
    return [flags[:, i] for i in range(len(own))]


def exchange_rows(
    wants: np.ndarray,
    has: np.ndarray,
    rows_of: Callable[[int, int], np.ndarray],
    row_bytes: np.ndarray,
    groups: ProcessGroups,
    num_spare: int = 0,
) -> tuple[np.ndarray, torch.Tensor]:
    """Return the sequences whose rows this rank has received, in their order, and the rows end to
    end, as bytes on the device, with `num_spare` bytes of 0 after them. Every rank of the mesh must
    call it.

    wants, has: [ranks, S] bool. rows_of(sequence, rank): the rows that this rank sends. row_bytes:
    [S], of the rows of each sequence that this rank receives."""
    rank = groups.rank
    ranks = range(groups.mesh.world)
    has = has & (has.cumsum(0) == 1)
    outgoing = [
        [rows_of(i, other) for i in np.flatnonzero(has[rank] & wants[other]).tolist()]
        for other in ranks
    ]
    incoming = [np.flatnonzero(has[other] & wants[rank]) for other in ranks]
    parts = [
        np.ascontiguousarray(rows).view(np.uint8).ravel()
        for of_rank in outgoing
        for rows in of_rank
    ]
    (sent,) = platform.to_device(
        [torch.from_numpy(np.concatenate([np.zeros(0, np.uint8), *parts]))]
    )
    sizes = [int(row_bytes[sequences].sum()) for sequences in incoming]
    total = sum(sizes)
    received = torch.zeros(total + num_spare, dtype=torch.uint8, device=platform.device())
    dist.all_to_all_single(
        received[:total],
        sent,
        sizes,
        [sum(rows.nbytes for rows in of_rank) for of_rank in outgoing],
        group=groups.members,
    )
    return np.concatenate(incoming), received


class TopTokens:
    """The teachers' k most probable tokens at each position of a step's responses, as numbers, and
    their log-probs: [tokens, 2 k] float32 of a sequence, in the host memory of the one rank that
    has scored it. Each update sends those of its micro-batches to the ranks of their losses."""

    def __init__(self, groups: ProcessGroups, k: int) -> None:
        """groups: of the actor."""
        self._groups = groups
        self._k = k
        self._stored: dict[int, np.ndarray] = {}
        """By the number of the response (RaggedBatch.numbers)."""
        self._rows = torch.zeros(0, 2 * k)
        self._row_of = np.zeros(0, np.int64)
        """[R] int64: of each drawn token of the update, the row of _rows; -1 of those without."""

    def store(self, batch: RaggedBatch, rows: torch.Tensor) -> None:
        """Store the rows [R, 2 k] of all sequences of the batch."""
        assert batch.numbers is not None
        parts = rows.split(batch.response_lens.tolist())
        self._stored |= zip(batch.numbers.tolist(), (part.numpy() for part in parts), strict=True)

    def rows(self, batch: RaggedBatch) -> torch.Tensor:
        """Return the rows of the batch [R, 2 k], 0 of sequences whose rows this rank does not
        store."""
        assert batch.numbers is not None
        result = torch.zeros(len(batch.rollout_log_probs), 2 * self._k)
        parts = result.split(batch.response_lens.tolist())
        for number, part in zip(batch.numbers.tolist(), parts, strict=True):
            if number in self._stored:
                part.copy_(torch.from_numpy(self._stored[number]))
        return result

    def receive(self, mini: RaggedBatch, micro_batches: Sequence[Sequence[int]]) -> None:
        """Receive the rows of an update's micro-batches on this rank. Every rank of the actor's
        mesh must call it."""
        assert mini.numbers is not None
        numbers = mini.numbers.tolist()
        lens = mini.response_lens.numpy()
        wanted = np.zeros(len(numbers), np.bool_)
        if self._groups.is_last_stage:
            wanted[[i for indices in micro_batches for i in indices]] = True
        holds = np.array([number in self._stored for number in numbers])
        wants, has = flags_of_ranks([wanted, holds], self._groups)
        sequences, received = exchange_rows(
            wants,
            has,
            lambda i, _: self._stored[numbers[i]],
            lens * (8 * self._k),
            self._groups,
        )
        self._rows = received.cpu().view(torch.float32).view(-1, 2 * self._k)
        self._row_of = np.full(lens.sum(), -1)
        self._row_of[ragged_indices(lens, sequences)] = np.arange(len(self._rows))

    def of(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens [r, k] int64 at the positions of a micro-batch that this rank has, and
        their log-probs [r, k], on the device. At those of observations, of which the teacher has
        scored none, any k tokens. The host does not wait for the copy."""
        k = self._k
        rows = self._rows.index_select(0, torch.from_numpy(self._row_of[micro.own_rows]))
        of_observed = torch.cat([torch.arange(k), torch.full((k,), -20.0)])
        num_observed = len(micro.targets) - len(rows)
        rows = torch.cat([rows, of_observed.expand(num_observed, 2 * k)])
        tokens, log_probs = platform.to_device([rows])[0].chunk(2, 1)
        return tokens.long(), log_probs
