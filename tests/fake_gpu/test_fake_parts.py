"""Parts of tools/gpu_check.py on fake CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_parts_list import NOT_EXECUTED
from gpu_parts.catalog import PARTS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", [part.name for part in PARTS if part.name not in NOT_EXECUTED])
def test_part_runs(on_fake_gpu: Callable[..., Any], name: str) -> None:
    on_fake_gpu("fake_parts", "run", name)


def test_parts_that_do_not_run_are_of_the_catalog() -> None:
    assert NOT_EXECUTED.keys() <= {part.name for part in PARTS}
