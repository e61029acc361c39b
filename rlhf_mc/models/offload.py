"""Offload of one model's tensors to host memory and back. The schedule is in
trainer/offload_schedule.py.

An offload resizes the storage of a group of tensors to 0 and keeps the views: parameters,
Megatron-Core's flat buffers and the optimizer's shards are views of one another, and stay so. Host
memory is one arena per purpose, of its exact size: torch's own page-locked memory comes in blocks
of powers of two (CachingHostAllocator.h), one for each tensor, and is never given back.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf_mc import platform
from rlhf_mc.config.errors import UserError, error_prefix, error_reason
from rlhf_mc.config.schema import MegatronConfig
from rlhf_mc.machine.facts import available_memory

PARAMS = "params"
GRADS = "grads"
OPTIMIZER = "optimizer"


class TensorGroup:
    """Tensors that are offloaded and onloaded together."""

    def __init__(
        self,
        tensors: Callable[[], Iterable[torch.Tensor]],
        keep_values: bool = True,
        never_change: bool = False,
        setting: str = "offload",
    ) -> None:
        """tensors: called at each offload, since Adam's state is created by the first step.
        keep_values: without it the tensors are uninitialised after an onload. never_change: the
        first copy to the host is used by all offloads. setting: the key that asks for the
        offload."""
        self._tensors = tensors
        self._keep_values = keep_values
        self._never_change = never_change
        self.is_offloaded = False
        """The same on every rank, also where this rank's group is empty."""
        self._offloaded: list[tuple[torch.UntypedStorage, int]] = []
        self._host = HostArena(setting)
        self._host_has_values = False
        self._copies = platform.SideStream()

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of device memory that are released."""
        return sum(size for _, size in self._offloaded)

    def offload(self) -> None:
        """Copy the values to the host and release the device memory. On a GPU the copies are
        asynchronous."""
        if self.is_offloaded:
            return
        self.is_offloaded = True
        storages = distinct_storages(self._tensors())
        if self._keep_values and not (self._never_change and self._host_has_values):
            host = self._host.views([storage.nbytes() for storage in storages])
            device = [as_bytes(storage) for storage in storages]
            with self._copies.to_host(device):
                for host_part, device_part in zip(host, device, strict=True):
                    host_part.copy_(device_part, non_blocking=True)
            self._host_has_values = True
        for storage in storages:
            self._offloaded.append((storage, storage.nbytes()))
            storage.resize_(0)

    def onload(self) -> None:
        """Allocate the device memory again, possibly at another address, and copy the values
        back."""
        storages = [storage for storage, _ in self._offloaded]
        for storage, size in self._offloaded:
            storage.resize_(size)
        if self._keep_values and storages:
            host = self._host.views([size for _, size in self._offloaded])
            with self._copies.to_device():
                for host_part, storage in zip(host, storages, strict=True):
                    as_bytes(storage).copy_(host_part, non_blocking=True)
        self._offloaded.clear()
        self.is_offloaded = False


class Offload:
    """The groups of one model's tensors that can be offloaded."""

    def __init__(self, name: str, groups: Mapping[str, TensorGroup]) -> None:
        self._name = name
        self._groups = dict(groups)
        self.optimizer_stays = False
        """The optimizer state stays on the device between the optimizer steps of an update."""

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of device memory that are released at this time."""
        return sum(group.offloaded_bytes for group in self._groups.values())

    @property
    def names(self) -> frozenset[str]:
        """The groups that can be offloaded."""
        return frozenset(self._groups)

    def differs_from(self, on_device: Collection[str]) -> bool:
        """Return True where a group must move so that the groups `on_device`, and no others, are on
        the device. The result is the same on every rank."""
        return any(
            (name in on_device) == group.is_offloaded for name, group in self._groups.items()
        )

    @contextlib.contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """Have the optimizer state on the device for the body alone, or with optimizer_stays from
        the body on. The passes that follow need not wait until it has left."""
        self.onload((OPTIMIZER,))
        yield
        if not self.optimizer_stays:
            self.offload_all_but(self.names - {OPTIMIZER})

    def offload_all_but(self, on_device: Collection[str]) -> None:
        """Offload all groups but `on_device`."""
        for name, group in self._groups.items():
            if name not in on_device:
                group.offload()

    def onload(self, names: Collection[str]) -> None:
        """Onload the groups of these names."""
        for name, group in self._groups.items():
            if name in names:
                group.onload()

    def require(self, *names: str) -> None:
        """Raise RuntimeError where one of these groups is offloaded: kernels would read released
        memory."""
        for name in names:
            if name in self._groups and self._groups[name].is_offloaded:
                raise RuntimeError(
                    f"the {name} of {self._name} are offloaded; they are used outside of the "
                    "phases that have them on "
                    "the device (config/roles.py)"
                )


def model_offload(
    name: str,
    settings: MegatronConfig,
    strategy: Any,
) -> Offload:
    """Return the groups of a model that `settings` offload. strategy: models/strategies'."""
    optimizer = strategy.optimizer

    def params() -> Iterable[torch.Tensor]:
        return strategy.named_parameters().values()

    def state() -> Iterator[torch.Tensor]:
        # With float32 weights the optimizer's parameters are the model's own, or shards of them.
        return tensors_besides(optimizer_tensors(optimizer), params())

    groups = {}
    if settings.param_offload:
        key = f"{name}.megatron.param_offload"
        groups[PARAMS] = TensorGroup(params, never_change=optimizer is None, setting=key)
    if settings.grad_offload and optimizer is not None:
        # Each backward pass zeroes the buffers before it adds to them.
        groups[GRADS] = TensorGroup(lambda: gradient_buffers(strategy.buffered), keep_values=False)
    if settings.optimizer_offload and optimizer is not None:
        groups[OPTIMIZER] = TensorGroup(state, setting=f"{name}.megatron.optimizer_offload")
    return Offload(name, groups)


