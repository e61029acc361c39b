"""Python's garbage collector, which visits all objects again and again while many are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collector() -> Iterator[None]:
    """Turn Python's garbage collector off. It gets back the state that it had."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
