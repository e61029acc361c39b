"""Transports: how the messages of a bucket travel between ranks. execute.py packs and unpacks the
messages.

Here are the interface and point-to-point messages of torch.distributed. Shared memory is in
shared_memory.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

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


class Transport(Protocol):
    """Carries messages between the ranks of a group. Every rank calls `buffers` once per update,
    and `exchange` and `release` once per bucket, with messages or without."""

    def buffers(self, plan: RankPlan, dtype: torch.dtype) -> Buffers:
        """Return buffers that are large enough for every bucket of the plan."""

    def exchange(
        self, buffers: Buffers, outgoing: Messages, sizes: Mapping[int, int]
    ) -> dict[int, torch.Tensor]:
        """Send the messages of one bucket, views of the outbox, and return the received ones by
        sender. sizes: the number of elements of the message from each sender."""

    def release(self) -> None:
        """Allow the senders to overwrite the messages that `exchange` returned."""


class PointToPoint:
    """Point-to-point messages of a process group: gloo or NCCL.

    With NCCL, some collective must have run in the group before (build_role_groups runs one): the
    first one connects all ranks, and not every rank takes part in a bucket."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def buffers(self, plan: RankPlan, dtype: torch.dtype) -> Buffers:
        """Return buffers in the memory that the backend sends from."""
        assert dist.get_rank(self._group) == plan.rank
        outbox = torch.empty(
            plan.outbox_bytes // plan.itemsize, dtype=dtype, device=message_device(self._group)
        )
        return Buffers(outbox, self.inbox(plan, dtype))

    def inbox(
        self, plan: RankPlan, dtype: torch.dtype, but_from: Collection[int] = ()
    ) -> torch.Tensor:
        """Return a vector for the messages of any bucket, except those from the ranks of
        `but_from`."""
        numels = (
            sum(t.numel for t in receives if t.src_rank not in but_from)
            for _, receives in plan.buckets
        )
        return torch.empty(max(numels, default=0), dtype=dtype, device=message_device(self._group))

    def exchange(
        self, buffers: Buffers, outgoing: Messages, sizes: Mapping[int, int]
    ) -> dict[int, torch.Tensor]:
        """Send and receive one message per peer, in order, and wait for all."""
        views = buffers.inbox[: sum(sizes.values())].split([*sizes.values()]) if sizes else ()
        incoming = dict(zip(sizes, views, strict=True))
        send_and_receive(outgoing, incoming, self._group)
        return incoming

    def release(self) -> None:
        """Do nothing: the receivers have copies of their own."""


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
