"""What the ranks run in test_long_run.py."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import a_run

from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer import loop, phases, sampling, step_report


@contextmanager
def rollouts(recorded_in: Path | None, fed_from: Path | None) -> Iterator[None]:
    """Writes every step's generations to a file, or takes them from such a file instead of from the engine."""
    generate = sampling.generate
    fed = iter(pickle.loads(fed_from.read_bytes())) if fed_from else None
    drawn: list[Any] = []

    def instead(*args: Any) -> Any:
        drawn.append(next(fed) if fed else generate(*args))
        return drawn[-1]

    sampling.generate = instead
    try:
        yield
        if recorded_in and dist.get_rank() == 0:
            recorded_in.write_bytes(pickle.dumps(drawn))
    finally:
        sampling.generate = generate


def some_steps(
    config_path: str, overrides: list[str], steps: int, export_to: str, recorded_in: str = "", fed_from: str = ""
) -> list[float]:
    """Each step's mean score; the last weights are exported."""
    scores = []
    paths = [Path(path) if path else None for path in (recorded_in, fed_from)]
    with a_run(config_path, overrides) as run, rollouts(*paths):
        for step in range(1, steps + 1):
            state = step_report.begin_step(step, RankStatus())
            batch = loop.one_step(run, state, StopRequests(run.config.trainer))
            assert isinstance(batch.scores, torch.Tensor)
            scores.append(float(batch.scores.mean()))
        phases.export(run, state, Path(export_to))
        dist.barrier()
    return scores
