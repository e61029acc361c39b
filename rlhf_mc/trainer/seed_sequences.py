"""numpy's SeedSequence for many seeds at once: the same numbers, at the cost of one. A step needs a seed for each of
its responses, and numpy's own class takes 14 us for each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_POOL = 4
_ENTROPY = (0x43B0D7E5, 0x931E8875)
_STATE = (0x8B51F9DD, 0x58F38DED)
"""First factor of a hash, and the factor by which it grows: of the words of the entropy, and of the state."""
_MIX_FACTORS = (np.uint32(0xCA01F9DD), np.uint32(0x4973F715))
_HALF = np.uint32(16)


def first_states(entropy: np.ndarray) -> np.ndarray:
    """Return SeedSequence(row).generate_state(1, uint64)[0] of each row: [rows] uint64.

    entropy: [rows, words] uint32. Source: numpy/random/bit_generator.pyx, after M. E. O'Neill, "Developing a seed_seq
    alternative" (2015). Integers of 32 bits wrap around, as the functions demand."""
    words = [*entropy.T, *[np.zeros(len(entropy), np.uint32)] * (_POOL - entropy.shape[1])]
    hashmix = _hashmix(*_ENTROPY)
    pool = [hashmix(word) for word in words[:_POOL]]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = _mix(pool[target], hashmix(pool[source]))
    for word in words[_POOL:]:
        pool = [_mix(target, hashmix(word)) for target in pool]
    hashmix = _hashmix(*_STATE)
    low = hashmix(pool[0]).astype(np.uint64)
    high = hashmix(pool[1]).astype(np.uint64)
    return low | high << np.uint64(32)


def _hashmix(factor: int, growth: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return a hash of words [rows] uint32, each call of which has another factor."""

    def hashmix(words: np.ndarray) -> np.ndarray:
        nonlocal factor
        out = words ^ np.uint32(factor)
        factor = factor * growth & 0xFFFFFFFF
        out *= np.uint32(factor)
        out ^= out >> _HALF
        return out

    return hashmix


def _mix(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    out: np.ndarray = x * _MIX_FACTORS[0] - y * _MIX_FACTORS[1]
    out ^= out >> _HALF
    return out
