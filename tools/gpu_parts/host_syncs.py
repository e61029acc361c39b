"""Counts the calls that make the host wait for the device. On a GPU torch itself reports them; on a
CPU, where no call waits, those are counted that would wait if the tensors were on a GPU."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_mc import platform

_METHODS = ("cpu", "tolist", "pin_memory")
"""Not numpy, which raises for a tensor of a device."""
_OPERATORS = (
    "_local_scalar_dense",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "repeat_interleave",
)
"""Operators whose result, or its size, the host reads from the device."""


@contextlib.contextmanager
def host_syncs() -> Iterator[Counter[str]]:
    """Yield a counter of the waits of the body, by the call's name. Calls inside of kernels of
    other libraries and on other threads are not seen."""
    counts: Counter[str] = Counter()
    with (
        _reported_by_cuda(counts) if platform.use_cuda() else _seen_on_a_cpu(counts),
        _explicit(counts),
    ):
        yield counts


@contextlib.contextmanager
def _explicit(counts: Counter[str]) -> Iterator[None]:
    """Count the calls of torch.cuda.synchronize, which torch does not report."""
    original = torch.cuda.synchronize

    def counted(*args: Any, **kwargs: Any) -> None:
        counts["torch.cuda.synchronize"] += 1
        if platform.use_cuda():
            original(*args, **kwargs)

    torch.cuda.synchronize = counted
    try:
        yield
    finally:
        torch.cuda.synchronize = original


@contextlib.contextmanager
def _reported_by_cuda(counts: Counter[str]) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        if "synchronizing" in str(warning.message):
            counts[f"{warning.filename}:{warning.lineno}"] += 1


@contextlib.contextmanager
def _seen_on_a_cpu(counts: Counter[str]) -> Iterator[None]:
    with _Methods(counts), _Operators(counts):
        yield


class _Methods(TorchFunctionMode):
    """Counts copies from and to the device, which a CPU does not execute."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = resolve_name(func) or ""
        if name.startswith("torch.Tensor.") and name.rpartition(".")[2] in _METHODS:
            self._counts[name] += 1
        moves = func is torch.Tensor.to and any(
            isinstance(x, torch.device | str) for x in (*args, *kwargs.values())
        )
        makes = func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None
        if (moves or makes) and not kwargs.get("non_blocking"):
            self._counts[name] += 1
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if by_mask or name in _OPERATORS:
            self._counts[f"aten.{name}"] += 1
        return func(*args, **(kwargs or {}))
