"""The training checkpoints that a run writes: when they begin, are complete and are deleted. They
are loaded in resume.py; their content is the subject of checkpoint/.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlhf_mc.checkpoint import directory
from rlhf_mc.checkpoint.training_blocks import TrainedModel
from rlhf_mc.checkpoint.training_state import Save
from rlhf_mc.checkpoint.training_tensors import HostBuffers
from rlhf_mc.config.errors import UserError, disk_errors
from rlhf_mc.config.health_schema import rolls_back
from rlhf_mc.config.printing import recorded
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.run_directory import ownership
from rlhf_mc.run_directory.lock import Lock
from rlhf_mc.runtime.console import print_line
from rlhf_mc.topology.consensus import gather_objects, on_rank_0
from rlhf_mc.trainer.resume import StartPoint
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.step_state import Position, StepState


@dataclass(frozen=True)
class CompleteStep:
    """A copy of the loop's state at the end of a step: phases of the next step change the state
    before a requested stop saves it."""

    loop: dict[str, Any] = field(default_factory=dict)
    pool_files: dict[str, Callable[[Path], None]] = field(default_factory=dict)
    """This rank's files of the group pool by name, and the function that writes each."""
    best_metric: float | None = None
    """trainer.best_metric after the step; None without a validation."""
    is_healthy: bool = True


