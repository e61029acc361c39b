"""One rank's part of a plan: copies within the rank and, bucket by bucket, transfers to and from
other ranks. plan.py makes it, execute.py carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rlhf_mc.reshard.aliasing import Alias


@dataclass(frozen=True, slots=True)
class Transfer:
    """`count` blocks of shape `extent`, from src_offset in a tensor of src_rank to dst_offset in a
    tensor of dst_rank. Consecutive blocks lie src_step and dst_step rows apart (along the first
    dimension of extent).

    For stacked experts, the first dimension is the expert. An offset longer than extent begins with
    the index of the expert in a tensor that stacks experts."""

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
    forwarded: bool = False
    """Read from the sender's target, which an earlier bucket has filled, in place of its source."""

    @property
    def numel(self) -> int:
        return self.count * math.prod(self.extent)


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of a plan. All ranks have the same number of buckets. Sender and receiver
    list the transfers of a bucket in the same order."""

    rank: int
    itemsize: int
    aliases: tuple[Alias, ...]
    """Target tensors that are views of source tensors: nothing moves for them."""
    copies: tuple[Transfer, ...]
    """Transfers within the rank."""
    buckets: tuple[tuple[tuple[Transfer, ...], tuple[Transfer, ...]], ...]
    """(sends, receives) of each bucket, which complete before the next bucket begins."""

    @property
    def outbox_bytes(self) -> int:
        """Bytes of the largest bucket of sends."""
        return self.itemsize * max(
            (sum(t.numel for t in sends) for sends, _ in self.buckets), default=0
        )

    @property
    def copied_bytes(self) -> int:
        return self.itemsize * sum(t.numel for t in self.copies)

    @property
    def sent_bytes(self) -> int:
        return self.itemsize * sum(t.numel for sends, _ in self.buckets for t in sends)

    @property
    def received_bytes(self) -> int:
        return self.itemsize * sum(t.numel for _, receives in self.buckets for t in receives)


def join_strided(transfers: Iterable[Transfer]) -> Iterable[Transfer]:
    """Merge transfers of blocks of one shape at equal steps of rows (such as the query heads of all
    KV groups) into one transfer each. Sender and receiver list the same blocks, so both merge the
    same."""
    joined: dict[tuple, Transfer] = {}
    done: list[Transfer] = []
    for new in transfers:
        axes = [len(offset) - len(new.extent) for offset in (new.src_offset, new.dst_offset)]
        columns = [
            o[:a] + o[a + 1 :] for o, a in zip((new.src_offset, new.dst_offset), axes, strict=True)
        ]
        key = (new.src_rank, new.dst_rank, new.src_local, new.dst_local, new.extent, *columns)
        run = joined.get(key)
        if run is None:
            joined[key] = new
            continue
        src_step = (
            new.src_offset[axes[0]] - run.src_offset[axes[0]] - (run.count - 1) * run.src_step
        )
        dst_step = (
            new.dst_offset[axes[1]] - run.dst_offset[axes[1]] - (run.count - 1) * run.dst_step
        )
        # Of interleaved heads, a shard by rows (placement.row_shard) may have later rows first.
        starts = run.count == 1 and min(src_step, dst_step) > 0
        if starts or (src_step, dst_step) == (run.src_step, run.dst_step):
            joined[key] = replace(run, count=run.count + 1, src_step=src_step, dst_step=dst_step)
        else:
            done.append(run)
            joined[key] = new
    return [*done, *joined.values()]
