"""Which tensors of a target layout need no memory of their own, because on the same rank the source holds them
block for block: plain data, no torch. Everything else moves by plan.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_mc.reshard.layout import STACK, Layout, Piece

ALIGNMENT = 16
"""Bytes. A tensor that would begin elsewhere in the source's is copied: GPU kernels load 16 bytes at a time."""


@dataclass(frozen=True, slots=True)
class Shared:
    """A local tensor of the target that is `rows` rows of a local tensor of the source, from `row` on."""

    dst_local: str
    src_local: str
    row: int
    rows: int
    numel: int
    """Its elements, less padding."""


def shared_tensors(source: Layout, target: Layout, itemsize: int) -> dict[str, Shared]:
    """By local name, the tensors of one rank's target that are consecutive whole rows of one of its source tensors.

    Padding may lie under padding only as far as the source has rows for it; what it contains is nobody's business."""
    held: dict[str, list[Piece]] = {}
    for piece in source.stacked:
        if STACK in piece.local:
            continue  # experts' tensors have memory of their own each
        held.setdefault(piece.tensor, []).append(piece)
    found = {}
    shapes = source.stacked_shapes
    for local, pieces in target.by_local.items():
        if not all(piece.tensor in held for piece in pieces):
            continue
        size = target.stacked_shapes[local]
        places = {_place(piece, held[piece.tensor], shapes, size) for piece in pieces}
        if len(places) != 1 or (place := places.pop()) is None:
            continue
        src_local, row = place
        in_bounds = row >= 0 and row + size[0] <= shapes[src_local][0]
        if in_bounds and row * math.prod(size[1:]) * itemsize % ALIGNMENT == 0:
            numel = sum(math.prod(end - start for start, end in piece.box) for piece in pieces)
            found[local] = Shared(local, src_local, row, size[0], numel)
    return found


def _place(
    piece: Piece, held: list[Piece], shapes: Mapping[str, tuple[int, ...]], size: tuple[int, ...]
) -> tuple[str, int] | None:
    """(source tensor, its row at which a target tensor of this size would begin) if the target's piece lies there."""
    for other in held:
        inside = all(a <= c and d <= b for (a, b), (c, d) in zip(other.box, piece.box, strict=True))
        if not inside or shapes[other.local][1:] != size[1:]:
            continue
        at = other.offset_of(piece.box)
        if at[1:] == piece.offset[1:]:
            return other.local, at[0] - piece.offset[0]
    return None
