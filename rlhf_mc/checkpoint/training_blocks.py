"""Which blocks of which logical tensors a role's checkpoint consists of, and where they lie on this rank: weights, and
the optimizer's state over them. Names and blocks are those of the Hugging Face checkpoint (reshard's layouts), so they
say nothing of how a run was spread over its ranks: any other layout finds its blocks again.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.reshard.layout import Box, Layout, Shard, logical_shapes
from rlhf_mc.topology.consensus import gather_objects


@dataclass(frozen=True)
class TrainedModel:
    """A model that is trained: it is saved with its optimizer."""

    engine: ModelEngine
    layouts: Sequence[Layout]
    """What each rank holds of it."""


@dataclass(frozen=True)
class Block:
    """A block of a tensor of the checkpoint, and this rank's memory for it."""

    key: str
    """<role>.<"weight" or name of the optimizer's state>.<logical name>"""
    global_shape: tuple[int, ...]
    box: Box
    data: torch.Tensor
    """A view of the model's or the optimizer's own memory, of the box's shape."""
    is_mine: bool
    """Whether this rank writes it. Of all ranks that hold the block exactly one does."""


def blocks_of(role: TrainedModel) -> list[Block]:
    """This rank's blocks of the role. Every rank must call it."""
    rank = dist.get_rank()
    parts = role.engine.optimizer_parts()
    spread = gather_objects({part.local: part.ranks for part in parts})
    shapes = logical_shapes(role.engine.shape)
    pieces: dict[str, list[Shard]] = {}
    for piece in role.layouts[rank].shards:
        pieces.setdefault(piece.local, []).append(piece)
    writers = _Writers(role.layouts, spread)
    out = []
    for local, param in role.engine.params.items():
        for piece in pieces[local]:
            key, mine = f"{role.engine.name}.weight.{piece.tensor}", writers.of_weight(piece) == rank
            out.append(Block(key, shapes[piece.tensor], piece.box, param[_slices(piece)], mine))
    for part in parts:
        local_shape = tuple(role.engine.params[part.local].shape)
        for piece in pieces[part.local]:
            mine = writers.of_state(piece) == part.ranks
            for box, run in _runs(piece, local_shape, part.start, part.end):
                size = tuple(end - start for start, end in box)
                for name, flat in part.state.items():
                    key = f"{role.engine.name}.{name}.{piece.tensor}"
                    out.append(Block(key, shapes[piece.tensor], box, flat[run].view(size), mine))
    return out


class _Writers:
    """Who writes what, by arithmetic that is the same on every rank."""

    def __init__(self, layouts: Sequence[Layout], spread: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
        """spread: by rank, over which ranks the optimizer's state of each local parameter is spread."""
        self._holders: dict[tuple[str, Box], list[int]] = {}
        self._state: dict[tuple[str, Box], set[tuple[int, ...]]] = {}
        for rank, layout in enumerate(layouts):
            for piece in layout.shards:
                at = (piece.tensor, piece.box)
                self._holders.setdefault(at, []).append(rank)
                if piece.local in spread[rank]:
                    self._state.setdefault(at, set()).add(spread[rank][piece.local])

    def of_weight(self, piece: Shard) -> int:
        """The rank: one of the holders, so that replicas share the work."""
        holders = self._holders[piece.tensor, piece.box]
        return holders[zlib.crc32(f"{piece.tensor}{piece.box}".encode()) % len(holders)]

    def of_state(self, piece: Shard) -> tuple[int, ...]:
        """The ranks that hold the state once between them. Others (tensor-parallel ranks that all hold a norm, the two
        ends of a pipeline with a tied embedding) hold the same."""
        return min(self._state[piece.tensor, piece.box])


def _slices(piece: Shard) -> tuple[slice, ...]:
    return tuple(slice(at, at + end - start) for at, (start, end) in zip(piece.offset, piece.box, strict=True))


def _runs(piece: Shard, local_shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[Box, slice]]:
    """The elements [start, end) of a flattened local parameter, as far as they are the piece's, as boxes of the logical
    tensor: of a matrix the end of a row, whole rows, the beginning of a row. With each the run of elements,
    counted from `start`."""
    width = local_shape[1] if len(local_shape) == 2 else 1
    rows = piece.box[0]
    assert len(local_shape) == 1 or (piece.offset[1] == 0 and piece.box[1][1] - piece.box[1][0] == width), piece
    first = piece.offset[0] * width
    low, high = max(start, first), min(end, first + (rows[1] - rows[0]) * width)
    for begin, finish in _cut_at_rows(low, high, width):
        run = slice(begin - start, finish - start)
        row = rows[0] + begin // width - piece.offset[0]
        if len(local_shape) == 1:
            yield ((row, row + finish - begin),), run
        elif begin % width or finish - begin < width:
            column = piece.box[1][0] + begin % width
            yield ((row, row + 1), (column, column + finish - begin)), run
        else:
            yield ((row, row + (finish - begin) // width), piece.box[1]), run


def _cut_at_rows(low: int, high: int, width: int) -> Iterator[tuple[int, int]]:
    """[low, high) as at most three runs: up to the next row's beginning, whole rows, the rest. None where it is empty,
    as it is for a piece that lies before or beyond the elements of a rank."""
    if low >= high:
        return
    cuts = sorted({low, min(high, -(-low // width) * width), max(low, high // width * width), high})
    yield from ((a, b) for a, b in itertools.pairwise(cuts) if a < b)


def num_bytes(blocks: Iterable[Block]) -> int:
    """Of the blocks that this rank writes."""
    return sum(block.data.nbytes for block in blocks if block.is_mine)
