"""Functions that the ranks run in test_parts.py."""

from __future__ import annotations

import torch
from gpu_parts import catalog
from gpu_parts.report import Report, Result
from gpu_parts.sizes import SMALL


def run(name: str) -> Result:
    """Run a part with small sizes on this rank."""
    report = Report()
    part = catalog.find(name)
    torch.use_deterministic_algorithms(part.deterministic)
    try:
        with report.verdict():
            part.function()(report, SMALL)
    finally:
        torch.use_deterministic_algorithms(False)
    return report.result
