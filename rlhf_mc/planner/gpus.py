"""GPUs by name."""

from __future__ import annotations

from rlhf_mc.config.errors import UserError

MEMORY = {"a100": 80 << 30, "h100": 80 << 30, "h200": 141 * 10**9, "b200": 180 * 10**9}
"""Bytes of device memory by the vendor's data sheets. The driver keeps some hundred MB of it (memory.RESERVED)."""


def memory_of(gpu: str) -> int:
    """Return the bytes of device memory of a GPU, which is named or given by its bytes. Raise UserError if it is
    neither."""
    if gpu.lower() in MEMORY:
        return MEMORY[gpu.lower()]
    try:
        found = int(float(gpu))
    except (ValueError, OverflowError):
        found = 0
    if found < 1 << 30:
        raise UserError(
            f"--gpu is {gpu!r}; it must be one of {', '.join(MEMORY)}, or its memory in bytes, such as 80e9"
        )
    return found
