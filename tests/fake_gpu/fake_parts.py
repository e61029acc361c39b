"""Parts of tools/gpu_check.py on fake CUDA devices: their code runs, and what they compare is not
judged."""

from __future__ import annotations

import contextlib
from unittest import mock

from fake_device import FakeCuda
from fake_steps import simulation
from gpu_parts import catalog
from gpu_parts.report import Report
from gpu_parts.sizes import SMALL

from rlhf_mc.topology.groups import simulated_rank


def run(name: str) -> None:
    """Run a part as the only rank. Raise what it raises."""
    gpu = FakeCuda()
    gpu.phase = name
    with contextlib.ExitStack() as stack:
        stack.enter_context(simulated_rank(0, 1))
        stack.enter_context(simulation())
        stack.enter_context(
            mock.patch.object(Report, "case", lambda self, case: contextlib.nullcontext())
        )
        stack.enter_context(gpu)
        catalog.find(name).function()(Report(), SMALL)
