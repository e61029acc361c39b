"""The life of a run around its steps: resume, act on health rules, save, stop, export, close."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from rlhf_mc.checkpoint.hf_export import export_hf
from rlhf_mc.checkpoint.peft_format import ADAPTER, export_adapters
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.health_schema import rolls_back
from rlhf_mc.config.schema import Config, TrainerConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import engine_layouts
from rlhf_mc.observability.profile import warn_of_unreached
from rlhf_mc.observability.sinks import Sink, best_effort, build_sinks
from rlhf_mc.report.page import read_runs, write_report
from rlhf_mc.run_directory import ownership
from rlhf_mc.run_directory.ownership import EXPORT, HF
from rlhf_mc.run_directory.starts import RunEnd, record_end, record_start
from rlhf_mc.run_files import REPORT
from rlhf_mc.runtime.preemption import StopRequested, StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.topology.consensus import all_have_left, on_every_rank, on_rank_0, record_next_step
from rlhf_mc.trainer import evaluate
from rlhf_mc.trainer.health_watch import HealthWatch, Unhealthy, act
from rlhf_mc.trainer.pool.rollout import TooFewGroups
from rlhf_mc.trainer.resume import Resume, lock_directory, saved_models
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.samples import record_histograms, samples_path
from rlhf_mc.trainer.save import CheckpointSaver
from rlhf_mc.trainer.scores import record_tokens
from rlhf_mc.trainer.start_table import show_start
from rlhf_mc.trainer.step_report import log, print_on_console
from rlhf_mc.trainer.step_state import StepState, begin_step


class Lifecycle:
    """All that surrounds the steps of a run. Every rank must call each method. As a context, it
    ends the run according to what ends the steps."""

    def __init__(self, run: Run, status: RankStatus, stop: StopRequests) -> None:
        self._run = run
        self._status = status
        status.trains = run.trains
        self._stop = stop
        models = saved_models(run)
        self._lock = lock_directory(run.config.trainer)
        self._resume = Resume(run, models)
        self._saver = CheckpointSaver(run, models, self._lock)
        self._directory = Path(run.config.trainer.default_local_dir)
        self._opened = ExitStack()
        """Closes what the steps have opened."""
        self._sinks: Sink
        self._health: HealthWatch

    # ------------------------------------------------------------ steps

    def remaining_steps(self) -> Iterator[int]:
        """Yield the number of each step from the checkpoint that the run resumes from to the last
        one, then export and close. After a roll-back the steps continue from an earlier one."""
        run = self._run
        if run.config.trainer.val_only:
            self._validate_only()
            return
        while True:
            self._resume_run()
            self._start()
            position = self._saver.position
            while act(run, self._roll_back, position.step, self._health) == "continues":
                if run.schedule.is_last(position.step, position.num_prompts, position.accuracy):
                    self._finish()
                    return
                yield position.step + 1
                record_next_step(position.step)
            on_every_rank(self._opened.close)
            self._record_end("rolled back", "a health rule rolled the run back")

    def _roll_back(self) -> int | None:
        self._saver.finish()
        return self._resume.roll_back(self._saver.position.last_healthy_step)

    def begin_step(self, step: int) -> StepState:
        """Return the state of the next step, whose learning rates are set."""
        if self._run.environments is not None:
            self._run.environments.journal.begin_step(step)
        factor = self._run.adjustments.learning_rate_factor(step)
        for model in self._run.trained_models():
            model.scale_learning_rate(factor)
        return begin_step(step, self._status, self._saver.position.num_prompts)

    def save_step(self, state: StepState, accuracy: float | None) -> None:
        """Check the health of a complete step, and export and save where that is due. accuracy: of
        the validation after the step, if any."""
        run = self._run
        self._health.step_done(state)
        healthy = self._health.last
        if run.schedule.is_export_due(state.step) and not healthy.acting:
            export(
                run,
                state,
                self._directory / EXPORT / f"global_step_{state.step}",
                self._saver.start.run_id,
            )
        self._saver.step_done(state, accuracy, healthy.is_healthy)
        if (
            run.schedule.is_save_due(state.step, state.num_prompts, accuracy)
            or self._saver.is_due()
        ):
            self._saver.begin(state.timer)

    def log_step(self, state: StepState, batch: RaggedBatch) -> None:
        """Log the metrics and some responses of a complete step, and commit a checkpoint that is
        written."""
        with self._saver.naming_last_checkpoint():
            log(self._sinks, state)
        record_tokens(self._run, state, batch)
        record_histograms(
            self._run.config, self._run.groups.rank, self._saver.start.run_id, state.step, batch
        )
        self._saver.finish_if_written()
        self._stop.steps_done += 1

    # ------------------------------------------------------------ start

    def _resume_run(self) -> None:
        """Load the checkpoint to resume from, if there is one, and the adjustments of the run. A
        roll-back repeats none of the lines of the start."""
        run = self._run
        self._status.total_steps = run.schedule.total_steps
        start = self._resume.load(begin_step(0, self._status).timer)
        self._saver.start_from(start)
        run.adjustments.load()
        if not self._resume.is_rolled_back:
            for line in run.adjustments.in_effect(start.position.step):
                print_on_console(run.config, line)
            warn_of_unreached(run.config, start.position.step, run.schedule.total_steps)

    def _start(self) -> None:
        """Open the sinks, record the start, show who holds what, and validate and save the weights
        before the first step where that is due."""
        run = self._run
        position = self._saver.position
        after = self._saver.start.resumed_step
        run_id = self._saver.start.run_id
        total = run.schedule.total_steps
        self._sinks = on_every_rank(
            lambda: build_sinks(run.groups.rank, run.config, total, after, run_id)
        )
        self._opened.callback(self._sinks.close)
        record_start(run.config, run_id, position.step)
        self._health = HealthWatch(run, run_id, position.step)
        if not self._resume.is_rolled_back:
            show_start(run)
        if after is None and run.schedule.is_first_validation_due():
            state = begin_step(0, self._status)
            position.accuracy = evaluate.validate(run, state)
            log(self._sinks, state)
        if (
            rolls_back(run.config.health)
            and position.step == 0
            and position.last_healthy_step is None
        ):
            # A health rule may roll the run back to the weights before the first step.
            self._saver.begin(begin_step(0, self._status).timer)

    def _validate_only(self) -> None:
        """Validate the initial weights or a checkpoint's. Metrics and samples go to the console and
        to validation/; no file of a run is changed."""
        run = self._run
        step = self._resume.load_read_only(begin_step(0, self._status).timer)
        on_rank_0(
            lambda: _check_no_samples(run.config.trainer, step), "trainer.validation_data_dir"
        )
        state = begin_step(step, self._status)
        show_start(run)
        evaluate.validate(run, state)
        for name, value in sorted(state.metrics.items()):
            if name.startswith("val-core/"):
                print_on_console(run.config, f"step {state.step}: {name} {value:.4f}")
        on_rank_0(
            lambda: evaluate.write_metrics(self._directory, step, state.metrics),
            str(self._directory),
        )

    # ------------------------------------------------------------ end

    def _finish(self) -> None:
        """Export the trained actor, close the sinks, write the report and, last of all, the success
        marker."""
        run = self._run
        position = self._saver.position
        self._health.close(position.step)
        self._saver.finish()
        run_id = self._saver.start.run_id
        hf = self._directory / HF
        export(run, begin_step(position.step, self._status), hf, run_id)
        reached = run.schedule.reaches_target(position.accuracy)
        reason = "the target accuracy is reached" if reached else "all steps are done"
        on_every_rank(self._sinks.close)
        self._record_end("finished", reason)
        if run.groups.rank == 0:
            write_run_report(run.config)
        on_rank_0(
            lambda: ownership.write_success(self._directory, run_id, position.step),
            "trainer.default_local_dir",
        )
        beside = "metrics, report and samples beside it"
        print_on_console(run.config, f"{reason}; the trained actor is in {hf}, {beside}")

    def __enter__(self) -> Lifecycle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        try:
            return self._end(error)
        finally:
            if self._run.groups.rank == 0:
                self._lock.release()

    def _end(self, error: BaseException | None) -> bool:
        """End the run because of an error, a stop request or a caller that leaves (GeneratorExit).
        Return True for a stop request: it is obeyed."""
        run = self._run
        if isinstance(error, GeneratorExit):
            step = self._saver.position.step
            if not all_have_left(step):  # the caller raised an exception on this rank
                raise UserError(
                    f"this rank has left the loop after step {step}, and another continues"
                ) from None
            self._saver.finish()
            self._opened.close()
            self._record_end("left", "the caller has left the run")
        elif isinstance(error, StopRequested):
            saved = self._save_last_step()
            again = (
                "resumes from there" if self._saver.is_resumable else "begins anew, as another run,"
            )
            line = f"asked to stop ({error}): {saved}; the run {again} when it is started again"
            self._opened.close()
            print_on_console(run.config, line)
            self._record_end("stopped", line)  # and no view: a preempted process has little time
            return True
        elif isinstance(error, TooFewGroups | Unhealthy):
            saves = not isinstance(error, Unhealthy) or error.saves
            line = f"{error}; {self._save_last_step()}" if saves else str(error)
            self._opened.close()
            self._record_end("failed", line)
            # a rank that ended meanwhile would be taken for lost
            on_rank_0(lambda: write_run_report(run.config))
            raise UserError(line) from None
        elif isinstance(error, Exception):
            self._record_end("failed", str(error))
        return False

    def _save_last_step(self) -> str:
        """Save the last complete step, whose weights the models still hold. Return what is saved,
        in words."""
        step = self._saver.position.step
        self._saver.save_last_step(begin_step(step, self._status).timer)
        is_saved = step or self._saver.is_resumable
        return (
            f"the checkpoint of step {step} is complete"
            if is_saved
            else "no step is complete yet, so none is saved"
        )

    def _record_end(self, how: RunEnd, text: str) -> None:
        record_end(self._run.config, self._run.groups.rank, self._saver.position.step, how, text)


def export(run: Run, state: StepState, directory: Path, run_id: str | None = None) -> None:
    """Write the actor as a Hugging Face checkpoint. run_id: the run that the checkpoint names, None
    for none."""
    with run.offload_schedule.phase(state.timer, "export"):
        actor = run.actor
        export_hf(
            actor.rollout_params,
            engine_layouts(actor, actor.shape.base),
            actor.shape.base,
            directory,
            run.config.actor.megatron.dtype,
            run.config.model.path,
            origin=None if run_id is None else {"run_id": run_id, "step": state.step},
        )
        if actor.shape.lora is not None:
            export_adapters(
                actor.params,
                engine_layouts(actor),
                actor.shape,
                directory / ADAPTER,
                actor.dtype,
                run.config.model.path,
            )


def _check_no_samples(cfg: TrainerConfig, step: int) -> None:
    """Raise UserError if a run has written the samples of a validation of the step."""
    if (
        cfg.validation_data_dir is not None
        and (path := samples_path(Path(cfg.validation_data_dir), step)).exists()
    ):
        raise UserError(
            f"trainer.validation_data_dir: {path} is there already; give another directory, since "
            "trainer.val_only changes no file of a run"
        )


def write_run_report(cfg: Config) -> None:
    """Write report.html of the run so far, if it has a metrics.jsonl. One rank alone calls it, and
    the others wait."""
    if "jsonl" in cfg.trainer.logger and not cfg.trainer.val_only:
        root = Path(cfg.trainer.default_local_dir)
        best_effort(REPORT, lambda: write_report(read_runs([root]), root / REPORT))
