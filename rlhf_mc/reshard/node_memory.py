"""Memory that the ranks of one node all see, through which execute.py hands messages over where tensors lie in host
memory: one copy in and one out, where a socket on the same machine takes two more through the kernel.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_mc.topology.consensus import gather_objects


class NodeMemory:
    """A vector of bytes for each rank of this node; its owner writes, the others read.

    It lives in anonymous files (memfd), so nothing is left behind by a rank that dies, and the size of /dev/shm
    does not matter."""

    def __init__(self, num_bytes: int, group: dist.ProcessGroup) -> None:
        """num_bytes: of this rank's vector. Every rank of the group must call it."""
        self._rank, world = dist.get_rank(group), dist.get_world_size(group)
        # The first bytes say where the message to each rank begins.
        self._header_bytes = 8 * world
        self._memory: dict[int, mmap.mmap] = {}
        size = self._header_bytes + max(num_bytes, 8)  # torch takes no view of 0 bytes
        file = self._allocate(size)
        mine = (_namespace(), os.getpid(), file, size)
        everyone = gather_objects(mine, group)
        neighbours = [rank for rank, other in enumerate(everyone) if other[0] == mine[0]]
        opened = all(self._open(rank, *everyone[rank][1:]) for rank in neighbours if rank != self._rank)
        all_opened = gather_objects(opened and file is not None, group)
        if file is not None:
            os.close(file)  # the mappings stay
        self.ranks = frozenset(neighbours if all(all_opened[rank] for rank in neighbours) else ())
        """Ranks whose vectors this rank can read, itself included; empty where the system does not allow it."""
        self._barrier_group = self._build_barrier_group([other[0] for other in everyone], group)

    def _allocate(self, size: int) -> int | None:
        """Map a new anonymous file, and return its descriptor; None where the system refuses."""
        try:
            file = os.memfd_create("rlhf_mc_reshard")
        except OSError:
            return None
        try:
            os.ftruncate(file, size)  # beyond a limit of the process's file size it fails
            self._memory[self._rank] = mmap.mmap(file, 0)
        except OSError:
            os.close(file)
            return None
        return file

    def _open(self, rank: int, pid: int, file: int | None, size: int) -> bool:
        if file is None:
            return False
        try:
            with open(f"/proc/{pid}/fd/{file}", "rb") as other:
                self._memory[rank] = mmap.mmap(other.fileno(), size, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # ValueError: it is shorter than its owner wanted
            return False
        return True

    def _build_barrier_group(self, namespaces: list[str], group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Every rank takes part in making every node's group."""
        for namespace in sorted(set(namespaces)):
            ranks = [dist.get_global_rank(group, rank) for rank, other in enumerate(namespaces) if other == namespace]
            made = dist.new_group(ranks)
            if namespace == namespaces[self._rank]:
                mine = made
        return mine

    def own(self, dtype: torch.dtype) -> torch.Tensor:
        """This rank's vector, to be written."""
        return torch.frombuffer(self._memory[self._rank], dtype=dtype, offset=self._header_bytes)

    def publish(self, offsets: dict[int, int]) -> None:
        """Says at which element of this rank's vector the message to each rank begins, and waits until all ranks of
        the node have published. All of them must call it."""
        header = torch.frombuffer(self._memory[self._rank], dtype=torch.int64, count=self._header_bytes // 8)
        for rank, offset in offsets.items():
            header[rank] = offset
        self.wait()

    def message(self, sender: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The message of so many elements that a rank of this node has published for this one."""
        memory = self._memory[sender]
        begin = int(torch.frombuffer(memory, dtype=torch.int64, count=1, offset=8 * self._rank))
        offset = self._header_bytes + begin * dtype.itemsize
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)

    def wait(self) -> None:
        """Until all ranks of the node have come here; after it, vectors may be written again."""
        dist.barrier(self._barrier_group)


def _namespace() -> str:
    """Equal for processes that can see each other: of one boot of one machine, and one container."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
