"""vLLM's sleep under our engine's order of calls (lock_sleep.py), with the build of vLLM that the
tests have."""

from __future__ import annotations

import lock_sleep
import pytest


@pytest.mark.parametrize("name", lock_sleep.CHECKS)
def test_sleep(name: str) -> None:
    lock_sleep.CHECKS[name]()
