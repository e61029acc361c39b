"""Carries out one rank's part of a plan on real tensors: copies within the rank, then one bucket of messages after
another.

plan.py decides which blocks move, transport.py carries the messages. Sources may be anything that slices to tensors,
such as the slices of a safetensors file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from rlhf_mc import platform
from rlhf_mc.reshard.layout import STACK, member
from rlhf_mc.reshard.transfers import RankPlan, Transfer
from rlhf_mc.reshard.transport import Transport
from rlhf_mc.runtime.work import counted


def aliased_views(plan: RankPlan, source: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return, by local name of the target, the views of the source's tensors that serve as target tensors."""
    return {a.dst_local: source[a.src_local][a.row : a.row + a.rows] for a in plan.aliases}


@torch.no_grad()
def execute(
    plan: RankPlan,
    source: Mapping[str, Any],
    target: Mapping[str, torch.Tensor],
    transport: Transport | None,
    wire_dtype: torch.dtype | None = None,
) -> None:
    """Fill `target` (in place) from the ranks' `source`, both by local name.

    Collective: every rank of the plan calls this, with its part of one plan. Elements are cast to the target's type.
    Messages have the type `wire_dtype`, by default the one type of all tensors that this rank sends and receives. The
    transport's buffers are the extra memory: one bucket of sends and one of receives at most. Without a transport the
    plan must keep all transfers within this process. Target tensors that the plan aliases must be `aliased_views`.
    """
    for name, view in aliased_views(plan, source).items():
        assert target[name].data_ptr() == view.data_ptr(), f"{name} does not alias its source"
    with platform.named_range("local_copies"):
        for transfer in counted(plan.copies, len(plan.copies), "blocks"):
            # One launch for a stack of experts.
            torch._foreach_copy_(destination(transfer, target), source_blocks(transfer, source, target))
    if not plan.buckets:
        return
    assert transport is not None, f"rank {plan.rank}'s plan has messages to other ranks"
    dtype = wire_dtype or _only_dtype(plan, source, target)
    moves = plan.sent_bytes or plan.received_bytes
    assert not moves or dtype.itemsize == plan.itemsize, (
        f"the plan counts {plan.itemsize} bytes an element, not {dtype}"
    )
    buffers = transport.buffers(plan, dtype)
    # Messages between two ranks match by order, so all ranks go through the buckets in the same order.
    for sends, receives in counted(plan.buckets, len(plan.buckets), "buckets"):
        arriving = by_peer(receives, lambda t: t.src_rank)
        with platform.named_range("pack_messages"):
            outgoing = _pack_messages(buffers.outbox, by_peer(sends, lambda t: t.dst_rank), source, target)
        with platform.named_range("exchange_messages"):
            incoming = transport.exchange(buffers, outgoing, {peer: _numel(ts) for peer, ts in arriving.items()})
        with platform.named_range("unpack_messages"):
            for peer, transfers in arriving.items():
                unpack(incoming[peer], transfers, target)
        transport.release()


def by_peer(transfers: Sequence[Transfer], peer: Callable[[Transfer], int]) -> dict[int, list[Transfer]]:
    """Return the transfers by the rank at their other end, each rank's in the order of the plan."""
    groups: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        groups[peer(transfer)].append(transfer)
    return dict(groups)


def _pack_messages(
    outbox: torch.Tensor,
    leaving: Mapping[int, Sequence[Transfer]],
    source: Mapping[str, Any],
    target: Mapping[str, torch.Tensor],
) -> dict[int, torch.Tensor]:
    """Pack the messages into the outbox, and return them by peer. Peers with the same blocks share a message."""
    packed: dict[tuple, torch.Tensor] = {}
    messages = {}
    filled = 0
    for peer, transfers in leaving.items():
        blocks = tuple((t.forwarded, t.src_local, t.src_offset, t.extent, t.count, t.src_step) for t in transfers)
        if blocks not in packed:
            packed[blocks] = outbox[filled : filled + _numel(transfers)]
            pack(packed[blocks], transfers, source, target)
            filled += len(packed[blocks])
        messages[peer] = packed[blocks]
    return messages


