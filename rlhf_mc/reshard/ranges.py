"""The ranges of Hugging Face tensors that a rank has of a parameter which is split over
tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_mc.architectures.rows import SPLIT_DIMS, HeadRows, Param
from rlhf_mc.architectures.spec import ModelShape

Range = tuple[str, tuple[int, int]]
"""(a Hugging Face tensor of a parameter, the range of its split dimension that a rank holds)."""


def even_ranges(
    param: Param, shape: ModelShape, index: int, count: int, padded_vocab: int = 0
) -> list[Range]:
    """Return the index-th of `count` equal ranges of each tensor of a parameter; the whole of a
    tensor that is not split."""
    sizes = shape.dims() | {"vocab": padded_vocab}
    split = {
        name: next((d for d in dims if d in SPLIT_DIMS), None) for name, dims in param.hf.items()
    }
    return [
        (name, even_range(index, count, sizes[dim]) if dim else (0, sizes[param.hf[name][0]]))
        for name, dim in split.items()
    ]


def interleaved_ranges(
    rows: Sequence[HeadRows], groups: int, index: int, count: int
) -> list[Range]:
    """Return the ranges in the index-th of `count` equal ranges of interleaved rows: for each of
    `groups` equal groups of heads, the rows of each part in turn."""
    pieces = [
        (part.tensor, part.start + head * part.stride, part.size)
        for group in range(groups)
        for part in rows
        for head in range(*even_range(group, groups, part.heads))
    ]
    start, end = even_range(index, count, sum(size for _, _, size in pieces))
    ranges: list[Range] = []
    position = 0
    for name, first, size in pieces:
        low = first + max(start - position, 0)
        high = first + min(end - position, size)
        position += size
        if low < high and ranges and (name, low) == (ranges[-1][0], ranges[-1][1][1]):
            low = ranges.pop()[1][0]
        if low < high:
            ranges.append((name, (low, high)))
    return ranges


def even_range(index: int, count: int, size: int) -> tuple[int, int]:
    """Return the index-th of `count` equal ranges of [0, size)."""
    return size * index // count, size * (index + 1) // count
