"""The order in which training draws prompts: a function of the seed and the position alone, so that
a resumed run continues with the next prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.roles import prompts_per_batch
from rlhf_mc.config.schema import DataConfig


@dataclass(frozen=True)
class PromptOrder:
    """The order in which a run draws its prompts. A position counts from 0: epoch *
    epoch_length + offset in the epoch. It does not depend on the batch size. Each epoch ends with
    a remainder that fills no batch."""

    cfg: DataConfig
    file_sizes: Sequence[int]
    """Prompts of each training file."""
    seed: int

    @property
    def batch_size(self) -> int:
        """Number of prompts of a batch."""
        return prompts_per_batch(self.cfg)

    @property
    def batches_per_epoch(self) -> int:
        """Number of whole batches in one pass over the prompts."""
        return sum(self.file_sizes) // self.batch_size

    @property
    def epoch_length(self) -> int:
        """Positions of one pass over the prompts. With data.train_file_weights it has no remainder:
        the files are passed over at their own pace."""
        return (
            self.batches_per_epoch * self.batch_size
            if self.cfg.train_file_weights
            else sum(self.file_sizes)
        )

    def next_batch(self, position: int) -> range:
        """Return the positions of the first batch from this position on. It does not cross the end
        of an epoch."""
        left = self.epoch_length - position % self.epoch_length
        if left < self.batch_size and not self.cfg.train_file_weights:
            position += left
        return range(position, position + self.batch_size)

    def batch_at(self, position: int) -> tuple[int, range]:
        """Return number and positions of the batch of a position, in a run whose batches all have
        this size."""
        epoch, offset = divmod(position, self.epoch_length)
        batch = offset // self.batch_size
        start = epoch * self.epoch_length + batch * self.batch_size
        end = min(start + self.batch_size, (epoch + 1) * self.epoch_length)
        return epoch * self.batches_per_epoch + batch, range(start, end)

    def num_before(self, position: int) -> int:
        """Return the number of prompts before this position, without the remainder of each
        epoch."""
        epoch, offset = divmod(position, self.epoch_length)
        in_batches = self.batches_per_epoch * self.batch_size
        return epoch * in_batches + min(offset, in_batches)

    def position(self, count: int) -> int:
        """Return the position of the prompt before which there are `count`, without the remainder
        of each epoch."""
        epoch, offset = divmod(count, self.batches_per_epoch * self.batch_size)
        return epoch * self.epoch_length + offset

    def with_sizes(self, sizes: Mapping[str, Any]) -> PromptOrder:
        """Return the order with these sizes of a batch, settings of another run."""
        cfg = replace(
            self.cfg,
            train_batch_size=sizes["train_batch_size"],
            gen_batch_size=sizes["gen_batch_size"],
        )
        return replace(self, cfg=cfg)

    def indices(self, positions: range) -> list[int]:
        """Return the indices of the prompts at consecutive positions.

        The order of each epoch is drawn from (seed, epoch); without shuffle it is the order of the
        files."""
        if self.cfg.train_file_weights:
            return self._weighted(positions)
        pairs = [divmod(position, self.epoch_length) for position in positions]
        if not self.cfg.shuffle:
            return [offset for _, offset in pairs]
        order = functools.cache(
            lambda epoch: np.random.default_rng((self.seed, epoch)).permutation(self.epoch_length)
        )
        return [int(order(epoch)[offset]) for epoch, offset in pairs]

    def _weighted(self, positions: range) -> list[int]:
        """Return the indices of prompts of the files in proportion to their weights.

        Of the first k draws of the run, file i has its share of k to within one for each file
        before it. Each file is passed over at its own pace, in an order that is drawn from (seed,
        its pass, file)."""
        sizes = self.file_sizes
        counts = draws_of_files(self.cfg.train_file_weights, positions.start, positions.stop)
        files = np.argmax(np.diff(counts, axis=0), axis=1)
        starts = np.cumsum([0, *sizes])
        order = functools.cache(
            lambda turn, file: np.random.default_rng((self.seed, turn, file)).permutation(
                sizes[file]
            )
        )
        out = []
        for file, before in zip(files.tolist(), counts[:-1], strict=True):
            turn, offset = divmod(int(before[file]), sizes[file])
            place = order(turn, file)[offset] if self.cfg.shuffle else offset
            out.append(int(starts[file] + place))
        return out


def check_weights(cfg: DataConfig, file_sizes: Sequence[int]) -> None:
    """Raise UserError if a training file that has a weight has no prompts."""
    for file, size in zip(cfg.train_files, file_sizes, strict=True):
        if cfg.train_file_weights and size == 0:
            raise UserError(f"data.train_file_weights: there are no prompts of {file} to draw")


def check_batch(cfg: DataConfig, num_prompts: int) -> None:
    """Raise UserError if there are fewer prompts than a batch has."""
    if prompts_per_batch(cfg) > num_prompts:
        name = "train_batch_size" if cfg.gen_batch_size is None else "gen_batch_size"
        raise UserError(
            f"data.{name} is {prompts_per_batch(cfg)}; there are only {num_prompts} training "
            "prompts"
        )


def draws_of_files(weights: Sequence[float], first: int, last: int) -> np.ndarray:
    """Return how many of the first k draws are of each file: [last - first + 1, files] for k =
    first ... last.

    File 0 has round(k * its share) of them, file 1 its share of the remaining draws, and so on.
    Each number grows by 0 or 1 from k to k + 1, and their sum is k. The shares are fractions of
    integers, so that no rounding depends on the machine."""
    exact = [Fraction(weight).limit_denominator(10**6) for weight in weights]
    rest = [int(k) for k in range(first, last + 1)]
    columns = []
    for i, weight in enumerate(exact):
        share = weight / sum(exact[i:])
        taken = [
            (2 * k * share.numerator + share.denominator) // (2 * share.denominator) for k in rest
        ]
        columns.append(taken)
        rest = [k - t for k, t in zip(rest, taken, strict=True)]
    return np.array(columns, dtype=np.int64).T
