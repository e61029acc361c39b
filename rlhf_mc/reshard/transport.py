"""The messages of a bucket between ranks: point-to-point messages of torch.distributed. execute.py
packs and unpacks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlhf_mc.reshard.transfers import RankPlan

Messages = Mapping[int, torch.Tensor]
"""Rank at the other end -> vector of elements."""


@dataclass(frozen=True)
class Buffers:
    """Memory of one update, allocated once for all its buckets: first-touch page faults cost as
    much as a copy."""

    outbox: torch.Tensor
    """Vector that the messages of one bucket are packed into."""
    inbox: torch.Tensor
    """Vector that the network writes the messages of one bucket into."""


class PointToPoint:
    """Point-to-point messages of a process group: gloo or NCCL.

    With NCCL, some collective must have run in the group before (build_role_groups runs one): the
    first one connects all ranks, and not every rank takes part in a bucket."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def buffers(self, plan: RankPlan, dtype: torch.dtype) -> Buffers:
        """Return buffers for every bucket of the plan, in the memory that the backend sends
        from."""
        assert dist.get_rank(self._group) == plan.rank
        device = message_device(self._group)
        outbox = torch.empty(plan.outbox_bytes // plan.itemsize, dtype=dtype, device=device)
        numels = (sum(t.numel for t in receives) for _, receives in plan.buckets)
        return Buffers(outbox, torch.empty(max(numels, default=0), dtype=dtype, device=device))

    def exchange(
        self, buffers: Buffers, outgoing: Messages, sizes: Mapping[int, int]
    ) -> dict[int, torch.Tensor]:
        """Send the messages of one bucket, views of the outbox, and return the received ones by
        sender. sizes: the number of elements of the message from each sender. Every rank must call
        it once per bucket, with messages or without."""
        views = buffers.inbox[: sum(sizes.values())].split([*sizes.values()]) if sizes else ()
        incoming = dict(zip(sizes, views, strict=True))
        send_and_receive(outgoing, incoming, self._group)
        return incoming


def message_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device of the group's messages: NCCL sends device memory only, gloo is given host
    memory."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def send_and_receive(outgoing: Messages, incoming: Messages, group: dist.ProcessGroup) -> None:
    """Send each rank of `outgoing` its tensor, fill the tensors of `incoming` by sender, and wait
    for all."""
    ops = [
        dist.P2POp(dist.irecv, flat, dist.get_global_rank(group, p), group)
        for p, flat in incoming.items()
    ]
    ops += [
        dist.P2POp(dist.isend, flat, dist.get_global_rank(group, p), group)
        for p, flat in outgoing.items()
    ]
    if ops:
        for work in dist.batch_isend_irecv(ops):
            work.wait()
