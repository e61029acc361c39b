"""Carries out one rank's part of a plan on real tensors: copies within the rank, buckets of messages between ranks.

What moves where was decided in plan.py. Sources may be anything that slices to tensors, such as the slices
of a safetensors file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rlhf_mc.reshard.plan import RankPlan, Transfer


@torch.no_grad()
def execute(
    plan: RankPlan,
    source: Mapping[str, Any],
    target: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None,
    wire_dtype: torch.dtype | None = None,
) -> None:
    """Fills `target` (in place) from the ranks' `source`, both by local name.

    Ranks of the plan are ranks of `group`; every one of them must call this with its own part of one plan. With
    NCCL, some collective must have run in the group before: its first one needs all ranks, a bucket does not.
    `group` None: nothing leaves the process. Elements are cast to the target's type; those sent travel as
    `wire_dtype`, by default the type that all tensors here have. Beside the tensors themselves this takes the
    memory of one bucket of sends and one of receives.
    """
    for transfer in plan.copies:
        destination(transfer, target).copy_(_source_block(transfer, source))
    if not any(sends or receives for sends, receives in plan.buckets):
        return
    assert group is not None and dist.get_rank(group) == plan.rank
    dtype = wire_dtype or _only_dtype(plan, source, target)
    assert dtype.itemsize == plan.itemsize, (
        f"plan counts {plan.itemsize} bytes an element, {dtype} has {dtype.itemsize}"
    )
    # NCCL moves device memory only; gloo gets host memory.
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend(group) else "cpu"
    # A message matches its peer's by order, so all ranks of the group go through the buckets in this one
    # order; a rank without part in a bucket passes it by.
    for sends, receives in plan.buckets:
        arriving = by_peer(receives, lambda t: t.src_rank)
        incoming = {p: torch.empty(sum(t.numel for t in ts), dtype=dtype, device=device) for p, ts in arriving.items()}
        outgoing = {p: pack(ts, source, dtype, device) for p, ts in by_peer(sends, lambda t: t.dst_rank).items()}
        _exchange(outgoing, incoming, group)
        for peer, transfers in arriving.items():
            unpack(incoming[peer], transfers, target)


def _exchange(outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor], group: dist.ProcessGroup) -> None:
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


def pack(
    transfers: Sequence[Transfer], source: Mapping[str, Any], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """The blocks end to end in one vector."""
    flat = torch.empty(sum(t.numel for t in transfers), dtype=dtype, device=device)
    for transfer, part in zip(transfers, _parts(flat, transfers), strict=True):
        part.view(transfer.extent).copy_(_source_block(transfer, source))
    return flat


def unpack(flat: torch.Tensor, transfers: Sequence[Transfer], target: Mapping[str, torch.Tensor]) -> None:
    """The reverse of pack, at the receiver."""
    for transfer, part in zip(transfers, _parts(flat, transfers), strict=True):
        destination(transfer, target).copy_(part.view(transfer.extent))


def destination(transfer: Transfer, target: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The view of the target tensor that a transfer writes."""
    return target[transfer.dst_local][_slices(transfer.dst_offset, transfer.extent)]


def _source_block(transfer: Transfer, source: Mapping[str, Any]) -> torch.Tensor:
    return source[transfer.src_local][_slices(transfer.src_offset, transfer.extent)]


def _slices(offset: Iterable[int], extent: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))


def _parts(flat: torch.Tensor, transfers: Sequence[Transfer]) -> Sequence[torch.Tensor]:
    return flat.split([t.numel for t in transfers])


def _only_dtype(plan: RankPlan, source: Mapping[str, Any], target: Mapping[str, torch.Tensor]) -> torch.dtype:
    sends = {source[t.src_local].dtype for sends, _ in plan.buckets for t in sends}
    receives = {target[t.dst_local].dtype for _, receives in plan.buckets for t in receives}
    assert len(sends | receives) == 1, f"tensors of several types {sends | receives}: name the one that is sent"
    return (sends | receives).pop()
