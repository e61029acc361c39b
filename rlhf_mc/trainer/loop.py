"""PPO: the phases of a step, one line each, and the loop over the steps. Every rank runs the same
lines. What resumes, rolls back, stops and closes a run is in lifecycle.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhf_mc.data.batch import Prompt, RaggedBatch
from rlhf_mc.observability.profile import profiled
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer.advantages import compute_advantages
from rlhf_mc.trainer.evaluate import validate
from rlhf_mc.trainer.lifecycle import Lifecycle
from rlhf_mc.trainer.log_probs import log_probs, teacher_log_probs
from rlhf_mc.trainer.pool.ahead import pools_at_work
from rlhf_mc.trainer.pool.generate import update_weights
from rlhf_mc.trainer.pool.rollout import rollout
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.scores import rewards
from rlhf_mc.trainer.step_report import step_metrics
from rlhf_mc.trainer.step_state import StepState
from rlhf_mc.trainer.update import update_actor, update_critic


def one_step(run: Run, state: StepState, stop: StopRequests) -> RaggedBatch:
    """Run the phases of one step. Return its batch with all per-token results. Raise StopRequested,
    if a stop is requested, before the first update."""
    stop.check()
    with state.timer.phase("step"):
        update_weights(run, state.timer)  # the actor's, into the engine's parameters
        prompts, batch, pending = rollout(run, state, stop)  # reward workers score what has ended
        with pools_at_work(run, state, prompts, batch):
            if run.trains:  # ranks of a rollout pool may generate meanwhile
                batch = log_probs(run, state, batch)  # reference's, values, old ones if read
                batch = teacher_log_probs(run, state, prompts, batch)  # if there are teachers
                batch = rewards(run, state, prompts, batch, pending, stop)
                batch = compute_advantages(run, state, batch)
                update_critic(run, state, batch)
                batch = update_actor(run, state, batch)
    step_metrics(run, state, batch)
    return batch


@dataclass(frozen=True)
class Step:
    """A completed step."""

    number: int
    """1 for the first step of the run."""
    metrics: Mapping[str, float]
    """docs/metrics.md lists the keys."""
    prompts: Sequence[Prompt]
    """The prompt of each response, repeated for its rollout.n responses."""
    batch: RaggedBatch
    """The responses with their scores, log-probs, advantages: the same on every rank, but for those
    of a rollout pool, which have no results of models."""


def steps(run: Run, status: RankStatus, stop: StopRequests) -> Iterator[Step]:
    """Train until the last step, the target accuracy or a stop request, and yield each step once
    its metrics are logged. Then export the trained actor, unless the run was stopped
    (stop.is_obeyed). If the caller leaves the generator, a checkpoint that is being written is
    completed, and nothing is exported; all ranks must leave it after the same step. `status` is
    kept up to date with step and phase."""
    with Lifecycle(run, status, stop) as life:
        for number in life.remaining_steps():
            state = life.begin_step(number)
            with profiled(run.config, number, state.timer, run.groups):
                batch = one_step(run, state, stop)
                is_due = run.schedule.is_validation_due(number, state.num_prompts)
                accuracy = validate(run, state) if is_due else None
                life.save_step(state, accuracy)
            life.log_step(state, batch)
            yield Step(number, state.metrics, state.prompts, batch)


def fit(run: Run, status: RankStatus | None = None, stop: StopRequests | None = None) -> bool:
    """Train as `steps`. Return False if the run was stopped and is to be requeued. Every rank must
    call it."""
    stop = stop or StopRequests(run.config.trainer)
    deque(steps(run, status or RankStatus(), stop), maxlen=0)  # which holds no step
    return not stop.is_obeyed
