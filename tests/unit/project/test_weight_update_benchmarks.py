"""The benchmarks of the weight update at small sizes: all ways write the same bits, and fused
copies are fewer."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_views_made_once_and_remade_write_the_same_bits(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the program, which compares the bits of all ways itself."""
    program = benchmark("gpu.weight_update")
    monkeypatch.setattr(
        sys, "argv", ["weight_update.py", "--small", "--layers", "2", "--repeats", "1"]
    )
    program.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["local", "remade", "separate",
     "stacked", "messages", *(
        "remade", "separate", "stacked"
    )]  # fmt: skip


@pytest.mark.slow
def test_a_stack_of_experts_is_one_launch(benchmark: Any) -> None:
    cells = benchmark("reshard_host_time").measure("qwen3-30b-a3b", repeats=1)
    remade, separate, stacked = (int(cell.split(", ")[0].replace(",", "")) for cell in cells[-3:])
    transfers = int(cells[2].replace(",", ""))
    assert stacked < separate < remade and stacked < transfers < remade
