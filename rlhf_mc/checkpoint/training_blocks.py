"""Blocks of logical tensors of which the training state of a model consists: weights and optimizer
state. Tensors are named and split as in the Hugging Face checkpoint (reshard's layouts). They do
not depend on the parallel layout of the run, so that a checkpoint can be loaded into any other
layout.
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
    """A model that is saved with its optimizer state."""

    engine: ModelEngine
    layouts: Sequence[Layout]
    """Layout of each rank, by rank."""


@dataclass(frozen=True)
class Block:
    """A block of a tensor of the checkpoint, and this rank's storage of it."""

    key: str
    """<role>.<"weight" or name of the optimizer state>.<logical name>"""
    global_shape: tuple[int, ...]
    box: Box
    data: torch.Tensor
    """View of the parameter or optimizer state, of the box's shape."""
    is_writer: bool
    """True on the one rank that writes the block; False on its replicas."""


def model_blocks(model: TrainedModel) -> list[Block]:
    """Return this rank's blocks of a model: with adapters, of what is trained alone. Every rank
    must call it."""
    rank = dist.get_rank()
    parts = model.engine.optimizer_parts()
    optimizer_ranks = gather_objects({part.local: part.ranks for part in parts})
    shapes = logical_shapes(model.engine.shape)
    shards: dict[str, list[Shard]] = {}
    for shard in model.layouts[rank].shards:
        shards.setdefault(shard.local, []).append(shard)
    writers = _Writers(model.layouts, optimizer_ranks)
    out = []
    trained = model.engine.named_parameters()
    for local, param in model.engine.params.items():
        if model.engine.shape.lora is not None and not trained[local].requires_grad:
            continue  # as in the initial checkpoint
        for shard in shards[local]:
            key = f"{model.engine.name}.weight.{shard.tensor}"
            is_writer = writers.weight_writer(shard) == rank
            out.append(
                Block(key, shapes[shard.tensor], shard.box, param[_slices(shard)], is_writer)
            )
    for part in parts:
        local_shape = tuple(trained[part.local].shape)
        for shard in shards[part.local]:
            is_writer = writers.state_writers(shard) == part.ranks
            for box, run in _runs(shard, local_shape, part.start, part.end):
                size = tuple(end - start for start, end in box)
                for name, flat in part.state.items():
                    key = f"{model.engine.name}.{name}.{shard.tensor}"
                    out.append(
                        Block(key, shapes[shard.tensor], box, flat[run].view(size), is_writer)
                    )
    return out


class _Writers:
    """Assignment of blocks to the ranks that write them, computed alike on every rank."""

    def __init__(
        self, layouts: Sequence[Layout], optimizer_ranks: Sequence[Mapping[str, tuple[int, ...]]]
    ) -> None:
        """Assign the blocks. optimizer_ranks: by rank, the ranks that shard each local parameter's
        optimizer state."""
        self._holders: dict[tuple[str, Box], list[int]] = {}
        self._state: dict[tuple[str, Box], set[tuple[int, ...]]] = {}
        for rank, layout in enumerate(layouts):
            for shard in layout.shards:
                block = (shard.tensor, shard.box)
                self._holders.setdefault(block, []).append(rank)
                if shard.local in optimizer_ranks[rank]:
                    self._state.setdefault(block, set()).add(optimizer_ranks[rank][shard.local])

    def weight_writer(self, shard: Shard) -> int:
        """Return the rank that writes a block of a weight. Replicas share the work."""
        holders = self._holders[shard.tensor, shard.box]
        return holders[zlib.crc32(f"{shard.tensor}{shard.box}".encode()) % len(holders)]

    def state_writers(self, shard: Shard) -> tuple[int, ...]:
        """Return the ranks that together write the optimizer state of a block. Other ranks may hold
        the same state: of a norm on all tensor-parallel ranks, or of a tied embedding on both ends
        of a pipeline."""
        return min(self._state[shard.tensor, shard.box])


def _slices(shard: Shard) -> tuple[slice, ...]:
    return tuple(
        slice(offset, offset + end - start)
        for offset, (start, end) in zip(shard.offset, shard.box, strict=True)
    )


def _runs(
    shard: Shard, local_shape: tuple[int, ...], start: int, end: int
) -> Iterator[tuple[Box, slice]]:
    """Yield the part of elements [start, end) of a flattened local parameter that belongs to the
    shard, as boxes of the logical tensor. For a matrix these are the end of a row, full rows, and
    the beginning of a row. Each comes with the slice of its elements, relative to `start`."""
    width = local_shape[1] if len(local_shape) == 2 else 1
    rows = shard.box[0]
    assert len(local_shape) == 1 or (
        shard.offset[1] == 0 and shard.box[1][1] - shard.box[1][0] == width
    ), shard
    first = shard.offset[0] * width
    low = max(start, first)
    high = min(end, first + (rows[1] - rows[0]) * width)
    for begin, finish in _split_at_rows(low, high, width):
        run = slice(begin - start, finish - start)
        row = rows[0] + begin // width - shard.offset[0]
        if len(local_shape) == 1:
            yield ((row, row + finish - begin),), run
        elif begin % width or finish - begin < width:
            column = shard.box[1][0] + begin % width
            yield ((row, row + 1), (column, column + finish - begin)), run
        else:
            yield ((row, row + (finish - begin) // width), shard.box[1]), run


def _split_at_rows(low: int, high: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield [low, high) as at most three ranges: up to the beginning of the next row, full rows,
    the rest. Yield none if it is empty, as for a shard before or beyond the elements of the
    rank."""
    if low >= high:
        return
    cuts = sorted({low, min(high, -(-low // width) * width), max(low, high // width * width), high})
    yield from ((a, b) for a, b in itertools.pairwise(cuts) if a < b)


def num_bytes(blocks: Iterable[Block]) -> int:
    """Return the bytes of the blocks that this rank writes."""
    return sum(block.data.nbytes for block in blocks if block.is_writer)
