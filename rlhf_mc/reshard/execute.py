"""Carries out one rank's part of a plan on real tensors: copies within the rank, buckets of messages between ranks.

What moves where was decided in plan.py. Sources may be anything that slices to tensors, such as the slices
of a safetensors file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rlhf_mc.reshard.layout import STACK, member
from rlhf_mc.reshard.node_memory import NodeMemory
from rlhf_mc.reshard.transfers import RankPlan, Transfer


def shared_storage(plan: RankPlan, source: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By local name of the target, the views of the source's tensors that stand for it."""
    return {s.dst_local: source[s.src_local][s.row : s.row + s.rows] for s in plan.shared}


@torch.no_grad()
def execute(
    plan: RankPlan,
    source: Mapping[str, Any],
    target: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None,
    wire_dtype: torch.dtype | None = None,
    node: NodeMemory | None = None,
) -> None:
    """Fills `target` (in place) from the ranks' `source`, both by local name.

    Ranks of the plan are ranks of `group`; every one of them must call this with its own part of one plan. With
    NCCL, some collective must have run in the group before: its first one needs all ranks, a bucket does not.
    `group` None: nothing leaves the process. Elements are cast to the target's type; those sent travel as
    `wire_dtype`, by default the type that all tensors here have. Beside the tensors themselves this takes the
    memory of one bucket of sends and one of receives. Target tensors that the plan shares must be `shared_storage`.
    node: memory of at least RankPlan.outbox_bytes by which ranks of one node hand messages over; host memory only.
    """
    for name, view in shared_storage(plan, source).items():
        assert target[name].data_ptr() == view.data_ptr(), f"{name} is no longer the memory of its source"
    for transfer in plan.copies:
        for there, here in zip(destination(transfer, target), source_blocks(transfer, source, target), strict=True):
            there.copy_(here)
    if not plan.buckets:
        return
    assert group is not None and dist.get_rank(group) == plan.rank
    dtype = wire_dtype or _only_dtype(plan, source, target)
    moves = plan.sent_bytes or plan.received_bytes
    assert not moves or dtype.itemsize == plan.itemsize, (
        f"the plan counts {plan.itemsize} bytes an element, not {dtype}"
    )
    if node is not None and not node.ranks:
        node = None  # the system does not allow it
    neighbours = node.ranks if node is not None else frozenset()
    device = message_device(group)
    # One buffer each way serves all buckets: memory that is touched for the first time costs as much as a copy.
    inbox = torch.empty(max(_numel(r, neighbours) for _, r in plan.buckets), dtype=dtype, device=device)
    if node is not None:
        outbox = node.own(dtype)
    else:
        outbox = torch.empty(max(_numel(s) for s, _ in plan.buckets), dtype=dtype, device=device)
    # A message matches its peer's by order, so all ranks of the group go through the buckets in this one
    # order; a rank without part in a bucket passes it by, but for the wait that the ranks of a node share.
    for sends, receives in plan.buckets:
        leaving, arriving = by_peer(sends, lambda t: t.dst_rank), by_peer(receives, lambda t: t.src_rank)
        outgoing = _pack_messages(outbox, leaving, source, target)
        incoming = _cut(inbox, {p: ts for p, ts in arriving.items() if p not in neighbours})
        exchange({p: flat for p, flat in outgoing.items() if p not in neighbours}, incoming, group)
        if node is not None:
            node.publish({p: int(flat.storage_offset()) for p, flat in outgoing.items()})
            incoming |= {p: node.message(p, _numel(ts), dtype) for p, ts in arriving.items() if p in neighbours}
        for peer, transfers in arriving.items():
            unpack(incoming[peer], transfers, target)
        if node is not None:
            node.wait()


def message_device(group: dist.ProcessGroup) -> torch.device:
    """Where messages of the group lie: NCCL moves device memory only, gloo gets host memory."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def exchange(outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sends each rank of the group its vector and fills those that come, one message each, and waits for all."""
    ops = [dist.P2POp(dist.irecv, flat, dist.get_global_rank(group, p), group) for p, flat in incoming.items()]
    ops += [dist.P2POp(dist.isend, flat, dist.get_global_rank(group, p), group) for p, flat in outgoing.items()]
    if ops:
        for work in dist.batch_isend_irecv(ops):
            work.wait()


def by_peer(transfers: Sequence[Transfer], peer_of: Any) -> dict[int, list[Transfer]]:
    """Transfers by the rank at their other end, in the plan's order."""
    groups: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        groups[peer_of(transfer)].append(transfer)
    return dict(groups)


