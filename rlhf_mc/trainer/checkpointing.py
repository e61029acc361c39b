"""The training checkpoints of a run: resume, save, retention. Their content is the subject of checkpoint/."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlhf_mc.checkpoint import directory
from rlhf_mc.checkpoint.input_fingerprints import check_unchanged, paths
from rlhf_mc.checkpoint.training_blocks import TrainedModel
from rlhf_mc.checkpoint.training_state import Save, load, reading_state, stored_config, stored_origin
from rlhf_mc.checkpoint.training_tensors import HostBuffers
from rlhf_mc.config.errors import UserError, disk_errors
from rlhf_mc.config.health_schema import rolls_back
from rlhf_mc.config.recorded import WITHOUT_EFFECT, recorded, without_secrets
from rlhf_mc.config.yaml_reader import yaml_text
from rlhf_mc.data.order import PromptOrder
from rlhf_mc.models.engine import engine_layouts
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.observability.sinks import check_metrics
from rlhf_mc.run_directory import ownership
from rlhf_mc.run_directory.lock import Lock
from rlhf_mc.run_files import ADJUSTMENTS_FILE, METRICS_FILE, RUN_FILE, differences, keep_up_to, steps_logged
from rlhf_mc.runtime.console import print_line
from rlhf_mc.topology.consensus import gather_objects, on_every_rank, on_rank_0
from rlhf_mc.trainer.generate import prompt_order
from rlhf_mc.trainer.pool.stored_pool import load_pool
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.step_state import Position

_SKIPPED = "consecutive_skipped_updates"


class Checkpoints:
    """The training checkpoints of one run. Every rank must call each method, unless its docstring says otherwise."""

    def __init__(self, run: Run) -> None:
        """Lock trainer.default_local_dir. Raise UserError if another run has locked it."""
        self._run = run
        self._cfg = run.config.trainer
        self._root = Path(self._cfg.default_local_dir)
        self._models = [TrainedModel(engine, engine_layouts(engine)) for engine in run.trained_models()]
        self._buffers = HostBuffers() if self._cfg.async_save else None
        self._in_flight: Save | None = None
        self._saved: int | None = None
        self._begun_at = time.monotonic()
        """Time at which the last checkpoint was begun, or the run."""
        self._lock = Lock(self._root)
        self.position = Position()
        self._candidate: float | None = None
        """trainer.best_metric after the last complete step; None without a validation."""
        self.resumed_step: int | None = None
        """The step of the checkpoint that the run continues from; None without one."""
        self.run_id = ""
        """Id of the run that the directory belongs to; `resume` reads or makes it."""
        self._logged: list[list[int]] = []
        """First and last step of each consecutive range of rows in metrics.jsonl at the start of this process."""
        self._logs_from: int | None = None
        """The first step that this process logs there; None if trainer.logger has no jsonl."""
        self._skipped: dict[str, int] = {}
        """Consecutive skipped updates by model, from the checkpoint."""
        self._loop_state: dict[str, Any] = {}
        self._pool_files: dict[str, Callable[[Path], None]] = {}
        self.is_rolled_back = False
        """This process has rolled the run back. It does not repeat the lines of its start."""
        self._is_healthy = True
        """The last complete step was healthy."""
        on_rank_0(self._acquire, f"trainer.default_local_dir: {self._root}")

    def _acquire(self) -> None:
        self._lock.take()
        if self._cfg.val_only:
            return
        if (moved := ownership.finish_moving(self._root)) is not None:
            _print(f"warning: an interrupted move of an earlier run's files is completed; they are in {moved}")
        directory.remove_leftovers(self._root)

    # ------------------------------------------------------------ resume

    def load(self, timer: PhaseTimer) -> Position:
        """Resume from the checkpoint of trainer.resume_mode, if there is one. Return the position of the run."""
        with self._run.offload_schedule.phase(timer, "load_checkpoint"):
            return self.resume()

    def load_read_only(self, timer: PhaseTimer) -> int:
        """Load the weights that trainer.val_only validates: the checkpoint of trainer.resume_mode, or with `disable`,
        and in a directory without a run, the initial ones. Change no file. Return their step. Raise UserError if
        there is a run, but none of its checkpoints."""
        with self._run.offload_schedule.phase(timer, "load_checkpoint"):
            steps = on_rank_0(self._list, str(self._root))
            if self._cfg.resume_mode == "resume_path":
                self._load(Path(str(self._cfg.resume_from_path)))
            elif self._cfg.resume_mode == "auto" and self._load_newest(steps) is None:
                on_rank_0(self._check_no_run, str(self._root))
        return self.position.step

    def _check_no_run(self) -> None:
        if ownership.has_run(self._root):
            raise UserError(
                f"trainer.val_only: the run in {self._root} has no training checkpoint; trainer.resume_mode=disable "
                "validates model.path, which may be an export (hf/)"
            )

    def save(self, timer: PhaseTimer, wait: bool = False) -> None:
        """Save the last complete step. With trainer.async_save and without `wait` the files are written in the
        background."""
        with self._run.offload_schedule.phase(timer, "save_checkpoint"):
            if wait:
                self.save_now()
            else:
                self.begin()

    def resume(self) -> Position:
        """Load the checkpoint of trainer.resume_mode, if there is one, and claim the directory for the run. Raise
        UserError if the named checkpoint, or every checkpoint, is unusable."""
        path = self._find_and_load()
        self.resumed_step = None if path is None else self.position.step
        if path is None:
            self._begin_run(None)
        elif self._is_own(path):
            self._continue_run(path)
        else:
            # They are in another directory.
            self.position.best_step = self.position.best_accuracy = self.position.last_healthy_step = None
            self._begin_run(path)
        if self.position.best_metric != self._cfg.best_metric:  # its values are not comparable
            self.position.best_step = self.position.best_accuracy = None
            self.position.best_metric = self._cfg.best_metric
        if "jsonl" in self._cfg.logger:
            validates_first = self.resumed_step is None and self._run.schedule.is_first_validation_due()
            self._logs_from = 0 if validates_first else self.position.step + 1
        skipped = self._run.skipped
        on_every_rank(lambda: skipped.resume_from(self.position.step, self._skipped), str(self._root))
        self._record_loop_state()
        return self.position

    def _begin_run(self, start: Path | None) -> None:
        """Begin a new run in the directory. start: the checkpoint of another directory that it begins with, if any."""
        self.run_id = gather_objects(ownership.new_id())[0]
        self._logged = []
        on_rank_0(lambda: self._claim(start), str(self._root))

    def _claim(self, start: Path | None) -> None:
        inputs = [*paths(self._run.config), *([] if start is None else [("trainer.resume_from_path", start)])]
        moved = ownership.move_away(self._root, inputs)
        if moved is not None:
            _print(f"another run begins in {self._root}: the files of the earlier one are in {moved}")
        ownership.claim(self._root, self.run_id, self.position.step, start)
        if start is not None and (left := start.parent / ADJUSTMENTS_FILE).exists():
            _print(
                f"warning: this run has the settings of its config; those that the earlier run changed are in {left}"
            )

    def _continue_run(self, path: Path) -> None:
        """Resume the run that the directory belongs to."""
        self._saved = self.position.step
        on_rank_0(self._check_and_clear, str(self._root))
        self.run_id = gather_objects(self.run_id)[0]

    def _check_and_clear(self) -> None:
        """Refuse files of another run. Quarantine or remove files of later steps, which this run repeats."""
        owner = ownership.owner(self._root)
        if owner not in (None, self.run_id):
            raise UserError(
                f"{self._root}: its {RUN_FILE} says run {owner}, its newest checkpoint is of run "
                f"{self.run_id}; a directory belongs to one run: move the checkpoint to another "
                "trainer.default_local_dir, or give it as trainer.resume_from_path with trainer.resume_mode=resume_path"
            )
        if self._logged and "jsonl" in self._cfg.logger:
            check_metrics(self._root / METRICS_FILE, self.run_id, self._logged)
        ownership.clear_success(self._root)
        if owner is None:
            ownership.claim(self._root, self.run_id, 0, None)
        self._quarantine_after(self.position.step)
        if later := [n for n in steps_logged(self._root / METRICS_FILE) if n > self.position.step]:
            _print(
                f"{METRICS_FILE} goes to step {max(later)}; the {len(later)} rows after step {self.position.step} are "
                "dropped: the run repeats these steps"
            )
            keep_up_to(self._root / METRICS_FILE, self.position.step)  # also where trainer.logger has no jsonl
        for line in ownership.drop_later(self._root, self.position.step):
            _print(line)

    def _quarantine_after(self, last: int) -> None:
        for step in directory.steps_with_checkpoint(self._root):
            if step > last:
                _print(f"global_step_{step} is quarantined as {directory.quarantine_step(self._root, step).name}")

    def roll_back(self) -> int | None:
        """Let the next `resume` continue from the checkpoint of the last healthy step: quarantine later ones.
        Return its step; None, with nothing changed, if there is none. Every rank must call it."""
        self.commit()
        healthy = self.position.last_healthy_step
        saved = on_rank_0(lambda: directory.steps_with_checkpoint(self._root), str(self._root))
        step = max((n for n in saved if healthy is not None and n <= healthy), default=None)
        if step is not None:
            on_rank_0(lambda: self._quarantine_after(step), str(self._root))
            # The steps are repeated with other learning rates. (A resume repeats them as they were.)
            on_rank_0(lambda: ownership.drop_observations(self._root, step + 1, math.inf), str(self._root))
            self.is_rolled_back = True
        return step

    def _is_own(self, path: Path) -> bool:
        return path.resolve() == directory.final_path(self._root, self.position.step).resolve()

    def _find_and_load(self) -> Path | None:
        """Verify and load the checkpoint that the run resumes from. Return its path, or None for a new run."""
        steps = on_rank_0(self._list, str(self._root))
        mode = self._cfg.resume_mode
        given = self._cfg.resume_from_path if mode == "resume_path" else None
        if self.is_rolled_back or mode == "auto" or (given is not None and self._began_at(given, steps)):
            return self._load_newest(steps)
        if mode == "disable" and on_rank_0(lambda: ownership.is_of_requeued_job(self._root), str(self._root)):
            _print("this requeued job resumes its run; trainer.resume_mode=disable is for its first start")
            return self._load_newest(steps)
        if given is None:
            return None
        self._load(Path(given))
        if Path(given).resolve().parent == self._root.resolve() and not self._is_own(Path(given)):
            raise UserError(
                f"trainer.resume_from_path: {given} is a checkpoint of step {self.position.step}; rename it to "
                f"{directory.final_path(self._root, self.position.step).name}, or move it to another directory"
            )
        return Path(given)

    def _list(self) -> list[int]:
        for line in () if self.is_rolled_back else directory.ignored(self._root):
            _print(f"warning: {line}")
        return directory.steps_with_checkpoint(self._root)

    def _began_at(self, given: str, steps: list[int]) -> bool:
        """Return whether the newest checkpoint with readable settings is of a run that began at the given one too. The
        same command, restarted by a job's requeue, then resumes from the newest checkpoint."""
        began_at = None
        for step in reversed(steps) if dist.get_rank() == 0 else ():
            with contextlib.suppress(Exception):  # not verified yet, so its content is arbitrary
                began_at = stored_config(directory.final_path(self._root, step))["trainer"]["resume_from_path"]
                break
        return gather_objects(began_at == given)[0]

    def _load_newest(self, steps: list[int]) -> Path | None:
        on_rank_0(lambda: directory.check_names(self._root), str(self._root))
        for step in reversed(steps):
            path = directory.final_path(self._root, step)
            try:
                self._load(path)
                return path
            except directory.CorruptCheckpoint as error:
                _print(f"warning: {error}; using the checkpoint before it")
        if steps:
            raise UserError(
                f"{self._root}: none of the {len(steps)} training checkpoints is intact; to begin a new run, set "
                "another trainer.default_local_dir, or trainer.resume_mode=disable"
            )
        return None

    def _load(self, path: Path) -> None:
        directory.verify(path)
        allowed = self._cfg.resume_changed_inputs == "allow"
        inputs, run_id = on_every_rank(lambda: stored_origin(path))
        with reading_state(path):
            changed = check_unchanged(inputs, self._run.inputs, allowed, str(path))
        config = on_every_rank(lambda: stored_config(path))
        loop = load(path, self._models)
        with reading_state(path):
            self._run.kl_controller.load_state_dict(loop["kl_controller"])
            self._run.response_lengths.load_state_dict(loop["response_lengths"])
            order = prompt_order(self._run).with_sizes(config["data"])
            self.position = stored_position(loop, order)
            self.position.num_prompts = load_pool(self._run, loop["group_pool"], path, self.position, order)
            self._logged = loop["logged"]
            self._skipped = dict(loop[_SKIPPED])
            self.run_id = run_id
        _print(f"resumed after step {self.position.step} from {path}")
        if self.is_rolled_back:
            return
        self._print_changed_settings(config)
        for line in changed:
            _print(f"warning: {line}")

    def _print_changed_settings(self, stored: dict[str, Any]) -> None:
        pairs = differences(without_secrets(stored), recorded(self._run.config))
        changed = [key for key in pairs if key not in WITHOUT_EFFECT and not key.startswith("health.")]
        if changed:
            listed = ", ".join(f"{key} {' -> '.join(map(yaml_text, pairs[key]))}" for key in changed)
            _print(f"settings that differ from the checkpoint's: {listed}")

    # ------------------------------------------------------------ save

    def step_done(
        self, step: int, num_prompts: int, accuracy: float | None, metrics: Mapping[str, float], is_healthy: bool = True
    ) -> None:
        """Record that a step is complete. num_prompts: position in the order of prompts so far. accuracy: of a
        validation after it, if any. metrics: the step's. is_healthy: none of them shows weights that a run should not
        be rolled back to. A rank may call it by itself."""
        self._is_healthy = is_healthy
        if is_healthy:
            saved = self._saved if self._in_flight is None else self._in_flight.step
            self.position.last_healthy_step = self._run.schedule.milestone_before(step, saved)
        self.position.step = step
        self.position.num_prompts = num_prompts
        self.position.accuracy = accuracy
        name = self._cfg.best_metric
        self._candidate = accuracy if name is None else metrics.get(name)
        self._record_loop_state()

    def is_save_due(self) -> bool:
        """Return whether trainer.save_minutes asks for a checkpoint, by rank 0's clock. Every rank must call it."""
        minutes = self._cfg.save_minutes
        return minutes is not None and gather_objects(time.monotonic() - self._begun_at >= 60 * minutes)[0]

    def _record_loop_state(self) -> None:
        """Copy the loop's state at the end of a step. Phases of the next step change it before `save_now` saves it."""
        self._loop_state = {
            "kl_controller": self._run.kl_controller.state_dict(),
            "response_lengths": self._run.response_lengths.state_dict(),
            "group_pool": self._run.group_pool.state_dict(),
            _SKIPPED: dict(self._run.skipped.consecutive),
        }
        self._pool_files = self._run.group_pool.files(dist.get_rank(), self._run.actor.replay)

    def begin(self, wait: bool = False) -> None:
        """Begin the checkpoint of the complete step. No weight may have changed since that step. With
        trainer.async_save and without `wait` it is written during the next steps. `commit` or `commit_if_written`
        completes it."""
        self.commit()
        self._begun_at = time.monotonic()
        position = self.position
        best = -math.inf if position.best_accuracy is None else position.best_accuracy
        if self._candidate is not None and self._candidate >= best:
            position.best_step = position.step
            position.best_accuracy = self._candidate
        if position.step == 0:
            position.last_healthy_step = 0  # the initial weights
        loop = {**self._loop_state, "position": asdict(position), "logged": self._all_logged()}
        buffers = None if wait else self._buffers
        with self.naming_last_checkpoint():
            on_rank_0(self._lock.check_still_ours, "trainer.default_local_dir")
            config = recorded(self._run.config)
            inputs = self._run.inputs
            self._in_flight = Save(
                self._root, position.step, self._models, loop, config, inputs, self.run_id, buffers, self._pool_files
            )

    def _all_logged(self) -> list[list[int]]:
        """Return the ranges of rows in metrics.jsonl up to the complete step, whose row is written before the
        checkpoint is committed."""
        first = self._logs_from
        last = self.position.step
        if first is None or first > last:
            return self._logged
        if self._logged and self._logged[-1][1] + 1 == first:
            return [*self._logged[:-1], [self._logged[-1][0], last]]
        return [*self._logged, [first, last]]

    def commit_if_written(self) -> None:
        """Commit the checkpoint in progress if all ranks have written it. Every rank must call it."""
        if self._in_flight is not None and self._in_flight.is_written():
            self.commit()

    @property
    def is_resumable(self) -> bool:
        """The same command would continue this run: a checkpoint is complete."""
        return self._saved is not None

    def save_now(self) -> None:
        """Save and commit the checkpoint of the complete step, if that is not done yet. No weight may have changed
        since that step: a run is preempted between two steps, or before the updates of one."""
        in_flight = self._in_flight.step if self._in_flight is not None else None
        if self.position.step > 0 and self.position.step not in (self._saved, in_flight):
            self.begin(wait=True)
        self.commit()

    def release(self) -> None:
        """Unlock the directory. A rank may call it by itself."""
        if dist.get_rank() == 0:
            self._lock.release()

    def commit(self) -> None:
        """Wait for the checkpoint in progress, if any, and commit it. Every rank must call it."""
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
                    self._remove_old()
            except UserError as error:
                _print(f"warning: an old checkpoint cannot be deleted: {error}")

    def _remove_old(self) -> None:
        steps = directory.steps_with_checkpoint(self._root)
        best = {self.position.best_step} if self._cfg.keep_best else set()
        for kind in self._run.schedule.kinds(steps):
            for step in directory.to_remove(kind, self._cfg.max_ckpt_to_keep, best | self._rolled_back_to()):
                directory.remove(self._root, step)
        if self._cfg.max_ckpt_to_keep is not None:
            ownership.drop_observations(self._root, 0, directory.steps_with_checkpoint(self._root)[0])

    def _rolled_back_to(self) -> set[int | None]:
        """Return the step that the run may be rolled back to, by a rule or, once it is unhealthy, by its user."""
        needed = rolls_back(self._run.config.health) or not self._is_healthy
        return {self.position.last_healthy_step} if needed else set()

    @contextlib.contextmanager
    def naming_last_checkpoint(self) -> Iterator[None]:
        """Add the last complete checkpoint to the message of a UserError that is raised inside, on every rank, and
        discard the checkpoint in progress: the disk may be full."""
        try:
            yield
        except UserError as error:
            if self._in_flight is not None:
                self._in_flight.discard()
            kept = "no checkpoint was complete before"
            if self._saved is not None:
                path = directory.final_path(self._root, self._saved)
                kept = f"the checkpoint of step {self._saved} is complete and untouched: {path}"
            raise UserError(f"{error}; {kept}") from error


def stored_position(loop: dict[str, Any], order: PromptOrder) -> Position:
    """Return the position that a checkpoint's loop state has. One of an earlier version counts batches, and prompts
    without the remainder of each epoch: they are replaced. order: with the checkpoint's sizes of a batch."""
    position = dict(loop["position"])
    if "num_batches" in position:
        position["num_prompts"] = order.position(position.pop("num_batches") * order.batch_size)
        loop["group_pool"]["num_drawn"] = order.position(loop["group_pool"]["num_drawn"])
    return Position(**position)


def _print(line: str) -> None:
    print_line(line, rank_0_only=True)
