"""The few collectives on plain values by which ranks agree on something small. No Megatron here: what only needs to
agree does not wait for its import.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.config.errors import UserError, reason_of

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value of every rank of the group (by default of the world, which without a process group is this process),
    in rank order, on every rank. Every rank of it must call it."""
    if not dist.is_initialized():
        return [value]
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, value, group)
    return out


def ranks_per_node() -> int:
    """How many neighbouring ranks share a machine; 1 where they are not spread evenly. Every rank must call it."""
    hosts = gather_objects(socket.gethostname())
    count = hosts.count(hosts[0])
    even = len(hosts) % count == 0 and all(host == hosts[rank // count * count] for rank, host in enumerate(hosts))
    return count if even else 1


def raise_together(error: UserError | None, group: dist.ProcessGroup | None = None) -> None:
    """Raises on every rank of the group the first error that any of them has, so that no rank waits for one that is
    gone. Every rank of it must call it."""
    first = next((e for e in gather_objects(error, group) if e is not None), None)
    if first is not None:
        raise first


def on_rank_0(what: str, action: Callable[[], object]) -> None:
    """Runs the action on rank 0; where the disk refuses, every rank raises a UserError that begins with `what`.
    Every rank must call it."""
    raise_together(disk_error(what, action) if dist.get_rank() == 0 else None)


def from_rank_0(what: str, read: Callable[[], T]) -> T:
    """Return on every rank what `read` returns on rank 0; where the disk refuses, every rank raises a UserError that
    begins with `what`. Every rank must call it."""
    found: list[T] = []
    on_rank_0(what, lambda: found.append(read()))
    return gather_objects(found)[0][0]


def on_every_rank(action: Callable[[], T]) -> T:
    """Return what the action returns on this rank. Where it raises a UserError on any rank, every rank raises it: what
    the action reads may be in order elsewhere. Every rank must call it."""
    found: list[T] = []
    error: UserError | None = None
    try:
        found.append(action())
    except UserError as raised:
        error = raised
    raise_together(error)
    return found[0]


def disk_error(what: str, action: Callable[[], object]) -> UserError | None:
    """Runs the action; what the disk had against it, or None."""
    try:
        action()
    except OSError as error:
        return UserError(f"{what}: {reason_of(error)}" + (f" ({error.filename})" if error.filename else ""))
    except UserError as error:
        return error
    return None


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The element-wise sum over all ranks, on every rank, on the CPU. Where each element is non-zero on one
    rank only, the sum is exact. Every rank must call it."""
    out = tensor.detach().to(platform.device())
    dist.all_reduce(out)
    return out.cpu()
