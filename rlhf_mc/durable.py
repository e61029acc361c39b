"""Files that are on the disk itself, whole, when a function returns. No torch here."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Write the file. Its name is on the disk once `sync` was called for its directory."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """Write the file in place of the one that is there, which stays until the new one is whole."""
    staging = path.with_name(f"{path.name}.tmp")
    write(staging, data)
    os.replace(staging, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or a directory's list of names, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
