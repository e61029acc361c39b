"""Carries out one rank's part of a plan on real tensors: copies within the rank, then one bucket of
messages after another.

plan.py decides which blocks move, transport.py carries the messages. A plan is first bound to
tensors, which makes the views of all blocks; the weight update keeps them. Sources may be anything
that slices to tensors, such as the slices of a safetensors file.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlhf_mc import platform
from rlhf_mc.reshard.layout import Half, Stack
from rlhf_mc.reshard.transfers import RankPlan, Transfer
from rlhf_mc.reshard.transport import Messages, Transport
from rlhf_mc.runtime.work import counted

_READ_BYTES = 64 << 20
"""Bytes of local copies that are read before they are written: of a file, memory."""


class LocalTensors:
    """A rank's tensors by local name, with the stacks that its experts' separate tensors form."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self._stacks: dict[Stack, torch.Tensor | None] = {}

    def whole(self, local: str) -> Any:
        """Return a tensor; of a stack the view [experts, ...] of all its tensors, or None where
        they do not lie one after another; of a half its view."""
        if isinstance(local, Half):
            return self._tensors[local.tensor][:, local.first :: 2]
        if not isinstance(local, Stack):
            return self._tensors[local]
        if local not in self._stacks:
            names = map(local.member, itertools.count())
            present = itertools.takewhile(self._tensors.__contains__, names)
            self._stacks[local] = as_stack([self._tensors[name] for name in present])
        return self._stacks[local]

    def dtype(self, local: str, offset: Sequence[int]) -> torch.dtype:
        """Return the type of a tensor, or of a stack's member."""
        name = local.member(offset[0]) if isinstance(local, Stack) else local
        dtype: torch.dtype = self.whole(name).dtype
        return dtype

    def blocks(
        self, transfer: Transfer, local: str, offset: Sequence[int], step: int
    ) -> list[torch.Tensor]:
        """Return the blocks of one side of a transfer, in order: one view [count, *extent]. Where
        each expert of a stack has a tensor of its own, one view [*extent[1:]] for each of them."""
        extent = transfer.extent
        count = transfer.count
        tensor = self.whole(local)
        if tensor is None:
            first, *within = offset
            experts = (
                first + n * step + expert for n in range(count) for expert in range(extent[0])
            )
            part = _slices(within, extent[1:])
            assert isinstance(local, Stack), local
            return [self._tensors[local.member(expert)][part] for expert in experts]
        if isinstance(tensor, torch.Tensor):
            return [_strided(tensor, offset, extent, count, step)]
        # Slices of a file are read block by block. Files stack no experts, so offset and extent are
        # equally long.
        starts = [(offset[0] + n * step, *offset[1:]) for n in range(count)]
        return [torch.stack([tensor[_slices(start, extent)] for start in starts])]


def as_stack(tensors: Sequence[Any]) -> torch.Tensor | None:
    """Return the view [n, ...] of n equal tensors that lie in one storage at equal steps, in their
    order, as the experts in a buffer of the distributed optimizer; None if they do not."""
    if not tensors or not isinstance(tensors[0], torch.Tensor):
        return None
    first = tensors[0]
    start = first.storage_offset()
    step = tensors[1].storage_offset() - start if len(tensors) > 1 else first.numel()
    storage = first.untyped_storage().data_ptr()
    for number, tensor in enumerate(tensors):
        if (
            tensor.untyped_storage().data_ptr() != storage
            or tensor.storage_offset() != start + number * step
            or tensor.shape != first.shape
            or not tensor.is_contiguous()
        ):
            return None
    return (
        first.as_strided((len(tensors), *first.shape), (step, *first.stride()))
        if step >= first.numel()
        else None
    )