def pack(
    flat: torch.Tensor, transfers: Sequence[Transfer], source: Mapping[str, Any], target: Mapping[str, torch.Tensor]
) -> None:
    """Concatenate the blocks into a vector of exactly their size."""
    blocks = [block for transfer in transfers for block in source_blocks(transfer, source, target)]
    torch._foreach_copy_(_parts(flat, blocks), blocks)


def unpack(flat: torch.Tensor, transfers: Sequence[Transfer], target: Mapping[str, torch.Tensor]) -> None:
    """Write the blocks of a packed vector to their destinations."""
    blocks = [block for transfer in transfers for block in destination(transfer, target)]
    torch._foreach_copy_(blocks, _parts(flat, blocks))


def _parts(flat: torch.Tensor, blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the views of a packed vector that are these blocks."""
    parts = flat.split([block.numel() for block in blocks])
    return [part.view(block.shape) for part, block in zip(parts, blocks, strict=True)]


def destination(transfer: Transfer, target: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the views [n, rows, ...] of the target's tensors that a transfer writes, in order: one view; for stacked
    experts one view per expert."""
    return _blocks(target, transfer.dst_local, transfer.dst_offset, transfer.dst_step, transfer)


def source_blocks(
    transfer: Transfer, source: Mapping[str, Any], target: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Return the blocks that a transfer reads, in the order of `destination`; views where it reads from tensors."""
    tensors = target if transfer.forwarded else source
    return _blocks(tensors, transfer.src_local, transfer.src_offset, transfer.src_step, transfer)


def _blocks(
    tensors: Mapping[str, Any], local: str, offset: Sequence[int], step: int, transfer: Transfer
) -> list[torch.Tensor]:
    extent = transfer.extent
    count = transfer.count
    # Biases of experts have a dimension less. Where both sides stack them, they are blocks of matrices.
    if len(extent) == 3 or STACK in transfer.src_local or STACK in transfer.dst_local:
        first, *within = offset
        experts = (first + n * step + expert for n in range(count) for expert in range(extent[0]))
        if STACK in local:
            return [tensors[member(local, expert)][_slices(within, extent[1:])][None] for expert in experts]
        return [tensors[local][expert][_slices(within, extent[1:])][None] for expert in experts]
    tensor = tensors[local]
    if isinstance(tensor, torch.Tensor):
        return [_strided(tensor, offset, extent, count, step)]
    # Slices of a file are read block by block. Files stack no experts, so offset and extent are equally long.
    starts = [(offset[0] + n * step, *offset[1:]) for n in range(count)]
    return [torch.stack([tensor[_slices(start, extent)] for start in starts])]


def _strided(tensor: torch.Tensor, offset: Sequence[int], extent: Sequence[int], count: int, step: int) -> torch.Tensor:
    lead = len(offset) - len(extent)
    start = tensor.storage_offset() + sum(at * stride for at, stride in zip(offset, tensor.stride(), strict=True))
    strides = tensor.stride()[lead:]
    return tensor.as_strided((count, *extent), (step * strides[0], *strides), start)


def _slices(offset: Iterable[int], extent: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))


def _numel(transfers: Iterable[Transfer]) -> int:
    return sum(t.numel for t in transfers)


def _only_dtype(plan: RankPlan, source: Mapping[str, Any], target: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Return the one type of all tensors that this rank sends and receives; uint8 if there are none."""

    def dtype(tensors: Mapping[str, Any], local: str, offset: Sequence[int]) -> torch.dtype:
        return tensors[member(local, offset[0])].dtype

    sends = {
        dtype(target if t.forwarded else source, t.src_local, t.src_offset) for sends, _ in plan.buckets for t in sends
    }
    receives = {dtype(target, t.dst_local, t.dst_offset) for _, receives in plan.buckets for t in receives}
    assert len(sends | receives) <= 1, f"tensors of several types {sends | receives}: pass wire_dtype"
    return next(iter(sends | receives), torch.uint8)
