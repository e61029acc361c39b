"""Host memory for the tensors of an offload or of an asynchronous save: one arena per purpose, of its exact size.

torch's own page-locked memory comes in blocks of powers of two (CachingHostAllocator.h), one for each tensor, and is
never given back.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from rlhf_mc import platform
from rlhf_mc.config.errors import UserError
from rlhf_mc.runtime.machine_facts import available_memory

ALIGNMENT = 128
"""Bytes. Each tensor of an arena starts at a multiple of it."""


class HostArena:
    """Host memory for several tensors, which is kept and used again. With a GPU it is page-locked, so that copies are
    asynchronous; page-locking is slow, and done once for each size."""

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
        """Return for each size in bytes a vector [size] uint8 of the arena, one after another. The values are those of
        the last call with the same sizes. Where the arena is too small it is replaced, and the values are lost.

        Raise UserError where there is not enough memory. The caller keeps the arena while copies to or from the views
        run: without it they are no longer page-locked."""
        steps = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        if sum(steps) > self.num_bytes:
            self._allocate(sum(steps))
        found = []
        start = 0
        for size, step in zip(sizes, steps, strict=True):
            found.append(self._bytes[start : start + size])
            start += step
        return found

    def release(self) -> None:
        """Unlock the memory. It is freed with the last view."""
        if self._unlock is not None:
            self._unlock()
            self._unlock = None
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _allocate(self, num_bytes: int) -> None:
        self.release()
        available = available_memory()
        try:
            if num_bytes > available:
                raise MemoryError("more than is available")
            memory = _pages(num_bytes)
            platform.lock_pages(memory)
        except (OSError, MemoryError) as error:
            raise UserError(
                f"{self._purpose}: {num_bytes} bytes of host memory are needed by this rank, {available} are available"
                f" on this node ({error}); give the job more memory, or set it to false"
            ) from error
        # The memory is an argument, so that it outlives its registration.
        self._unlock = weakref.finalize(self, platform.unlock_pages, memory)
        self._unlock.atexit = False  # the driver may be gone by then
        self._bytes = memory


def _pages(num_bytes: int) -> torch.Tensor:
    """Return whole pages of uninitialised memory as [num_bytes] uint8. Raise OSError if there are none."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A child process would only copy page tables, and later pages.
    pages.madvise(mmap.MADV_DONTFORK)
    if Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock
    return torch.frombuffer(pages, dtype=torch.uint8)
