"""The order in which training draws prompts: a function of the seed and the number of the batch alone, so that a
resumed run continues with the next batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.roles import prompts_per_batch
from rlhf_mc.config.schema import DataConfig


def indices_of_batch(cfg: DataConfig, file_sizes: Sequence[int], number: int, seed: int) -> list[int]:
    """Return the indices of the prompts of a batch of the run. number: of the batch, from 0. file_sizes: prompts of
    each training file."""
    size = prompts_per_batch(cfg)
    if cfg.train_file_weights:
        return weighted_indices(file_sizes, cfg.train_file_weights, size, number, seed, cfg.shuffle)
    return prompt_indices(sum(file_sizes), size, number, seed, cfg.shuffle)


def check_weights(cfg: DataConfig, file_sizes: Sequence[int]) -> None:
    """Raise UserError if a training file that has a weight has no prompts."""
    for file, size in zip(cfg.train_files, file_sizes, strict=True):
        if cfg.train_file_weights and size == 0:
            raise UserError(f"data.train_file_weights: there are no prompts of {file} to draw")


def check_batch(cfg: DataConfig, num_prompts: int) -> None:
    """Raise UserError if there are fewer prompts than a batch has."""
    if prompts_per_batch(cfg) > num_prompts:
        name = "train_batch_size" if cfg.gen_batch_size is None else "gen_batch_size"
        raise UserError(f"data.{name} is {prompts_per_batch(cfg)}; there are only {num_prompts} training prompts")


def batches_per_epoch(num_prompts: int, batch_size: int) -> int:
    """Return the number of whole batches in one pass over the prompts. The remainder is not used in that pass."""
    return num_prompts // batch_size


def prompt_indices(num_prompts: int, batch_size: int, number: int, seed: int, shuffle: bool) -> list[int]:
    """Return the indices of the prompts of a batch (from 0), a function of the arguments alone.

    The order of each epoch is drawn from (seed, epoch); without shuffle it is the order of the files.
    """
    epoch, batch = divmod(number, batches_per_epoch(num_prompts, batch_size))
    order = np.random.default_rng((seed, epoch)).permutation(num_prompts) if shuffle else np.arange(num_prompts)
    return [int(i) for i in order[batch * batch_size : (batch + 1) * batch_size]]


def weighted_indices(
    sizes: Sequence[int], weights: Sequence[float], batch_size: int, number: int, seed: int, shuffle: bool
) -> list[int]:
    """Return the indices of the prompts of a batch (from 0), a function of the arguments alone: files in proportion to
    their weights.

    Of the first k draws of the run, file i has its share of k to within one for each file before it. Each file is
    passed over at its own pace, in an order that is drawn from (seed, its pass, file).
    """
    counts = draws_of_files(weights, number * batch_size, (number + 1) * batch_size)
    files = np.argmax(np.diff(counts, axis=0), axis=1)
    starts = np.cumsum([0, *sizes])
    orders: dict[tuple[int, int], np.ndarray] = {}
    out = []
    for file, before in zip(files.tolist(), counts[:-1], strict=True):
        turn, position = divmod(int(before[file]), sizes[file])
        if shuffle and (file, turn) not in orders:
            orders[file, turn] = np.random.default_rng((seed, turn, file)).permutation(sizes[file])
        out.append(int(starts[file] + (orders[file, turn][position] if shuffle else position)))
    return out


def draws_of_files(weights: Sequence[float], first: int, last: int) -> np.ndarray:
    """Return how many of the first k draws are of each file: [last - first + 1, files] for k = first ... last.

    File 0 has round(k * its share) of them, file 1 its share of the remaining draws, and so on. Each number grows by 0
    or 1 from k to k + 1, and their sum is k. The shares are fractions of integers, so that no rounding depends on the
    machine."""
    exact = [Fraction(weight).limit_denominator(10**6) for weight in weights]
    rest = [int(k) for k in range(first, last + 1)]
    columns = []
    for i, weight in enumerate(exact):
        share = weight / sum(exact[i:])
        taken = [(2 * k * share.numerator + share.denominator) // (2 * share.denominator) for k in rest]
        columns.append(taken)
        rest = [k - t for k, t in zip(rest, taken, strict=True)]
    return np.array(columns, dtype=np.int64).T
