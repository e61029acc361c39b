"""The mode in which code runs on fake CUDA devices, and what it records."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import fake_cuda
import torch
from fake_cuda import Collective, DeviceMix, place, wait
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

aten = torch.ops.aten
READS_SIZES = (
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
)
"""Operators the size of whose result the host reads from the device."""
_FAKE = FakeTensorMode(allow_non_fake_inputs=False)
"""One for the process: Megatron-Core keeps some tensors in globals."""
_INDEXING = (
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
)


def _leaves(values: Iterable[Any]) -> list[Any]:
    """Return the values, and the elements of those that are lists, of which an operator has one
    level. In place of torch's tree_leaves, which takes a tenth of a case's time."""
    out: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple):
            out.extend(value)
        else:
            out.append(value)
    return out


class Memory:
    """Bytes of the device's tensors, as torch's allocator counts them: rounded up to 512."""

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self._storages: dict[int, tuple[int, str]] = {}

    def add(self, tensor: torch.Tensor, phase: str) -> None:
        """Count the storage of a tensor, until it is freed."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = (0, f"{phase} {place()}")
            weakref.finalize(storage, self._free, storage._cdata)
            self.resize(storage, storage.nbytes())

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Count another size of a storage, if it is one of the device."""
        if storage._cdata in self._storages:
            before, origin = self._storages[storage._cdata]
            rounded = -(-size // 512) * 512
            self._storages[storage._cdata] = (rounded, origin)
            self.live += rounded - before
            self.peak = max(self.peak, self.live)

    def _free(self, key: int) -> None:
        self.live -= self._storages.pop(key)[0]

    def reset_peak(self) -> None:
        """Begin a new peak."""
        self.peak = self.live

    def by_origin(self) -> Counter[str]:
        """Return the bytes that are in use, by the phase and the place in the code of their
        allocation."""
        sizes: Counter[str] = Counter()
        for size, origin in self._storages.values():
            sizes[origin] += size
        return sizes


class FakeCuda(TorchDispatchMode):
    """Runs its body on fake CUDA devices. Raises DeviceMix where an operator gets tensors of both.

    selected: the share of the elements that torch.masked_select returns, whose number nothing knows
    here."""

    def __init__(self, selected: float = 1.0) -> None:
        super().__init__()
        self._selected = selected
        self.phase = ""
        self.operators: set[tuple[str, tuple[str, ...]]] = set()
        """Name and types of the CUDA tensors, in order, of each operator."""
        self.waits: Counter[tuple[str, str, str]] = Counter()
        """(phase, operator or call, place) -> times that the host waits for the device."""
        self.pageable: Counter[tuple[str, str]] = Counter()
        """(phase, place) -> copies to the device from memory that is not page-locked."""
        self.collectives: list[Collective] = []
        self.memory = Memory()
        self.locked: set[int] = set()
        """Addresses of page-locked memory."""

    def __enter__(self) -> FakeCuda:
        fake_cuda.current = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        fake_cuda.current = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out a wrapper of each call: nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its own dispatch calls the operators of its shard
        kwargs = dict(kwargs or {})
        leaves = _leaves([*args, *kwargs.values()])
        if func.namespace in ("c10d", "_c10d"):
            return self._collective(func, args, kwargs, leaves)
        if kwargs.get("pin_memory"):
            return self._page_locked(func, args, {**kwargs, "pin_memory": None})
        if func is aten._pin_memory.default:
            with _disable_current_modes():
                copy = args[0].clone()
            return self._lock(copy)
        if func is aten.is_pinned.default:
            return self._is_locked(args[0])
        on_cuda = any(isinstance(x, FakeTensor) and x.device.type == "cuda" for x in leaves)
        named = any(isinstance(x, torch.device) and x.type == "cuda" for x in leaves)
        if not (on_cuda or named):
            return func(*args, **kwargs)
        if (
            func is aten._to_copy.default
            and (target := kwargs.get("device"))
            and target.type != args[0].device.type
        ):
            if target.type == "meta":
                with _disable_current_modes():
                    return torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
            return self._moved(args[0], target, kwargs)
        if func is aten._foreach_copy_.default and {x.device.type for x in leaves} == {
            "cpu",
            "cuda",
        }:
            # torch copies them one by one too (ForeachBinaryOpList.cu)
            for target, source in zip(*args, strict=True):
                self._note_copy(target, source, False)
            return None
        if func is aten.copy_.default and args[0].device.type != args[1].device.type:
            self._note_copy(
                args[0], args[1], kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            )
            return args[0]
        return self._on_cuda(func, args, kwargs, leaves)

    def _on_cuda(self, func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        takes_values = not re.search(r"_like$|^new_", func.overloadpacket.__name__)
        # Elsewhere torch takes numbers of the CPU.
        takes_numbers = "_fused_" not in func.overloadpacket.__name__
        on_cpu = [x for x in tensors if x.device.type != "cuda"]
        if takes_values and any(x.dim() or not takes_numbers for x in on_cpu):
            devices = [(tuple(x.shape), x.device.type) for x in tensors]
            raise DeviceMix(f"{func} at {place()}: tensors of the CPU and of the GPU: {devices}")
        self.operators.add(
            (str(func), tuple(str(x.dtype)[6:] for x in tensors if x.device.type == "cuda"))
        )
        if func is aten._local_scalar_dense.default:
            wait("item")
            return args[0].dtype == torch.bool or (1.0 if args[0].is_floating_point() else 1)
        if func is aten.equal.default:
            one, other = args
            if (
                not torch._C._is_alias_of(one, other)
                or one.storage_offset() != other.storage_offset()
            ):
                wait("equal")  # of the same elements nothing is read (cuda_equal in Equal.cpp)
            return True
        if func in READS_SIZES:
            wait(func.overloadpacket.__name__)
        if func in _INDEXING:
            self._note_indices(*args)
        # of the CPU
        kwargs = {
            key: None if isinstance(x, torch._C.Generator) else x for key, x in kwargs.items()
        }
        if func is aten.masked_select.default:
            with _FAKE:
                return self._counted(args[0].new_empty(int(args[1].numel() * self._selected)))
        if not all(isinstance(x, FakeTensor) for x in tensors):
            args, kwargs = tree_map(self._as_fake, (args, kwargs))
        return self._counted(_FAKE.dispatch(func, (), args, kwargs))

    def _counted(self, out: Any) -> Any:
        """Count the memory of the tensors on the device, and return them."""
        for x in _leaves(out if isinstance(out, list | tuple) else [out]):
            if isinstance(x, FakeTensor) and x.device.type == "cuda":
                self.memory.add(x, self.phase)
        return out

    def _note_indices(
        self, tensor: torch.Tensor, indices: list[torch.Tensor | None], value: Any = None, *_: Any
    ) -> None:
        """Record a wait where torch counts the elements of a mask. It fills by a mask without
        counting where the value is a number (canDispatchToMaskedFill in
        TensorAdvancedIndexing.cpp)."""
        given = [index for index in indices if index is not None]
        is_number = value is not None and value.numel() == 1 and value.device.type == "cpu"
        if any(index.dtype in (torch.bool, torch.uint8) for index in given) and not (
            is_number and len(given) == 1
        ):
            wait("index by a mask")

    def _as_fake(self, x: Any) -> Any:
        is_real = isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)
        return _FAKE.from_tensor(x, static_shapes=True) if is_real else x

    def _page_locked(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        return self._lock(func(*args, **kwargs))

    def _lock(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that the tensor is in page-locked memory, and return it."""
        storage = tensor.untyped_storage()
        self.locked.add(storage.data_ptr())
        weakref.finalize(storage, self.locked.discard, storage.data_ptr())
        return tensor

    def _is_locked(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.locked

    def _moved(self, tensor: torch.Tensor, target: torch.device, kwargs: Any) -> torch.Tensor:
        """Return a copy of the tensor on the other side: of ones, where it is on the host."""
        dtype = kwargs.get("dtype") or tensor.dtype
        if target.type == "cuda":
            strides = torch.empty_like(tensor, device="meta").stride()
            with _FAKE:
                out = torch.empty_strided(tensor.shape, strides, dtype=dtype, device=target)
        else:
            with _disable_current_modes():
                out = torch.ones(tensor.shape, dtype=dtype)
            if kwargs.get("non_blocking"):  # torch's own memory for the copy is page-locked
                self._lock(out)
        self._note_copy(out, tensor, kwargs.get("non_blocking", False))
        return self._counted(out)

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        if not source.numel():
            return
        to_host = target.device.type == "cpu"
        is_locked = self._is_locked(target if to_host else source)
        if not to_host and not is_locked:
            self.pageable[self.phase, place()] += 1
        elif not (non_blocking and is_locked):
            wait("copy to the host" if to_host else "copy to the device")

    def _collective(self, func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if len({x.device.type for x in tensors}) > 1:
            raise DeviceMix(f"{func} at {place()}: tensors of the CPU and of the GPU")
        self._note_collective(func, args, tensors)
        if not any(x.device.type == "cuda" for x in tensors):
            return func(*args, **kwargs)
        work = FakeWork().boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)

    def _note_collective(self, func: Any, args: Any, tensors: list[torch.Tensor]) -> None:
        groups = [
            x
            for x in args
            if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())
        ]
        ranks = tuple(
            torch.distributed.get_process_group_ranks(
                torch.distributed.ProcessGroup.unbox(groups[0])
            )
        )
        kind = func.overloadpacket.__name__.rstrip("_")
        peer = ranks[args[2]] if kind in ("send", "recv") else None
        # Of pickled objects the ranks exchange the largest size, which is unknown here.
        is_object = {x.dtype for x in tensors} == {torch.uint8} and tensors[0].device.type == "cpu"
        sizes = tuple((str(x.dtype)[6:], 0 if is_object else x.numel()) for x in tensors)
        self.collectives.append(Collective(kind, ranks, sizes, peer))