class CheckpointSaver:
    """Writes the training checkpoints of one run. Every rank must call each method, unless its
    docstring says otherwise."""

    def __init__(self, run: Run, models: list[TrainedModel], lock: Lock) -> None:
        self._run = run
        self._cfg = run.config.trainer
        self._root = Path(self._cfg.default_local_dir)
        self._models = models
        self._lock = lock
        self._buffers = HostBuffers() if self._cfg.async_save else None
        self._begun_at = time.monotonic()
        """Start time of the last checkpoint, or of the run before the first one."""
        self._in_flight: Save | None = None
        self._saved: int | None = None
        """Step of the last complete checkpoint."""
        self._complete = CompleteStep()
        self.start = StartPoint()
        self.position = Position()

    def start_from(self, start: StartPoint) -> None:
        """Continue with the checkpoints of a run that starts there."""
        self.start = start
        self.position = replace(start.position)
        if start.continues_run:
            self._saved = start.position.step
        self._complete = self._complete_step(None, True)

    def step_done(self, state: StepState, accuracy: float | None, is_healthy: bool = True) -> None:
        """Record that a step is complete. accuracy: of a validation after it, if any. is_healthy:
        as StepHealth has it. A rank may call it by itself."""
        position = self.position
        if is_healthy:
            saved = self._saved if self._in_flight is None else self._in_flight.step
            schedule = self._run.schedule
            position.last_healthy_step = schedule.milestone_before(state.step, saved)
        position.step = state.step
        position.num_prompts = state.num_prompts
        position.accuracy = accuracy
        name = self._cfg.best_metric
        best_metric = accuracy if name is None else state.metrics.get(name)
        self._complete = self._complete_step(best_metric, is_healthy)

    def _complete_step(self, best_metric: float | None, is_healthy: bool) -> CompleteStep:
        run = self._run
        loop = {
            "kl_controller": run.kl_controller.state_dict(),
            "response_lengths": run.response_lengths.state_dict(),
            "group_pool": run.group_pool.state_dict(),
            "consecutive_skipped_updates": dict(run.skipped.consecutive),
        }
        pool_files = run.group_pool.files(dist.get_rank(), run.actor.replay)
        return CompleteStep(loop, pool_files, best_metric, is_healthy)

    @property
    def is_resumable(self) -> bool:
        """The same command would continue this run: a checkpoint is complete."""
        return self._saved is not None

    def is_due(self) -> bool:
        """Return whether trainer.save_minutes asks for a checkpoint, by rank 0's clock."""
        minutes = self._cfg.save_minutes
        seconds = time.monotonic() - self._begun_at
        return minutes is not None and gather_objects(seconds >= 60 * minutes)[0]

    # ------------------------------------------------------------ begin

    def begin(self, timer: PhaseTimer) -> None:
        """Begin the checkpoint of the complete step. No weight may have changed since that step.
        With trainer.async_save it is written during the next steps. `finish` or
        `finish_if_written` completes it."""
        with self._run.offload_schedule.phase(timer, "save_checkpoint"):
            self._begin(self._buffers)

    def save_last_step(self, timer: PhaseTimer) -> None:
        """Begin and finish the checkpoint of the complete step, if that is not done yet. No weight
        may have changed since that step: a run is preempted between two steps, or before the
        updates of one."""
        with self._run.offload_schedule.phase(timer, "save_checkpoint"):
            in_flight = self._in_flight.step if self._in_flight is not None else None
            if self.position.step > 0 and self.position.step not in (self._saved, in_flight):
                self._begin(None)
            self.finish()

    def _begin(self, buffers: HostBuffers | None) -> None:
        self.finish()
        self._begun_at = time.monotonic()
        position = self.position
        best = -math.inf if position.best_accuracy is None else position.best_accuracy
        candidate = self._complete.best_metric
        if candidate is not None and candidate >= best:
            position.best_step = position.step
            position.best_accuracy = candidate
        if position.step == 0:
            position.last_healthy_step = 0  # the initial weights
        loop = {**self._complete.loop, "position": asdict(position)}
        with self.naming_last_checkpoint():
            on_rank_0(self._lock.check_still_ours, "trainer.default_local_dir")
            self._in_flight = Save(
                self._root,
                position.step,
                self._models,
                loop,
                recorded(self._run.config),
                self._run.inputs,
                self.start.run_id,
                buffers,
                self._complete.pool_files,
            )

    # ------------------------------------------------------------ finish

    def finish_if_written(self) -> None:
        """Finish the checkpoint in progress if all ranks have written it."""
        if self._in_flight is not None and self._in_flight.is_written():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint in progress, if any, commit it and delete old ones."""
        if self._in_flight is None:
            return
        save = self._in_flight
        self._in_flight = None
        with self.naming_last_checkpoint():
            on_rank_0(self._lock.check_still_ours, "trainer.default_local_dir")
            save.commit()
        self._saved = save.step
        if dist.get_rank() == 0:
            try:
                with disk_errors(str(self._root)):
                    self._prune()
            except UserError as error:
                line = f"warning: an old checkpoint cannot be deleted: {error}"
                print_line(line, rank_0_only=True)

    def _prune(self) -> None:
        """Delete the checkpoints beyond trainer.max_ckpt_to_keep. Rank 0 alone calls it."""
        limit = self._cfg.max_ckpt_to_keep
        retained = {self.position.best_step} if self._cfg.keep_best else set()
        if rolls_back(self._run.config.health) or not self._complete.is_healthy:
            # A rule may roll the run back to it or, once the run is unhealthy, its user may.
            retained.add(self.position.last_healthy_step)
        for kind in self._run.schedule.kinds(directory.steps_with_checkpoint(self._root)):
            for step in directory.to_remove(kind, limit, retained):
                directory.remove(self._root, step)
        if limit is not None:
            oldest = directory.steps_with_checkpoint(self._root)[0]
            ownership.drop_observations(self._root, 0, oldest)

    @contextlib.contextmanager
    def naming_last_checkpoint(self) -> Iterator[None]:
        """Add the last complete checkpoint to the message of a UserError that is raised inside, on
        every rank, and discard the checkpoint in progress: the disk may be full."""
        try:
            yield
        except UserError as error:
            if self._in_flight is not None:
                self._in_flight.discard()
            last = "no checkpoint was complete before"
            if self._saved is not None:
                path = directory.final_path(self._root, self._saved)
                last = f"the checkpoint of step {self._saved} is complete and untouched: {path}"
            raise UserError(f"{error}; {last}") from error
