"""The parts of tools/gpu_check.py: on the CPU, in the ranks that tests share; with `-m gpu` on a
GPU, by the
command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import part_cases
import pytest
from gpu_parts import catalog
from gpu_parts.report import PASSED, SKIPPED

ROOT = Path(__file__).parents[2]
RANKS = 2
ON_CPU = [
    part.name
    for part in catalog.PARTS
    if not catalog.missing(part, "cpu", RANKS) and not part.rank_0_only
]
"""test_faults.py runs parts on one rank."""


@pytest.mark.dist
@pytest.mark.parametrize("name", ON_CPU)
def test_part_passes_on_the_cpu(pool: Any, name: str) -> None:
    for rank, result in enumerate(pool(RANKS).run(part_cases.run, name=name)):
        assert result.verdict == PASSED, f"rank {rank}: {result.reason}"
        if rank == 0:
            assert result.figures and result.summary


@pytest.mark.gpu
@pytest.mark.parametrize("name", [part.name for part in catalog.PARTS])
def test_part_passes_on_a_gpu(name: str, tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    output = tmp_path / "out.json"
    command = [sys.executable, "tools/gpu_check.py", "--device", "cuda", "--small", "--parts", name]
    done = subprocess.run(
        [*command, "--output", str(output)], cwd=ROOT, capture_output=True, text=True
    )
    result = json.loads(output.read_text())["parts"][name]
    if result["verdict"] == SKIPPED:
        pytest.skip(result["reason"])
    assert done.returncode == 0, done.stdout
