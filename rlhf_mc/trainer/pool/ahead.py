"""Sampling one step ahead (rollout.one_step_off), and the part of a step in which training ranks
and ranks of a rollout pool work at the same time, without a collective of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from rlhf_mc.config.errors import UserError
from rlhf_mc.data.batch import Prompt, RaggedBatch, Responses
from rlhf_mc.rollout.base import Sampling
from rlhf_mc.runtime.heartbeat import await_all_ranks
from rlhf_mc.topology.consensus import gather_vectors, on_every_rank
from rlhf_mc.trainer.pool.generate import (
    CallPlan,
    EngineCall,
    group_batch,
    repeat_prompts,
    wake_weights,
)
from rlhf_mc.trainer.pool.strategies import draw, next_position
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.scores import GroupScores, ScoreStream
from rlhf_mc.trainer.step_state import StepState


def next_batch(run: Run, state: StepState) -> tuple[list[Prompt], RaggedBatch, ScoreStream]:
    """Return the batch that the step before has sampled: the prompt of each response, the
    responses, and their scores to come. In the first step, sample it now."""
    pool = run.group_pool
    if pool.stream is None:  # in the first step, and after a resume
        begin(run, state)
        end(run, state)
    assert pool.stream is not None
    stream, pool.stream = pool.stream, None
    size = run.config.data.train_batch_size
    groups = pool.groups[:size]
    pool.groups = pool.groups[size:]
    state.num_prompts = next_position(run)
    responses = Responses.of([response for group in groups for response in group.responses])
    return *group_batch(groups, responses, state.step - 1), stream


def begin(run: Run, state: StepState) -> None:
    """Begin to sample the batch of the next step with the present weights. Ranks with an engine
    return when their responses have ended, and have submitted them to their reward workers; others
    return at once. Every rank must call it."""
    cfg = run.config
    wake_weights(run, state)
    with run.offload_schedule.phase(state.timer, "gen"):
        retained = run.group_pool.groups[: cfg.data.train_batch_size]
        groups = [*retained, *draw(run, cfg.data.train_batch_size - len(retained))]
        prompts = repeat_prompts([group.prompt for group in groups], cfg.rollout.n)
        run.group_pool.stream = ScoreStream(run.rewards, run.tokenizer, prompts)
        certain = np.ones(len(groups), dtype=bool)
        plan = CallPlan(groups, len(groups), certain, is_resumable=True)
        most = cfg.data.max_response_length
        sampling = Sampling(cfg.rollout.temperature, most, run.stop_token_ids)
        scores = GroupScores(run.group_pool.stream, cfg.rollout.n)
        state.ahead = EngineCall(run, plan, sampling, scores)
        state.ahead.begin()
        scores.submit(certain)
        run.group_pool.stream.submit({})  # those that waited for all


def end(run: Run, state: StepState) -> None:
    """Exchange the responses of `begin`, and add their groups to the pool. Every rank must call
    it."""
    assert state.ahead is not None and run.group_pool.stream is not None
    groups = state.ahead.collect(state.ahead.end(), state.step - 1)
    run.group_pool.groups = [*groups, *run.group_pool.groups[len(groups) :]]
    state.num_generated += state.ahead.num_sampled
    state.ahead = None


@contextmanager
def pools_at_work(run: Run, state: StepState) -> Iterator[None]:
    """Generate the batch of the next step before the body, with rollout.one_step_off, and exchange
    its responses after it; ranks without an engine begin with the body. Where engines have ranks of
    their own, raise on all ranks the UserError of any, and note how long the ranks of each pool
    have waited. Every rank must enter it."""
    error: UserError | None = None
    try:
        if run.config.rollout.one_step_off and state.step < run.schedule.total_steps:
            begin(run, state)
        yield
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
        _gather_times(run, state)
    if state.ahead is not None:
        end(run, state)
    if run.config.rollout.one_step_off:
        state.metrics["training/off_policy/kept_groups"] = len(run.group_pool.groups)


def _gather_times(run: Run, state: StepState) -> None:
    """Set state.idle_seconds, and the time of generation to that of the ranks that generate."""
    times = state.timer.result()
    generation = times.get("timing_s/gen", 0.0)
    idle = times["timing_s/idle"] + (generation if run.trains else 0.0)
    rows = gather_vectors(torch.tensor([idle, generation], dtype=torch.float64))
    num_training = run.groups.mesh.world
    state.idle_seconds = {
        "train": float(rows[:num_training, 0].mean()),
        "rollout": float(rows[num_training:, 0].mean()),
    }
    state.timer.set("gen", float(rows[num_training:, 1].max()))
