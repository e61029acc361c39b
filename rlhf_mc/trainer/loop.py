"""The training loop: fit, train, and the phases of one step in their order, the same lines on every rank. The phases
themselves are in phases.py, what is logged of a step in step_report.py.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rlhf_mc.config.errors import UserError
from rlhf_mc.data.batch import Prompt, RaggedBatch
from rlhf_mc.observability.profile import profiled, warn_of_unreached
from rlhf_mc.observability.sinks import Sink, build_sinks, view
from rlhf_mc.runtime.preemption import StopRequested, StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.topology.consensus import on_every_rank, on_rank_0
from rlhf_mc.trainer import evaluate, success
from rlhf_mc.trainer.checkpointing import Checkpoints, Position
from rlhf_mc.trainer.dynamic_sampling import TooFewGroups, filtered_rollout
from rlhf_mc.trainer.health_actions import Unhealthy, act, apply_adjustments, save_start
from rlhf_mc.trainer.health_watch import HealthWatch
from rlhf_mc.trainer.histograms import record_histograms
from rlhf_mc.trainer.phases import (
    collect_rewards,
    compute_advantages,
    export,
    load_checkpoint,
    rollout,
    save_checkpoint,
    score,
    submit_rewards,
    update_actor,
    update_critic,
    validate,
)
from rlhf_mc.trainer.run_directory import EXPORT, HF
from rlhf_mc.trainer.run_record import record_end, record_start, write_views
from rlhf_mc.trainer.setup import Run
from rlhf_mc.trainer.start_table import show_start
from rlhf_mc.trainer.step_report import StepState, begin_step, log, say_on_console, step_metrics


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
    """The responses with their scores, log-probs, advantages: the same on every rank."""


def fit(run: Run, status: RankStatus | None = None, stop: StopRequests | None = None) -> bool:
    """Train until the last step, the target accuracy or a stop request. Return False if the run was stopped and is to
    be requeued. Every rank must call it. `status` is kept up to date with step and phase."""
    remaining = steps(run, status or RankStatus(), stop or StopRequests(run.config.trainer))
    while True:
        try:
            next(remaining)
        except StopIteration as end:
            return bool(end.value)


def steps(run: Run, status: RankStatus, stop: StopRequests) -> Generator[Step, None, bool]:
    """Yield each step of `fit` once its metrics are logged; return what `fit` returns. If the caller leaves the
    generator, a checkpoint that is being written is completed, and nothing is exported; all ranks must leave it after
    the same step."""
    checkpoints = Checkpoints(run)
    opened = ExitStack()
    ended = functools.partial(record_end, run.config, run.groups.rank)
    try:
        while (yield from train(run, checkpoints, status, stop, opened)):
            ended(checkpoints.position.step, "rolled back", "a health rule rolled the run back")
        return True
    except GeneratorExit:
        checkpoints.commit()
        opened.close()
        ended(checkpoints.position.step, "left", "the caller has left the run")
        raise
    except StopRequested as request:
        saved = save_last_step(run, checkpoints, status)
        opened.close()
        again = "resumes from there" if checkpoints.is_resumable else "begins anew, as another run,"
        line = f"asked to stop ({request}): {saved}; the run {again} when it is started again"
        say_on_console(run, line)
        ended(checkpoints.position.step, "stopped", line)  # and no view: a preempted process has little time
        return False
    except (TooFewGroups, Unhealthy) as error:
        saves = not isinstance(error, Unhealthy) or error.saves
        line = f"{error}; {save_last_step(run, checkpoints, status)}" if saves else str(error)
        opened.close()
        ended(checkpoints.position.step, "failed", line)
        on_rank_0(lambda: write_views(run.config))  # a rank that ended meanwhile would be taken for lost
        raise UserError(line) from None
    except Exception as error:
        ended(checkpoints.position.step, "failed", str(error))
        raise
    finally:
        checkpoints.release()


def train(
    run: Run, checkpoints: Checkpoints, status: RankStatus, stop: StopRequests, opened: ExitStack
) -> Generator[Step, None, bool]:
    """Resume, run and yield the remaining steps, and export the trained actor. Return True if the run was rolled back
    instead, and is to resume. Raise StopRequested only while the weights are those of the last complete step. opened:
    gets what is to be closed where the steps end early."""
    schedule = run.schedule
    directory = Path(run.config.trainer.default_local_dir)
    position = resume(run, checkpoints, status)
    run_id = checkpoints.run_id
    if run.config.trainer.val_only:
        validate_only(run, begin_step(position.step, status), run_id)
        return False
    sinks, health = start(run, checkpoints, status, opened)
    step = position.step
    num_batches = position.num_batches
    accuracy = position.accuracy
    while act(run, checkpoints, step, health) == "continues":
        if schedule.is_last(step, num_batches, accuracy):
            break
        step += 1
        state = begin_step(step, status, num_batches)
        apply_adjustments(run, step)
        with profiled(run.config, step, state.timer, run.groups):
            batch = one_step(run, state, stop)
            num_batches = state.num_batches
            accuracy = validate(run, state) if schedule.is_validation_due(step, num_batches) else None
            health.step_done(state)
            if schedule.is_export_due(step) and not health.last.acting:
                export(run, state, directory / EXPORT / f"global_step_{step}", run_id)
            checkpoints.step_done(step, num_batches, accuracy, state.metrics, health.last.is_healthy)
            if schedule.is_save_due(step, num_batches, accuracy):
                save_checkpoint(run, state, checkpoints)
        log(sinks, state)
        record_histograms(run.config, run.groups.rank, run_id, step, batch)
        checkpoints.commit_if_written()
        stop.steps_done += 1
        yield Step(step, state.metrics, state.prompts, batch)
    else:
        on_every_rank(opened.close)
        return True
    health.close(step)
    checkpoints.commit()
    export(run, begin_step(step, status), directory / HF, run_id)
    reason = "the target accuracy is reached" if schedule.reaches_target(accuracy) else "all steps are done"
    close_run(run, sinks, run_id, step, reason)
    say_on_console(run, f"{reason}; the trained actor is in {directory / HF}, metrics, plot and samples beside it")
    return False


def resume(run: Run, checkpoints: Checkpoints, status: RankStatus) -> Position:
    """Load the checkpoint to resume from, if there is one, and the adjustments of the run. Return the position of the
    run. A roll-back repeats none of the lines of the start."""
    status.total_steps = run.schedule.total_steps
    position = load_checkpoint(run, begin_step(0, status), checkpoints)
    run.adjustments.load()
    if not checkpoints.is_rolled_back:
        for line in run.adjustments.in_effect(position.step):
            say_on_console(run, line)
        last = position.step if run.config.trainer.val_only else run.schedule.total_steps
        warn_of_unreached(run.config, position.step, last)
    return position


def start(run: Run, checkpoints: Checkpoints, status: RankStatus, opened: ExitStack) -> tuple[Sink, HealthWatch]:
    """Open the sinks, record the start, show who holds what, and validate and save the weights before the first step
    where that is due. opened: gets the sinks."""
    position = checkpoints.position
    after = checkpoints.resumed_step
    run_id = checkpoints.run_id
    sinks = on_every_rank(lambda: build_sinks(run.groups.rank, run.config, run.schedule.total_steps, after, run_id))
    opened.callback(sinks.close)
    record_start(run.config, run_id, position.step)
    health = HealthWatch(run, run_id, position.step)
    if not checkpoints.is_rolled_back:
        show_start(run)
    if after is None and run.schedule.is_first_validation_due():
        state = begin_step(0, status)
        position.accuracy = validate(run, state)
        log(sinks, state)
    save_start(run, begin_step(position.step, status), checkpoints)
    return sinks, health


def one_step(run: Run, state: StepState, stop: StopRequests) -> RaggedBatch:
    """Run the phases of one step. Return its batch with all per-token results. Raise StopRequested, if a stop is
    requested, before the first update."""
    stop.check()
    with state.timer.phase("step"):
        if run.config.algorithm.filter_groups.enable:
            # Which responses the next phases see depends on the scores, so that scoring cannot overlap with them.
            prompts, batch = filtered_rollout(run, state, stop)
            batch = score(run, state, batch)
            stop.check()
        else:
            prompts, batch = rollout(run, state)
            stop.check()
            pending = submit_rewards(run, state, prompts, batch)
            batch = score(run, state, batch)
            end_check = stop.start_check()
            batch = collect_rewards(run, state, prompts, batch, pending)
            end_check()
        state.prompts = prompts
        batch = compute_advantages(run, state, batch)
        update_critic(run, state, batch)
        update_actor(run, state, batch)
    state.packing.clear()  # validation needs the device memory
    step_metrics(run, state, batch)
    return batch


def validate_only(run: Run, state: StepState, run_id: str) -> None:
    """Validate the current weights. The metrics go to the console and to validation/step_<n>.json, since the step's row
    in metrics.jsonl may be there already."""
    show_start(run)
    validate(run, state)
    cfg = run.config.trainer
    directory = Path(cfg.default_local_dir)
    for name, value in sorted(state.metrics.items()):
        if name.startswith("val-core/"):
            say_on_console(run, f"step {state.step}: {name} {value:.4f}")
    if run.groups.rank == 0:
        view("validation/", lambda: evaluate.write_metrics(directory, state.step, state.metrics))
    on_rank_0(lambda: success.write(directory, run_id, state.step), "trainer.default_local_dir")


def save_last_step(run: Run, checkpoints: Checkpoints, status: RankStatus) -> str:
    """Save the last complete step, whose weights the models still hold. Return what is saved, in words."""
    step = checkpoints.position.step
    save_checkpoint(run, begin_step(step, status), checkpoints, wait=True)
    is_saved = step or checkpoints.is_resumable
    return f"the checkpoint of step {step} is complete" if is_saved else "no step is complete yet, so none is saved"


def close_run(run: Run, sinks: Sink, run_id: str, step: int, reason: str) -> None:
    """Close the sinks, write plot and report and, last of all, the success marker. Every rank must call it. reason: why
    the run has ended."""
    cfg = run.config.trainer
    directory = Path(cfg.default_local_dir)
    on_every_rank(sinks.close)
    record_end(run.config, run.groups.rank, step, "finished", reason)
    if run.groups.rank == 0:
        write_views(run.config)
    on_rank_0(lambda: success.write(directory, run_id, step), "trainer.default_local_dir")
