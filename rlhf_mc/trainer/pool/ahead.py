"""Sampling one step ahead (rollout.one_step_off), and the part of a step in which training ranks
and ranks of a rollout pool work at the same time, without a collective of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.roles import prompts_per_batch
from rlhf_mc.data.batch import Prompt, RaggedBatch
from rlhf_mc.runtime.heartbeat import await_all_ranks
from rlhf_mc.topology.consensus import gather_vectors, on_every_rank
from rlhf_mc.trainer.log_probs import log_probs, teacher_log_probs
from rlhf_mc.trainer.pool.generate import wake_weights
from rlhf_mc.trainer.pool.group_pool import ScoredBatch
from rlhf_mc.trainer.pool.sampling import GroupSampling, add_greedy
from rlhf_mc.trainer.pool.strategies import AllGroups, Strategy, choose_strategy, next_position
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.scores import FailedInPool, scores_by_role
from rlhf_mc.trainer.step_state import StepState


def next_batch(run: Run, state: StepState) -> ScoredBatch:
    """Return the batch that the step before has sampled. In the first step, sample it now; after a
    resume, score it again."""
    pool = run.group_pool
    if pool.next_batch is None:
        _end(run, state, _begin(run, state, AllGroups(), is_ahead=False))
    assert pool.next_batch is not None
    batch, pool.next_batch = pool.next_batch, None
    size = prompts_per_batch(run.config.data)
    groups = pool.groups[:size]
    pool.groups = pool.groups[size:]
    state.num_prompts = next_position(run)
    add_greedy(run, state, groups, batch[2])
    return batch


def _begin(run: Run, state: StepState, strategy: Strategy, is_ahead: bool) -> GroupSampling:
    """Begin to sample a batch with the present weights. Ranks with an engine return when their
    responses have ended, others at once. Every rank must call it."""
    wake_weights(run, state)
    with run.offload_schedule.phase(state.timer, "gen"):
        needed = prompts_per_batch(run.config.data)
        sampling = GroupSampling(run, state, strategy, needed, is_ahead)
        sampling.begin()
    return sampling


def _end(run: Run, state: StepState, sampling: GroupSampling) -> None:
    """Exchange the responses of `_begin`. Their groups are the first ones of the pool, so that a
    checkpoint has them. Every rank must call it."""
    pool = run.group_pool
    groups, pool.next_batch = sampling.end()
    pool.groups = [*groups, *pool.groups]
    state.num_prompts = next_position(run)


@contextmanager
def pools_at_work(
    run: Run, state: StepState, prompts: list[Prompt], batch: RaggedBatch
) -> Iterator[None]:
    """Generate the batch of the next step before the body, with rollout.one_step_off, and exchange
    its responses after it; ranks without an engine begin with the body. Before that, ranks of a
    rollout pool score this step's batch with their frozen models (pool: rollout). Where engines
    have ranks of their own, raise on all ranks the UserError of any, and note how long the ranks of
    each pool have waited. Every rank must enter it."""
    error: UserError | None = None
    sampling: GroupSampling | None = None
    is_ahead = run.config.rollout.one_step_off
    try:
        if not run.trains:
            teacher_log_probs(run, state, prompts, log_probs(run, state, batch))
            if batch.scores is None:  # algorithm.filter_groups has scored them to choose them
                scores_by_role(run, state, prompts, batch)
        if is_ahead and state.step < run.schedule.total_steps:
            sampling = _begin(run, state, choose_strategy(run), is_ahead)
        yield
    except FailedInPool:
        pass  # those ranks have the error
    except UserError as own:
        if not run.has_rollout_pool:
            raise
        error = own
    if run.has_rollout_pool:

        def outcome() -> None:
            if error is not None:
                raise error

        with state.timer.phase("idle"):
            await_all_ranks()
            on_every_rank(outcome)
        for work in state.sent:
            work.wait()
        _gather_times(run, state)
    if sampling is not None:
        _end(run, state, sampling)
    if is_ahead:
        state.metrics["training/off_policy/kept_groups"] = len(run.group_pool.groups)


def _gather_times(run: Run, state: StepState) -> None:
    """Set state.idle_seconds, and the times of generation and of the rollout pool's models to those
    of its ranks."""
    times = state.timer.result()
    phases = ["gen", *(model.name for model in run.models() if model.groups.mesh.first)]
    seconds = [times.get(f"timing_s/{name}", 0.0) for name in phases]
    idle = times["timing_s/idle"] + (seconds[0] if run.trains else 0.0)
    rows = gather_vectors(torch.tensor([idle, *seconds], dtype=torch.float64))
    num_training = run.groups.mesh.world
    state.idle_seconds = {
        "train": float(rows[:num_training, 0].mean()),
        "rollout": float(rows[num_training:, 0].mean()),
    }
    for name, longest in zip(phases, rows[num_training:, 1:].amax(dim=0).tolist(), strict=True):
        state.timer.set(name, longest)
