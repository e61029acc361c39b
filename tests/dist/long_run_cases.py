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
from cases import built_run, submit_share
from megatron.core.distributed import DistributedDataParallel

from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer import generate, lifecycle, loop, step_state
from rlhf_mc.trainer.scores import ScoreStream


@contextmanager
def rollouts(record_to: Path | None, replay_from: Path | None) -> Iterator[None]:
    """Record every step's generations in a file, or replay them from such a file instead of generating."""
    original = generate.generate
    replayed = iter(pickle.loads(replay_from.read_bytes())) if replay_from else None
    generations: list[Any] = []

    def record_or_replay(run: Any, prompts: Any, seeds: Any, sampling: Any, stream: ScoreStream, *rest: Any) -> Any:
        if replayed:
            generations.append(next(replayed))
            submit_share(stream, generations[-1].token_ids())
        else:
            generations.append(original(run, prompts, seeds, sampling, stream, *rest))
        return generations[-1]

    generate.generate = record_or_replay
    try:
        yield
        if record_to and dist.get_rank() == 0:
            record_to.write_bytes(pickle.dumps(generations))
    finally:
        generate.generate = original


def num_trained_models() -> int:
    """Return how many models with gradients this process holds, after garbage collection."""
    gc.collect()
    return sum(isinstance(item, DistributedDataParallel) for item in gc.get_objects())


def run_steps(
    config_path: str, overrides: list[str], steps: int, export_to: str, record_to: str = "", replay_from: str = ""
) -> list[float]:
    """Run the steps and export the last weights. Return each step's mean score."""
    scores = []
    paths = [Path(path) if path else None for path in (record_to, replay_from)]
    with built_run(config_path, overrides) as run, rollouts(*paths):
        for step in range(1, steps + 1):
            state = step_state.begin_step(step, RankStatus(), (step - 1) * run.config.data.train_batch_size)
            batch = loop.one_step(run, state, StopRequests(run.config.trainer))
            assert isinstance(batch.scores, torch.Tensor)
            scores.append(float(batch.scores.mean()))
        lifecycle.export(run, state, Path(export_to))
        dist.barrier()
    return scores
