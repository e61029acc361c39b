"""What one rank is told to do in a movement of weights: transfers within the rank and, bucket by bucket, to and from
others. plan.py decides them, execute.py carries them out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rlhf_mc.reshard.aliasing import Alias


@dataclass(frozen=True, slots=True)
class Transfer:
    """`count` blocks of `extent` elements, from src_offset of a local tensor of src_rank to dst_offset of one of
    dst_rank; each next block lies src_step and dst_step rows further (along the first dimension of extent).

    Of stacked experts the first dimension counts these; a local name with "*" then stands for one tensor each. An
    offset longer than extent begins with fixed indices (the expert, in a tensor that stacks experts)."""

    src_rank: int
    dst_rank: int
    src_local: str
    src_offset: tuple[int, ...]
    dst_local: str
    dst_offset: tuple[int, ...]
    extent: tuple[int, ...]
    count: int = 1
    src_step: int = 0
    dst_step: int = 0
    relayed: bool = False
    """Read from the sender's target, where an earlier bucket has put it, not from its source."""

    @property
    def numel(self) -> int:
        return self.count * math.prod(self.extent)


@dataclass(frozen=True)
class RankPlan:
    """One rank's part. Every rank has the same number of buckets; sender and receiver list a bucket in one order."""

    rank: int
    itemsize: int
    aliases: tuple[Alias, ...]
    """Target tensors that are views of source tensors: nothing moves for them."""
    copies: tuple[Transfer, ...]
    """Within the rank."""
    buckets: tuple[tuple[tuple[Transfer, ...], tuple[Transfer, ...]], ...]
    """(sends, receives), to be completed before the next bucket begins."""

    @property
    def outbox_bytes(self) -> int:
        """The most that it sends in one bucket."""
        return self.itemsize * max((sum(t.numel for t in sends) for sends, _ in self.buckets), default=0)

    @property
    def shared_bytes(self) -> int:
        return self.itemsize * sum(a.numel for a in self.aliases)

    @property
    def copied_bytes(self) -> int:
        return self.itemsize * sum(t.numel for t in self.copies)

    @property
    def sent_bytes(self) -> int:
        return self.itemsize * sum(t.numel for sends, _ in self.buckets for t in sends)

    @property
    def received_bytes(self) -> int:
        return self.itemsize * sum(t.numel for _, receives in self.buckets for t in receives)


def rows_down(offset: tuple[int, ...], rows: int, dims: int) -> tuple[int, ...]:
    """The offset so many rows further, rows being the first of its last `dims` dimensions."""
    axis = len(offset) - dims
    return (*offset[:axis], offset[axis] + rows, *offset[axis + 1 :])


def join_strided(transfers: Iterable[Transfer]) -> Iterable[Transfer]:
    """The same blocks in fewer transfers: those of one shape that follow at equal steps of rows become one (the query
    heads of all KV groups, say). Sender and receiver list the same blocks, so they join the same."""
    joined: dict[tuple, Transfer] = {}
    done: list[Transfer] = []
    for new in transfers:
        axes = [len(offset) - len(new.extent) for offset in (new.src_offset, new.dst_offset)]
        columns = [o[:a] + o[a + 1 :] for o, a in zip((new.src_offset, new.dst_offset), axes, strict=True)]
        key = (new.src_rank, new.dst_rank, new.src_local, new.dst_local, new.extent, *columns)
        run = joined.get(key)
        if run is None:
            joined[key] = new
            continue
        src_step = new.src_offset[axes[0]] - run.src_offset[axes[0]] - (run.count - 1) * run.src_step
        dst_step = new.dst_offset[axes[1]] - run.dst_offset[axes[1]] - (run.count - 1) * run.dst_step
        if run.count == 1 or (src_step, dst_step) == (run.src_step, run.dst_step):
            joined[key] = replace(run, count=run.count + 1, src_step=src_step, dst_step=dst_step)
        else:
            done.append(run)
            joined[key] = new
    return [*done, *joined.values()]
