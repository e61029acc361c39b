"""The ranks that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from workers import Workers


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Workers]]:
    """Return pool(world): the workers of that world size, started at its first use and kept for the session."""
    started: dict[int, Workers] = {}

    def get(world: int) -> Workers:
        if world not in started:
            started[world] = Workers(world)
        return started[world]

    yield get
    for workers in started.values():
        workers.close()