def _pack_messages(
    outbox: torch.Tensor,
    leaving: Mapping[int, Sequence[Transfer]],
    source: Mapping[str, Any],
    target: Mapping[str, torch.Tensor],
) -> dict[int, torch.Tensor]:
    """By peer, its message, in the outbox; peers that are sent the same blocks share one."""
    packed: dict[tuple, torch.Tensor] = {}
    messages, filled = {}, 0
    for peer, transfers in leaving.items():
        blocks = tuple((t.relayed, t.src_local, t.src_offset, t.extent, t.count, t.src_step) for t in transfers)
        if blocks not in packed:
            packed[blocks] = outbox[filled : filled + _numel(transfers)]
            pack(packed[blocks], transfers, source, target)
            filled += len(packed[blocks])
        messages[peer] = packed[blocks]
    return messages


def pack(
    flat: torch.Tensor, transfers: Sequence[Transfer], source: Mapping[str, Any], target: Mapping[str, torch.Tensor]
) -> None:
    """Writes the blocks end to end into a vector of just their size."""
    blocks = [block for transfer in transfers for block in source_blocks(transfer, source, target)]
    for block, part in zip(blocks, flat.split([block.numel() for block in blocks]), strict=True):
        part.view(block.shape).copy_(block)


def unpack(flat: torch.Tensor, transfers: Sequence[Transfer], target: Mapping[str, torch.Tensor]) -> None:
    """The reverse of pack, at the receiver."""
    blocks = [block for transfer in transfers for block in destination(transfer, target)]
    for block, part in zip(blocks, flat.split([block.numel() for block in blocks]), strict=True):
        block.copy_(part.view(block.shape))


def destination(transfer: Transfer, target: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the views [n, rows, ...] of the target's tensors that a transfer writes, in order: one, or for stacked
    experts one for each expert."""
    return _blocks(target, transfer.dst_local, transfer.dst_offset, transfer.dst_step, transfer)


def source_blocks(
    transfer: Transfer, source: Mapping[str, Any], target: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Return the blocks that a transfer reads, in the order of `destination`; views where it reads from tensors."""
    tensors = target if transfer.relayed else source
    return _blocks(tensors, transfer.src_local, transfer.src_offset, transfer.src_step, transfer)


def _blocks(
    tensors: Mapping[str, Any], local: str, offset: Sequence[int], step: int, transfer: Transfer
) -> list[torch.Tensor]:
    extent, count = transfer.extent, transfer.count
    if len(extent) == 3:
        first, *within = offset
        experts = (first + n * step + expert for n in range(count) for expert in range(extent[0]))
        if STACK in local:
            return [tensors[member(local, expert)][_slices(within, extent[1:])][None] for expert in experts]
        return [tensors[local][expert][_slices(within, extent[1:])][None] for expert in experts]
    found = tensors[local]
    if isinstance(found, torch.Tensor):
        return [_strided(found, offset, extent, count, step)]
    # What only slices, such as a file, is read block by block; it stacks nothing, so offset and extent are as long.
    starts = [(offset[0] + n * step, *offset[1:]) for n in range(count)]
    return [torch.stack([found[_slices(start, extent)] for start in starts])]


def _strided(tensor: torch.Tensor, offset: Sequence[int], extent: Sequence[int], count: int, step: int) -> torch.Tensor:
    lead = len(offset) - len(extent)
    start = tensor.storage_offset() + sum(at * stride for at, stride in zip(offset, tensor.stride(), strict=True))
    strides = tensor.stride()[lead:]
    return tensor.as_strided((count, *extent), (step * strides[0], *strides), start)


def _slices(offset: Iterable[int], extent: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))


def _numel(transfers: Iterable[Transfer], but_from: Collection[int] = ()) -> int:
    return sum(t.numel for t in transfers if t.src_rank not in but_from)


def _cut(flat: torch.Tensor, transfers: Mapping[int, Sequence[Transfer]]) -> dict[int, torch.Tensor]:
    """By peer, a part of the vector that its transfers fill."""
    sizes = [_numel(found) for found in transfers.values()]
    return dict(zip(transfers, flat[: sum(sizes)].split(sizes), strict=True)) if sizes else {}


def _only_dtype(plan: RankPlan, source: Mapping[str, Any], target: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The type of what this rank sends and receives; any, where that is nothing."""

    def dtype(tensors: Mapping[str, Any], local: str, offset: Sequence[int]) -> torch.dtype:
        return tensors[member(local, offset[0])].dtype

    sends = {
        dtype(target if t.relayed else source, t.src_local, t.src_offset) for sends, _ in plan.buckets for t in sends
    }
    receives = {dtype(target, t.dst_local, t.dst_offset) for _, receives in plan.buckets for t in receives}
    assert len(sends | receives) <= 1, f"tensors of several types {sends | receives}: name the one that is sent"
    return next(iter(sends | receives), torch.uint8)
