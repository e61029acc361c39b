"""Puts tensors of one model away into host memory and brings them back under the same views. When that is done is the
trainer's business (trainer/offload_schedule.py).

A group is put away by emptying the memory below its tensors, not by replacing them: parameters, Megatron-Core's flat
buffers and the optimizer's shards are views of one another, and stay so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rlhf_mc import platform
from rlhf_mc.config.schema import MegatronConfig

PARAMS, GRADS, OPTIMIZER = "params", "grads", "optimizer"
HOST_BLOCK = 256 << 20
"""Bytes. Page-locked memory comes in powers of two, so one large piece could take twice what it needs."""


class HostMemory:
    """Host bytes that tensors are laid into, end to end; on a GPU page-locked, which takes long and is done once."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []

    def reserve(self, num_bytes: int) -> None:
        """Makes sure that so many bytes are there."""
        missing = num_bytes - sum(map(len, self._blocks))
        while missing > 0:
            self._blocks.append(platform.host_bytes(min(HOST_BLOCK, missing)))
            missing -= len(self._blocks[-1])

    def beside(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(host part, tensor's part) of equal length, over all of these byte vectors in order."""
        block, at = 0, 0
        for tensor in tensors:
            done = 0
            while done < len(tensor):
                size = min(len(tensor) - done, len(self._blocks[block]) - at)
                yield self._blocks[block][at : at + size], tensor[done : done + size]
                done, at = done + size, at + size
                if at == len(self._blocks[block]):
                    block, at = block + 1, 0


class TensorGroup:
    """Tensors that go away and come back together."""

    def __init__(
        self, tensors: Callable[[], Iterable[torch.Tensor]], keep_values: bool = True, never_change: bool = False
    ) -> None:
        """tensors: asked each time, since Adam's state appears with the first step. keep_values: otherwise what comes
        back is uninitialised. never_change: one copy on the host serves for all times."""
        self._tensors = tensors
        self._keep_values = keep_values
        self._never_change = never_change
        self.is_away = False
        """Also where there is nothing to move, so that it is the same on every rank."""
        self._away: list[tuple[torch.UntypedStorage, int]] = []
        self._host = HostMemory()
        self._host_is_right = False
        self._copies = platform.SideStream()

    @property
    def offloaded_bytes(self) -> int:
        """Device memory that is given back."""
        return sum(size for _, size in self._away)

    def put_away(self) -> None:
        """Gives the device memory back. On a GPU the copies run on while the caller goes on."""
        if self.is_away:
            return
        self.is_away = True
        storages = distinct_storages(self._tensors())
        if self._keep_values and not (self._never_change and self._host_is_right):
            self._host.reserve(sum(storage.nbytes() for storage in storages))
            device = [as_bytes(storage) for storage in storages]
            with self._copies.leaving(device):
                for host_part, device_part in self._host.beside(device):
                    host_part.copy_(device_part, non_blocking=True)
            self._host_is_right = True
        for storage in storages:
            self._away.append((storage, storage.nbytes()))
            storage.resize_(0)

    def onload(self) -> None:
        """Takes device memory again, at another address perhaps, with the values that were put away."""
        storages = [storage for storage, _ in self._away]
        for storage, size in self._away:
            storage.resize_(size)
        if self._keep_values and storages:
            with self._copies.arriving():
                for host_part, device_part in self._host.beside([as_bytes(storage) for storage in storages]):
                    device_part.copy_(host_part, non_blocking=True)
        self._away.clear()
        self.is_away = False


class Offload:
    """What of one model may be put away, and what is."""

    def __init__(self, name: str, groups: Mapping[str, TensorGroup]) -> None:
        self._name = name
        self._groups = dict(groups)

    @property
    def offloaded_bytes(self) -> int:
        """Device memory that is given back at this time."""
        return sum(group.offloaded_bytes for group in self._groups.values())

    def differs_from(self, on_device: Collection[str]) -> bool:
        """Whether anything would move to have just these on the device; the same on every rank."""
        return any((name in on_device) == group.is_away for name, group in self._groups.items())

    def offload_all_but(self, on_device: Collection[str]) -> None:
        """Gives the memory of all others back, as far as they may be put away."""
        for name, group in self._groups.items():
            if name not in on_device:
                group.put_away()

    def onload(self, names: Collection[str]) -> None:
        """Has these on the device."""
        for name, group in self._groups.items():
            if name in names:
                group.onload()

    def require(self, *names: str) -> None:
        """RuntimeError where one of these is away: kernels would read memory that is not there."""
        for name in names:
            if name in self._groups and self._groups[name].is_away:
                raise RuntimeError(
                    f"the {name} of {self._name} are put away; they are used outside of a phase that has them on the "
                    "device (trainer/offload_schedule.py)"
                )


def model_offload(
    name: str,
    settings: MegatronConfig,
    named_parameters: Callable[[], Mapping[str, torch.Tensor]],
    ddp: Sequence[Any] = (),
    optimizer: Any = None,
) -> Offload:
    """The groups of a model that `settings` lets go away. Without an optimizer the model is frozen."""

    def params() -> Iterable[torch.Tensor]:
        return named_parameters().values()

    def grads() -> Iterator[torch.Tensor]:
        return (b.grad_data for part in ddp for b in (*part.buffers, *part.expert_parallel_buffers))

    def state() -> Iterator[torch.Tensor]:
        # With float32 weights the optimizer's parameters are the model's own, or shards of them.
        return tensors_besides(optimizer_tensors(optimizer), params())

    groups = {}
    if settings.param_offload:
        groups[PARAMS] = TensorGroup(params, never_change=optimizer is None)
    if settings.grad_offload and optimizer is not None:
        # Each backward pass zeroes the buffers before it adds to them.
        groups[GRADS] = TensorGroup(grads, keep_values=False)
    if settings.optimizer_offload and optimizer is not None:
        groups[OPTIMIZER] = TensorGroup(state)
    return Offload(name, groups)


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Main parameters and Adam's moments of a Megatron-Core optimizer; not step counts, which lie on the host."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:  # a rank that updates no parameter of this kind
            continue
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0)


def tensors_besides(tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Those whose memory is none of the others'."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in others}
    return (tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in taken)


def distinct_storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The memory below the tensors, each once, in their order; what is empty, or away with another group, is left
    out. Memory that is not torch's own (mapped from a file, say) cannot be given back."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            assert storage.resizable(), f"a tensor of shape {tuple(tensor.shape)} lies in memory that is not its own"
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage as one vector of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
