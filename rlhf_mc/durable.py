"""Durable writes: files are synced to the disk when a function returns. No torch here."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Write and sync the file. Its name is durable after `sync` of its directory."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """Replace the file atomically and sync it."""
    staging = path.with_name(f"{path.name}.tmp")
    write(staging, data)
    os.replace(staging, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
