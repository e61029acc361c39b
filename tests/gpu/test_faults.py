"""Each part of tools/gpu_check.py notices a fault in what it checks, and its reason names the
fault."""

from __future__ import annotations

from typing import Any

import part_cases
import pytest
from gpu_parts import catalog
from gpu_parts.report import FAILED, PASSED, Report

from rlhf_mc import platform

NOT_HERE = {"sleep_graphs", "sglang", "sglang_sleep"}
"""Parts that need a GPU, or SGLang: tests/dist/test_sglang.py has the fault of `sglang`."""

pytestmark = pytest.mark.dist


def test_every_part_has_a_fault() -> None:
    assert {fault.part for fault in part_cases.FAULTS.values()} == {
        part.name for part in catalog.PARTS
    } - NOT_HERE


@pytest.mark.parametrize("fault", part_cases.FAULTS)
def test_fault_is_noticed(pool: Any, fault: str) -> None:
    (result,) = pool(1).run(part_cases.run_with, fault=fault)
    assert result.verdict == FAILED
    assert part_cases.FAULTS[fault].reason in result.reason


@pytest.mark.parametrize("on_gpu", [True, False])
def test_an_expectation_fails_where_it_has_been_measured(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "use_cuda", lambda: on_gpu)
    report = Report()
    with report.verdict():
        report.expect(True, "never said")
        report.expect(False, "3 waits")
    assert report.result.verdict == (PASSED if on_gpu else FAILED)
    assert report.result.unmeasured == ["3 waits"] * on_gpu


def test_all_ranks_are_connected_before_the_first_message(pool: Any) -> None:
    """Record the first operation of torch.distributed on tensors in the part that moves weights."""
    for operations in pool(2).run(part_cases.operations_of, name="weight_update"):
        assert operations[0] == "all_reduce" and "WeightSync.run" in operations
