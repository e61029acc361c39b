"""Functions that the ranks run in test_long_run.py."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import built_run
from megatron.core.distributed import DistributedDataParallel

from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer import lifecycle, loop, step_state
from rlhf_mc.trainer.pool.generate import EngineCall


@contextmanager
def rollouts(record_to: Path | None, replay_from: Path | None) -> Iterator[None]:
    """Record every step's generations in a file, or replay them from such a file instead of
    generating."""
    original = EngineCall.sample
    replayed = iter(pickle.loads(replay_from.read_bytes())) if replay_from else None
    generations: list[Any] = []

    def record_or_replay(call: EngineCall) -> Any:
        if replayed:
            generations.append(next(replayed))
            numbered = enumerate(generations[-1].generations())
            world = dist.get_world_size()
            call._on_ended({i: one for i, one in numbered if i % world == dist.get_rank()})
        else:
            generations.append(original(call))
        return generations[-1]

    EngineCall.sample = record_or_replay  # type: ignore[method-assign]
    try:
        yield
        if record_to and dist.get_rank() == 0:
            record_to.write_bytes(pickle.dumps(generations))
    finally:
        EngineCall.sample = original  # type: ignore[method-assign]


def num_trained_models() -> int:
    """Return how many models with gradients this process holds of those that the current function
    of a test has made, after garbage collection."""
    gc.collect()
    return sum(isinstance(item, DistributedDataParallel) for item in gc.get_objects())


def run_steps(
    config_path: str,
    overrides: list[str],
    steps: int,
    export_to: str,
    record_to: str = "",
    replay_from: str = "",
) -> tuple[list[float], tuple[int, int]]:
    """Run the steps and export the last weights. Return each step's mean score, and
    num_trained_models() before and after the end of the run."""
    scores = []
    paths = [Path(path) if path else None for path in (record_to, replay_from)]
    with built_run(config_path, overrides) as run, rollouts(*paths):
        for step in range(1, steps + 1):
            state = step_state.begin_step(
                step, RankStatus(), (step - 1) * run.config.data.train_batch_size
            )
            batch = loop.one_step(run, state, StopRequests(run.config.trainer))
            assert isinstance(batch.scores, torch.Tensor)
            scores.append(float(batch.scores.mean()))
        lifecycle.export(run, state, Path(export_to))
        dist.barrier()
        during = num_trained_models()
    del run, state, batch
    return scores, (during, num_trained_models())
