"""Collectives on plain values: ranks exchange small objects, and raise an error of one rank on all.

No Megatron here, so that the early checks of a run do not wait for its import.
"""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.config.errors import UserError, disk_errors

T = TypeVar("T")
_CONTINUES = "rlhf_mc/continues"
_HAVE_LEFT = "rlhf_mc/have_left"


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of every rank of the group, in rank order. Without a process group this
    process is the only rank. Every rank of the group must call it."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def all_ranks(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return True if the flag is True on every rank of the group: one reduction of an integer,
    where `gather_objects` pickles and gathers. Without a process group this process is the only
    rank. Every rank of the group must call it."""
    if not dist.is_initialized():
        return flag
    everywhere = torch.tensor([flag], dtype=torch.int32)  # on the CPU, whatever the device is
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=group)
    return bool(everywhere)


def gather_vectors(vector: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the vectors [n] of all ranks of the group, in rank order, on the CPU of each: [ranks,
    n]. `vector` is on the device or the CPU; one collective, one copy to the host. Every rank of
    the group must call it with the same n."""
    world = dist.get_world_size(group)
    out = vector.new_empty(world * len(vector))
    dist.all_gather_into_tensor(out, vector, group=group)
    return out.cpu().view(world, -1)


def send_objects(values: Sequence[T], group: dist.ProcessGroup | None) -> list[T]:
    """Send values[r], which is pickled, to rank r of the group. Return what each rank has sent to
    this one, in rank order. Every rank of the group, which is gloo's, must call it."""
    messages = [bytearray(pickle.dumps(value)) for value in values]
    parts = [torch.frombuffer(message, dtype=torch.uint8) for message in messages]
    sizes = torch.tensor([len(part) for part in parts])
    incoming = torch.empty_like(sizes)
    dist.all_to_all_single(incoming, sizes, group=group)
    received = torch.empty(int(incoming.sum()), dtype=torch.uint8)
    splits = incoming.tolist(), sizes.tolist()
    dist.all_to_all_single(received, torch.cat(parts), *splits, group)
    return [pickle.loads(part.numpy().tobytes()) for part in received.split(splits[0])]


def on_every_rank(
    action: Callable[[], T], subject: str = "", group: dist.ProcessGroup | None = None
) -> T:
    """Run the action on every rank of the group and return its result on this rank. If it fails
    with a UserError or an OSError on any rank, raise the error of the first such rank on all of
    them. Every rank of the group must call it.

    subject: begins the message of the UserError that is raised in place of an OSError."""
    result, error = _attempt(action, subject)
    if not all_ranks(error is None, group):
        raise next(other for other in gather_objects(error, group) if other is not None)
    return cast(T, result)


def gather_results(
    action: Callable[[], T], subject: str = "", group: dist.ProcessGroup | None = None
) -> list[T]:
    """Run the action on every rank of the group and return all results, which are pickled, in rank
    order. If it fails with a UserError or an OSError on any rank, raise the error of the first such
    rank on all of them. Every rank of the group must call it. subject: as in `on_every_rank`."""
    outcomes = gather_objects(_attempt(action, subject), group)
    if (first := next((error for _, error in outcomes if error is not None), None)) is not None:
        raise first
    return [cast(T, result) for result, _ in outcomes]


def on_rank_0(
    action: Callable[[], T], subject: str = "", group: dist.ProcessGroup | None = None
) -> T:
    """Run the action on rank 0 of the group and return its result, which is pickled, on every rank.
    If it fails with a UserError or an OSError, raise the error on all ranks, as `on_every_rank`
    does. Every rank of the group must call it."""
    is_first = not dist.is_initialized() or dist.get_rank(group) == 0
    results = gather_results(lambda: action() if is_first else None, subject, group)
    return cast(T, results[0])


def _attempt(action: Callable[[], T], subject: str) -> tuple[T | None, UserError | None]:
    """Return the action's result, or the error with which it fails."""
    try:
        with disk_errors(subject):
            return action(), None
    except UserError as error:
        return None, error


def my_share(count: int) -> range:
    """Return this rank's consecutive part of `count` items; all of them without a process group.
    The parts follow one another in rank order."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return range(count * rank // world, count * (rank + 1) // world)


def ranks_per_node() -> int:
    """Return how many neighbouring ranks share a machine; 1 if machines have different numbers of
    ranks, or ranks of a machine are not neighbours. Every rank must call it."""
    hosts = gather_objects(socket.gethostname())
    count = hosts.count(hosts[0])
    even = len(hosts) % count == 0 and all(
        host == hosts[rank // count * count] for rank, host in enumerate(hosts)
    )
    return count if even else 1


def start_max_over_ranks(
    value: float, group: dist.ProcessGroup | None = None
) -> Callable[[], float]:
    """Start to compute the largest of the values of the group's ranks, and return the function that
    waits for it. Without a process group this process is the only rank. Every rank of the group
    must call both."""
    if not dist.is_initialized():
        return lambda: value
    largest = torch.tensor(value, dtype=torch.float64)  # on the CPU, whatever the device is
    work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def result() -> float:
        work.wait()
        return float(largest)

    return result


def record_next_step(step: int) -> None:
    """Record that a rank continues after this step, for all_have_left."""
    # two, as one of them may be the rank that has left
    if dist.is_initialized() and dist.get_rank() < 2:
        dist.distributed_c10d._get_default_store().set(_CONTINUES, str(step))


def all_have_left(step: int) -> bool:
    """Wait until all ranks have left the loop over the steps after this step, or one has continued.
    Return whether all have left. Each rank that leaves the loop calls it. Unlike a collective, it
    ends if the others do not call it."""
    if not dist.is_initialized():
        return True
    store = dist.distributed_c10d._get_default_store()
    store.add(_HAVE_LEFT, 1)
    while store.add(_HAVE_LEFT, 0) < dist.get_world_size():
        if store.check([_CONTINUES]) and int(store.get(_CONTINUES)) >= step:
            return False
        time.sleep(0.1)
    return True


def sum_over_ranks(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the element-wise sum over the ranks of the group, on the CPU of each. It is exact if
    each element is non-zero on one rank only. Every rank of the group must call it."""
    out = tensor.detach().to(platform.device())
    dist.all_reduce(out, group=group)
    return out.cpu()
