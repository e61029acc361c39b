"""The keys of random draws (rollout/draws.py): functions of seed and position, and independent of
one another. And the log-probs of drawn tokens."""

from __future__ import annotations

import numpy as np

from rlhf_mc.data.batch import NOTHING, Generation
from rlhf_mc.rollout.base import Request, Sampling
from rlhf_mc.rollout.draws import Draws, LogProbs

SAMPLING = Sampling(1.0, 8, ())


def _keys(seeds: list[int], requests: list[int], positions: list[int]) -> list[int]:
    draws = Draws(SAMPLING)
    draws.add([Request(number, np.array([1]), seed, NOTHING) for number, seed in enumerate(seeds)])
    return draws.keys(np.array(requests), np.array(positions, dtype=np.int32)).tolist()


def test_a_key_is_splitmix64_of_the_seed() -> None:
    # The first three numbers of the published generator from the state 1234567
    # (prng.di.unimi.it/splitmix64.c).
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    found = _keys([1234567], [0, 0, 0], [0, 1, 2])
    assert [key % 2**64 for key in found] == wanted


def test_a_key_does_not_depend_on_the_batch() -> None:
    seeds = [5, 2**62 + 1, 7]
    assert _keys(seeds, [2, 0, 1], [3, 9, 4]) == [
        *_keys(seeds, [2], [3]),
        *_keys(seeds, [0], [9]),
        *_keys(seeds, [1], [4]),
    ]


def test_bits_of_keys_are_independent() -> None:
    """Neighbouring seeds and positions flip each bit in half of the cases."""
    seeds = list(range(1000, 1064))
    rows = np.array(
        [_keys(seeds, list(range(64)), [position] * 64) for position in range(64)]
    ).view(np.uint64)
    for a, b in ((rows[1:], rows[:-1]), (rows[:, 1:], rows[:, :-1])):
        bits = np.unpackbits((a ^ b).reshape(-1, 1).view(np.uint8), axis=1)
        assert np.abs(bits.mean(0) - 0.5).max() < 6 * 0.5 / len(bits) ** 0.5
    assert len(np.unique(rows)) == rows.size


def test_log_probs_follow_those_of_the_begun_response() -> None:
    log_probs = LogProbs(8)
    log_probs.add([Request(1, np.array([3]), 0, Generation([5, 6], [-0.5, -0.25], finished=False))])
    log_probs.add([Request(0, np.array([1, 2]), 0, NOTHING)])
    log_probs.append([1, 0], np.array([-1.0, -2.0], dtype=np.float32))
    log_probs.append([0], np.array([-3.0], dtype=np.float32))
    assert log_probs.of(0) == [-2.0, -3.0]
    assert log_probs.of(1) == [-0.5, -0.25, -1.0]
    # its next turn
    log_probs.add([Request(0, np.array([1, 2]), 0, Generation([7], [-4.0], finished=False))])
    log_probs.append([0], np.array([-5.0], dtype=np.float32))
    assert log_probs.of(0) == [-4.0, -5.0]
