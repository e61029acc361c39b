"""Each part of tools/gpu_check.py notices a fault in what it checks, and its reason names the fault."""

from __future__ import annotations

from typing import Any

import part_cases
import pytest
from gpu_parts import catalog
from gpu_parts.report import FAILED

GPU_ONLY = {"sleep"}

pytestmark = pytest.mark.dist


def test_every_part_has_a_fault() -> None:
    assert {fault.part for fault in part_cases.FAULTS.values()} == {part.name for part in catalog.PARTS} - GPU_ONLY


@pytest.mark.parametrize("fault", part_cases.FAULTS)
def test_fault_is_noticed(pool: Any, fault: str) -> None:
    (result,) = pool(1).run(part_cases.run_with, fault=fault)
    assert result.verdict == FAILED
    assert part_cases.FAULTS[fault].reason in result.reason
