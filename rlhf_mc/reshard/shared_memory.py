"""The shared-memory transport: ranks of one node map each other's outboxes, where tensors lie in
host memory. A message costs one copy in and one copy out; a socket on the same machine costs two
more, through the kernel.
"""

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from rlhf_mc.reshard.transfers import RankPlan
from rlhf_mc.reshard.transport import Buffers, Messages, PointToPoint, Transport
from rlhf_mc.runtime.namespaces import namespace_id
from rlhf_mc.topology.consensus import gather_objects


class SharedMemory:
    """Shared memory between the ranks of a node, point-to-point messages between nodes. A rank's
    outbox is written by the rank and read by the others; a message to ranks of both kinds is packed
    once.

    The outbox lies in an anonymous file (memfd). So a killed rank leaves nothing behind, and the
    size of /dev/shm does not matter."""

    def __init__(self, num_bytes: int, group: dist.ProcessGroup) -> None:
        """Allocate this rank's outbox of `num_bytes`, and map the outboxes of the node's other
        ranks. Collective."""
        self._network = PointToPoint(group)
        self._rank = dist.get_rank(group)
        # The file begins with one int64 per rank: the element at which the message to that rank
        # begins.
        self._header_bytes = 8 * dist.get_world_size(group)
        self._memory: dict[int, mmap.mmap] = {}
        size = self._header_bytes + max(num_bytes, 8)  # torch takes no view of 0 bytes
        file = self._allocate(size)
        outboxes = gather_objects((namespace_id("pid"), os.getpid(), file, size), group)
        namespaces = [namespace for namespace, *_ in outboxes]
        on_node = [
            rank for rank, namespace in enumerate(namespaces) if namespace == namespaces[self._rank]
        ]
        opened = all(
            self._open(rank, *outboxes[rank][1:]) for rank in on_node if rank != self._rank
        )
        all_opened = gather_objects(opened and file is not None, group)
        if file is not None:
            os.close(file)  # the mappings stay
        self.ranks = frozenset(on_node if all(all_opened[rank] for rank in on_node) else ())
        """Ranks of the node, this one included; empty where the system refuses the memory to any of
        them."""
        nodes: dict[str, list[int]] = defaultdict(list)
        for rank, namespace in enumerate(namespaces):
            nodes[namespace].append(dist.get_global_rank(group, rank))
        self._node_group, _ = dist.new_subgroups_by_enumeration([*nodes.values()])

    def _allocate(self, size: int) -> int | None:
        """Map a new anonymous file, and return its descriptor; None if the system refuses."""
        try:
            file = os.memfd_create("rlhf_mc_reshard")
        except OSError:
            return None
        try:
            os.ftruncate(file, size)  # fails beyond the process's limit on file sizes
            self._memory[self._rank] = mmap.mmap(file, 0)
        except OSError:
            os.close(file)
            return None
        return file

    def _open(self, rank: int, pid: int, file: int | None, size: int) -> bool:
        """Map the outbox of another rank. Return False if the system refuses."""
        if file is None:
            return False
        try:
            with open(f"/proc/{pid}/fd/{file}", "rb") as other:
                self._memory[rank] = mmap.mmap(other.fileno(), size, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # ValueError: the file is shorter than `size`
            return False
        return True

    def buffers(self, plan: RankPlan, dtype: torch.dtype) -> Buffers:
        """Return the mapped outbox, and an inbox for the messages of other nodes. Those of the node
        are read where their senders packed them."""
        outbox = torch.frombuffer(self._memory[self._rank], dtype=dtype, offset=self._header_bytes)
        return Buffers(outbox, self._network.inbox(plan, dtype, but_from=self.ranks))

    def exchange(
        self, buffers: Buffers, outgoing: Messages, sizes: Mapping[int, int]
    ) -> dict[int, torch.Tensor]:
        """Exchange the messages between nodes. Then publish where the messages within the node
        begin in the outbox, wait for its ranks to do so, and return views of the senders'
        outboxes."""

        def of_others(by_rank: Mapping[int, Any]) -> dict[int, Any]:
            return {rank: value for rank, value in by_rank.items() if rank not in self.ranks}

        incoming = self._network.exchange(buffers, of_others(outgoing), of_others(sizes))
        header = torch.frombuffer(
            self._memory[self._rank], dtype=torch.int64, count=self._header_bytes // 8
        )
        for rank, message in outgoing.items():
            header[rank] = int(message.storage_offset())
        dist.barrier(self._node_group)
        return incoming | {
            sender: self._message(sender, numel, buffers.outbox.dtype)
            for sender, numel in sizes.items()
            if sender in self.ranks
        }

    def _message(self, sender: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        memory = self._memory[sender]
        begin = int(torch.frombuffer(memory, dtype=torch.int64, count=1, offset=8 * self._rank))
        offset = self._header_bytes + begin * dtype.itemsize
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)

    def release(self) -> None:
        """Wait until every rank of the node has read its messages."""
        dist.barrier(self._node_group)


def host_transport(outbox_bytes: int, group: dist.ProcessGroup) -> Transport:
    """Return the fastest transport of host tensors: shared memory within a node, if the system
    allows it. Collective. outbox_bytes: of the largest bucket that this rank sends
    (RankPlan.outbox_bytes)."""
    shared = SharedMemory(outbox_bytes, group)
    return shared if shared.ranks else PointToPoint(group)