def gradient_buffers(ddp: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Return the buffers of the gradients of these chunks (DistributedDataParallel)."""
    return (
        buffer.grad_data
        for chunk in ddp
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    )


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the main parameters and Adam's moments of a Megatron-Core optimizer; its step counts
    are on the host."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:  # a rank that updates no parameter of this kind
            continue
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (
                value
                for value in state.values()
                if isinstance(value, torch.Tensor) and value.dim() > 0
            )


def tensors_besides(
    tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Return the tensors that share no storage with `others`."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in others}
    return (tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in taken)


def distinct_storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of the tensors, each once, in their order, without empty ones (also those
    that another group has offloaded). Storage that torch has not allocated (mapped from a file, for
    example) cannot be resized."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            assert storage.resizable(), (
                f"a tensor of shape {tuple(tensor.shape)} lies in memory that is not its own"
            )
            storages.setdefault(storage.data_ptr(), storage)
    return list(storages.values())


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all of a storage as one vector of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


ALIGNMENT = 128
"""Bytes. Each tensor of an arena starts at a multiple of it."""


class HostArena:
    """Host memory for several tensors, which is kept and used again. With a GPU it is page-locked,
    so that copies are asynchronous; page-locking is slow, and done once for each size."""

    def __init__(self, purpose: str) -> None:
        """purpose: the boolean setting that asks for the memory."""
        self._purpose = purpose
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._unlock: weakref.finalize | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated."""
        return len(self._bytes)

    def views(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return for each size in bytes a vector [size] uint8 of the arena, one after another. The
        values are as
        after the last call with the same sizes. Where the arena is too small it is replaced, and
        the values are lost.

        Raise UserError where there is not enough memory. The caller keeps the arena while copies to
        or from the views run: without it they are no longer page-locked."""
        steps = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        if sum(steps) > self.num_bytes:
            self._allocate(sum(steps))
        views = []
        start = 0
        for size, step in zip(sizes, steps, strict=True):
            views.append(self._bytes[start : start + size])
            start += step
        return views

    def release(self) -> None:
        """Unlock the memory. It is freed with the last view."""
        if self._unlock is not None:
            self._unlock()
            self._unlock = None
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _allocate(self, num_bytes: int) -> None:
        self.release()
        available = 0
        try:
            with error_prefix(f"{self._purpose}:"), _one_rank_at_a_time():
                available = available_memory()
                if num_bytes > available:
                    raise MemoryError("more than is available")
                memory = _pages(num_bytes)
                platform.lock_pages(memory)
        except (OSError, MemoryError) as error:
            raise UserError(
                f"{self._purpose}: {num_bytes} bytes of host memory are needed by this rank, "
                f"{available} are available"
                f" on this node ({error}); give the job more memory, or set it to false"
            ) from error
        # The memory is an argument, so that it outlives its registration.
        self._unlock = weakref.finalize(self, platform.unlock_pages, memory)
        self._unlock.atexit = False  # the driver may be gone by then
        self._bytes = memory


@contextlib.contextmanager
def _one_rank_at_a_time() -> Iterator[None]:
    """Let the ranks of a node run the body one after another. What one of them has locked in memory
    is not available to the next: side by side each would count all that the node has."""
    # Another user may have put a file, or a link to one of this user's, at this path.
    path = Path(tempfile.gettempdir()) / f"rlhf_mc_host_memory_{os.getuid()}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UserError(f"{path}: {error_reason(error)}; remove it, or set TMPDIR") from error
    with open(descriptor) as file:
        if os.fstat(file.fileno()).st_uid != os.getuid():
            raise UserError(
                f"{path}: belongs to another user; remove it, or set TMPDIR to another directory"
            )
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _pages(num_bytes: int) -> torch.Tensor:
    """Return whole pages of uninitialised memory as [num_bytes] uint8. Raise OSError if there are
    none."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A child process would only copy page tables, and later pages.
    pages.madvise(mmap.MADV_DONTFORK)
    if Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock
    return torch.frombuffer(pages, dtype=torch.uint8)