def aliased_views(plan: RankPlan, source: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return, by local name of the target, the views of the source's tensors that serve as target
    tensors."""
    local = LocalTensors(source)
    views = {}
    for alias in plan.aliases:
        tensor = local.whole(alias.src_local)
        assert tensor is not None, (
            f"{alias.src_local} on rank {plan.rank}: the experts do not lie one after another"
        )
        views[alias.dst_local] = tensor[alias.row : alias.row + alias.rows]
    return views


class Sides:
    """The tensors that a plan reads and writes."""

    def __init__(self, source: Mapping[str, Any], target: Mapping[str, torch.Tensor]) -> None:
        self.source = LocalTensors(source)
        self.target = LocalTensors(target)

    def read(self, transfer: Transfer) -> LocalTensors:
        """Return the tensors that a transfer reads."""
        return self.target if transfer.forwarded else self.source

    def destination(self, transfer: Transfer) -> list[torch.Tensor]:
        """Return the blocks that a transfer writes, as LocalTensors.blocks does."""
        return self.target.blocks(
            transfer, transfer.dst_local, transfer.dst_offset, transfer.dst_step
        )

    def source_blocks(self, transfer: Transfer) -> list[torch.Tensor]:
        """Return the blocks that a transfer reads; views where it reads from tensors."""
        return self.read(transfer).blocks(
            transfer, transfer.src_local, transfer.src_offset, transfer.src_step
        )


class _Copies:
    """Copies of blocks to blocks. Those of contiguous blocks of one type are one launch on a GPU;
    any other block would send the whole list to one launch for each."""

    def __init__(self) -> None:
        self._fused: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._single: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self.num_bytes = 0

    def add(self, targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
        """Add the copies of blocks to blocks of the same shapes."""
        for target, source in zip(targets, sources, strict=True):
            fuses = (
                target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
            )
            copied_to, copied_from = self._fused if fuses else self._single
            copied_to.append(target.view(-1) if fuses else target)
            copied_from.append(source.view(-1) if fuses else source)
            self.num_bytes += source.nbytes

    def run(self) -> None:
        """Copy all."""
        for targets, sources in (self._fused, self._single):
            if targets:
                torch._foreach_copy_(targets, sources)


class Blocks:
    """The blocks of several messages, each a vector of its blocks one after another."""

    def __init__(self, messages: Sequence[Sequence[torch.Tensor]], dtype: torch.dtype) -> None:
        """dtype: of the messages."""
        blocks = list(itertools.chain.from_iterable(messages))
        self._sizes = [[block.numel() for block in message] for message in messages]
        self._is_fused = [block.dtype == dtype and block.is_contiguous() for block in blocks]
        self._fused = [block.view(-1) for block in itertools.compress(blocks, self._is_fused)]
        self._single = [
            block for block, fused in zip(blocks, self._is_fused, strict=True) if not fused
        ]

    def pack(self, flats: Iterable[torch.Tensor]) -> None:
        """Write the blocks into the messages' vectors."""
        self._copy(flats, lambda blocks, parts: torch._foreach_copy_(parts, blocks))

    def unpack(self, flats: Iterable[torch.Tensor]) -> None:
        """Write the blocks from the messages' vectors."""
        self._copy(flats, lambda blocks, parts: torch._foreach_copy_(blocks, parts))

    def _copy(
        self,
        flats: Iterable[torch.Tensor],
        copy: Callable[[list[torch.Tensor], list[torch.Tensor]], Any],
    ) -> None:
        split = (flat.split(sizes) for flat, sizes in zip(flats, self._sizes, strict=True))
        parts = list(itertools.chain.from_iterable(split))
        if self._fused:
            copy(self._fused, list(itertools.compress(parts, self._is_fused)))
        if self._single:
            rest = (part for part, fused in zip(parts, self._is_fused, strict=True) if not fused)
            copy(
                self._single,
                [part.view(block.shape) for part, block in zip(rest, self._single, strict=True)],
            )


@dataclass(frozen=True)
class BoundBucket:
    """The messages of a bucket, and this rank's blocks in them."""

    leaving: Blocks
    """Blocks of the distinct messages that leave: peers with the same blocks share a message."""
    lengths: Sequence[int]
    """Elements of each of these."""
    messages: Mapping[int, int]
    """Receiver -> number of its message."""
    arriving: Blocks
    """Blocks of the messages that arrive."""
    sizes: Mapping[int, int]
    """Sender -> elements of its message, in the order of `arriving`."""

    def pack(self, outbox: torch.Tensor) -> Messages:
        """Pack the messages that leave into the outbox, and return them by receiver."""
        packed = outbox[: sum(self.lengths)].split(self.lengths) if self.lengths else ()
        self.leaving.pack(packed)
        return {peer: packed[number] for peer, number in self.messages.items()}

    def unpack(self, incoming: Messages) -> None:
        """Write the blocks of the messages that have arrived, given by sender, to their
        destinations."""
        self.arriving.unpack(incoming[peer] for peer in self.sizes)


@dataclass(frozen=True)
class BoundPlan:
    """A rank's part of a plan, on its tensors."""

    plan: RankPlan
    dtype: torch.dtype
    """Type of the messages."""
    copies: Iterable[_Copies]
    """Copies within the rank, in groups."""
    buckets: Iterable[BoundBucket]

    @torch.no_grad()
    def kept(self) -> BoundPlan:
        """Return the same with all views made, to be executed any number of times."""
        return replace(self, copies=tuple(self.copies), buckets=tuple(self.buckets))

    @torch.no_grad()
    def execute(self, transport: Transport | None) -> None:
        """Fill the target. Collective. Without a transport the plan must keep all transfers within
        this process. The transport's buffers are the extra memory: one bucket of sends and one of
        receives at most."""
        with platform.named_range("local_copies"):
            for copies in self.copies:
                copies.run()
        if not self.plan.buckets:
            return
        assert transport is not None, f"rank {self.plan.rank}'s plan has messages to other ranks"
        buffers = transport.buffers(self.plan, self.dtype)
        # Messages between two ranks match by order, so all ranks go through the buckets in the same
        # order.
        for bucket in counted(self.buckets, len(self.plan.buckets), "buckets"):
            with platform.named_range("pack_messages"):
                outgoing = bucket.pack(buffers.outbox)
            with platform.named_range("exchange_messages"):
                incoming = transport.exchange(buffers, outgoing, bucket.sizes)
            with platform.named_range("unpack_messages"):
                bucket.unpack(incoming)
            transport.release()


def bind(
    plan: RankPlan,
    source: Mapping[str, Any],
    target: Mapping[str, torch.Tensor],
    wire_dtype: torch.dtype | None = None,
) -> BoundPlan:
    """Return the plan on these tensors, given by local name, to be executed once: views are made on
    the way. Elements are cast to the target's type. Target tensors that the plan aliases must be
    `aliased_views`.

    wire_dtype: of the messages; None: the one type of all tensors that this rank sends and
    receives."""
    for name, view in aliased_views(plan, source).items():
        assert target[name].data_ptr() == view.data_ptr(), f"{name} does not alias its source"
    sides = Sides(source, target)
    dtype = wire_dtype or _only_dtype(plan, sides)
    moves = plan.sent_bytes or plan.received_bytes
    assert not moves or dtype.itemsize == plan.itemsize, (
        f"the plan counts {plan.itemsize} bytes an element, not {dtype}"
    )
    buckets = (_bound_bucket(sends, receives, sides, dtype) for sends, receives in plan.buckets)
    return BoundPlan(plan, dtype, _local_copies(plan, sides), buckets)


def execute(
    plan: RankPlan,
    source: Mapping[str, Any],
    target: Mapping[str, torch.Tensor],
    transport: Transport | None,
    wire_dtype: torch.dtype | None = None,
) -> None:
    """Fill `target` (in place) from the ranks' `source` once, as `bind` and BoundPlan.execute say.
    Collective: every rank calls this, with its part of one plan."""
    bind(plan, source, target, wire_dtype).execute(transport)


def _local_copies(plan: RankPlan, sides: Sides) -> Iterator[_Copies]:
    group = _Copies()
    for transfer in counted(plan.copies, len(plan.copies), "blocks"):
        targets = sides.destination(transfer)
        sources = sides.source_blocks(transfer)
        if targets[0].dim() > sources[0].dim():
            targets = _by_expert(targets)
        elif targets[0].dim() < sources[0].dim():
            sources = _by_expert(sources)
        group.add(targets, sources)
        if group.num_bytes >= _READ_BYTES:
            yield group
            group = _Copies()
    yield group


def _by_expert(stacks: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the blocks of single experts in blocks of stacks, [count, experts, ...]."""
    return [expert for stack in stacks for part in stack.unbind() for expert in part.unbind()]


def _bound_bucket(
    sends: Sequence[Transfer], receives: Sequence[Transfer], sides: Sides, dtype: torch.dtype
) -> BoundBucket:
    numbers: dict[tuple, int] = {}
    messages: dict[int, int] = {}
    distinct: list[list[Transfer]] = []
    for peer, transfers in by_peer(sends, lambda t: t.dst_rank).items():
        key = tuple(
            (t.forwarded, t.src_local, t.src_offset, t.extent, t.count, t.src_step)
            for t in transfers
        )
        messages[peer] = numbers.setdefault(key, len(distinct))
        if messages[peer] == len(distinct):
            distinct.append(transfers)
    arriving = by_peer(receives, lambda t: t.src_rank)

    def blocks(
        side: Callable[[Transfer], list[torch.Tensor]], groups: Iterable[Sequence[Transfer]]
    ) -> Blocks:
        return Blocks(
            [[block for t in transfers for block in side(t)] for transfers in groups], dtype
        )

    return BoundBucket(
        blocks(sides.source_blocks, distinct),
        [_numel(transfers) for transfers in distinct],
        messages,
        blocks(sides.destination, arriving.values()),
        {peer: _numel(transfers) for peer, transfers in arriving.items()},
    )


def by_peer(
    transfers: Sequence[Transfer], peer: Callable[[Transfer], int]
) -> dict[int, list[Transfer]]:
    """Return the transfers by the rank at their other end, each rank's in the order of the plan."""
    groups: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        groups[peer(transfer)].append(transfer)
    return dict(groups)


def _strided(
    tensor: torch.Tensor, offset: Sequence[int], extent: Sequence[int], count: int, step: int
) -> torch.Tensor:
    lead = len(offset) - len(extent)
    start = tensor.storage_offset() + sum(
        start * stride for start, stride in zip(offset, tensor.stride(), strict=True)
    )
    strides = tensor.stride()[lead:]
    return tensor.as_strided((count, *extent), (step * strides[0], *strides), start)


def _slices(offset: Iterable[int], extent: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))


def _numel(transfers: Iterable[Transfer]) -> int:
    return sum(t.numel for t in transfers)


def _only_dtype(plan: RankPlan, sides: Sides) -> torch.dtype:
    """Return the one type of all tensors that this rank sends and receives; uint8 if there are
    none."""
    sends = {
        sides.read(t).dtype(t.src_local, t.src_offset) for sends, _ in plan.buckets for t in sends
    }
    receives = {
        sides.target.dtype(t.dst_local, t.dst_offset)
        for _, receives in plan.buckets
        for t in receives
    }
    assert len(sends | receives) <= 1, (
        f"tensors of several types {sends | receives}: pass wire_dtype"
    )
    return next(iter(sends | receives), torch.uint8)
