"""The start of a run from a training checkpoint, and the directory that it claims. Checkpoints are
written in save.py; their content is the subject of checkpoint/.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlhf_mc import run_files
from rlhf_mc.checkpoint import directory
from rlhf_mc.checkpoint.input_fingerprints import check_unchanged, paths
from rlhf_mc.checkpoint.training_blocks import TrainedModel
from rlhf_mc.checkpoint.training_state import load, reading_state, stored_config, stored_origin
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.fields import is_free_on_resume
from rlhf_mc.config.printing import recorded, without_secrets
from rlhf_mc.config.schema import TrainerConfig
from rlhf_mc.config.yaml_reader import yaml_text
from rlhf_mc.data.order import PromptOrder
from rlhf_mc.models.engine import engine_layouts
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.run_directory import ownership
from rlhf_mc.run_directory.lock import Lock
from rlhf_mc.runtime.console import print_line
from rlhf_mc.topology.consensus import gather_objects, on_every_rank, on_rank_0
from rlhf_mc.trainer.pool.generate import prompt_order
from rlhf_mc.trainer.pool.stored_pool import load_pool
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.step_state import Position


@dataclass
class StartPoint:
    """The state with which this process starts the steps of its run. By default: a new run."""

    checkpoint: Path | None = None
    """The checkpoint that is loaded; None: a new run begins with the models of its config."""
    position: Position = field(default_factory=Position)
    run_id: str = ""
    """Id of the run to which the directory belongs."""
    continues_run: bool = False
    """The checkpoint is the run's own. False: a new run begins."""
    skipped_updates: dict[str, int] = field(default_factory=dict)
    """Consecutive skipped updates by model."""

    @property
    def resumed_step(self) -> int | None:
        """The step of the checkpoint; None without one."""
        return None if self.checkpoint is None else self.position.step


def lock_directory(cfg: TrainerConfig) -> Lock:
    """Lock trainer.default_local_dir, and complete or remove what a killed process has left there.
    Raise UserError if another run has locked it. Every rank must call it."""
    root = Path(cfg.default_local_dir)
    lock = Lock(root)

    def take() -> None:
        lock.take()
        if cfg.val_only:
            return
        if (moved := ownership.finish_moving(root)) is not None:
            done = "an interrupted move of an earlier run's files is completed"
            _print(f"warning: {done}; they are in {moved}")
        directory.remove_leftovers(root)

    on_rank_0(take, f"trainer.default_local_dir: {root}")
    return lock


def saved_models(run: Run) -> list[TrainedModel]:
    """Return the models of a run that its checkpoints have."""
    return [TrainedModel(engine, engine_layouts(engine)) for engine in run.trained_models()]


class Resume:
    """Finds and loads the checkpoint from which a run starts. Every rank must call each method."""

    def __init__(self, run: Run, models: list[TrainedModel]) -> None:
        self._run = run
        self._cfg = run.config.trainer
        self._root = Path(self._cfg.default_local_dir)
        self._models = models
        self.is_rolled_back = False
        """This process has rolled the run back. It does not repeat the lines of its start."""

    def load(self, timer: PhaseTimer) -> StartPoint:
        """Load the checkpoint of trainer.resume_mode, if there is one, and claim the directory for
        the run. Raise UserError if the named checkpoint, or every checkpoint, is unusable."""
        with self._run.offload_schedule.phase(timer, "load_checkpoint"):
            start = self._find_and_load()
            position = start.position
            if start.continues_run:
                on_rank_0(lambda: self._check_and_clear(start), str(self._root))
                start.run_id = gather_objects(start.run_id)[0]
            else:
                position.last_healthy_step = None  # of another directory, like the best step
                start.run_id = gather_objects(ownership.new_id())[0]
                on_rank_0(lambda: self._claim(start), str(self._root))
            if not start.continues_run or position.best_metric != self._cfg.best_metric:
                position.best_step = position.best_accuracy = None  # not comparable
            position.best_metric = self._cfg.best_metric
            skipped = start.skipped_updates
            resume_from = self._run.skipped.resume_from
            on_every_rank(lambda: resume_from(position.step, skipped), str(self._root))
        return start

    def load_read_only(self, timer: PhaseTimer) -> int:
        """Load the weights that trainer.val_only validates: the checkpoint of trainer.resume_mode,
        or with `disable`, and in a directory without a run, the initial ones. Change no file.
        Return their step. Raise UserError if there is a run, but none of its checkpoints."""
        start = StartPoint()
        with self._run.offload_schedule.phase(timer, "load_checkpoint"):
            steps = on_rank_0(self._list, str(self._root))
            if self._cfg.resume_mode == "resume_path":
                start = self._load(Path(str(self._cfg.resume_from_path)))
            elif self._cfg.resume_mode == "auto":
                start = self._load_newest(steps)
                if start.checkpoint is None:
                    on_rank_0(self._check_no_run, str(self._root))
        return start.position.step

    def roll_back(self, last_healthy_step: int | None) -> int | None:
        """Let the next `load` resume from the checkpoint of the last healthy step: quarantine later
        ones. Return its step; None, with nothing changed, if there is none."""
        root = self._root
        saved = on_rank_0(lambda: directory.steps_with_checkpoint(root), str(root))
        healthy = [n for n in saved if last_healthy_step is not None and n <= last_healthy_step]
        step = max(healthy, default=None)
        if step is not None:
            on_rank_0(lambda: self._quarantine_after(step), str(root))
            # The steps are repeated with other learning rates; a resume repeats them as they were.
            on_rank_0(lambda: ownership.drop_observations(root, step + 1, math.inf), str(root))
            self.is_rolled_back = True
        return step

    # ------------------------------------------------------------ find

    def _find_and_load(self) -> StartPoint:
        steps = on_rank_0(self._list, str(self._root))
        if self._takes_newest(steps):
            return self._load_newest(steps)
        if self._cfg.resume_mode == "disable":
            return StartPoint()
        given = Path(str(self._cfg.resume_from_path))
        start = self._load(given)
        if given.resolve().parent == self._root.resolve() and not start.continues_run:
            step = start.position.step
            name = directory.final_path(self._root, step).name
            raise UserError(
                f"trainer.resume_from_path: {given} is a checkpoint of step {step}; rename it to "
                f"{name}, or move it to another directory"
            )
        return start

    def _list(self) -> list[int]:
        for line in () if self.is_rolled_back else directory.ignored(self._root):
            _print(f"warning: {line}")
        return directory.steps_with_checkpoint(self._root)

    def _takes_newest(self, steps: list[int]) -> bool:
        """Return whether the run resumes from the newest checkpoint in its directory. steps: those
        of its checkpoints."""
        if self.is_rolled_back or self._cfg.resume_mode == "auto":
            return True
        if self._cfg.resume_mode == "resume_path":
            return self._began_at(str(self._cfg.resume_from_path), steps)
        requeued = on_rank_0(lambda: ownership.is_of_requeued_job(self._root), str(self._root))
        if requeued:
            disable = "trainer.resume_mode=disable is for its first start"
            _print(f"this requeued job resumes its run; {disable}")
        return requeued

    def _began_at(self, given: str, steps: list[int]) -> bool:
        """Return whether the newest checkpoint with readable settings is of a run that began at the
        given one too. The same command, restarted by a job's requeue, then resumes from the newest
        checkpoint."""
        began_at = None
        for step in reversed(steps) if dist.get_rank() == 0 else ():
            with contextlib.suppress(Exception):  # not verified yet, so its content is arbitrary
                config = stored_config(directory.final_path(self._root, step))
                began_at = config["trainer"]["resume_from_path"]
                break
        return gather_objects(began_at == given)[0]

    # ------------------------------------------------------------ load

    def _load_newest(self, steps: list[int]) -> StartPoint:
        """Load the newest intact checkpoint in the directory, if it has one."""
        on_rank_0(lambda: directory.check_names(self._root), str(self._root))
        for step in reversed(steps):
            try:
                return self._load(directory.final_path(self._root, step))
            except directory.CorruptCheckpoint as error:
                _print(f"warning: {error}; using the checkpoint before it")
        if steps:
            raise UserError(
                f"{self._root}: none of the {len(steps)} training checkpoints is intact; to begin "
                "a new run, set another trainer.default_local_dir, or trainer.resume_mode=disable"
            )
        return StartPoint()

    def _load(self, path: Path) -> StartPoint:
        """Verify and load a checkpoint. Raise CorruptCheckpoint, or UserError if it is not of this
        run's models and inputs."""
        run = self._run
        directory.verify(path)
        allowed = self._cfg.resume_changed_inputs == "allow"
        inputs, run_id = on_every_rank(lambda: stored_origin(path))
        with reading_state(path):
            changed = check_unchanged(inputs, run.inputs, allowed, str(path))
        config = on_every_rank(lambda: stored_config(path))
        loop = load(path, self._models)
        with reading_state(path):
            run.kl_controller.load_state_dict(loop["kl_controller"])
            run.response_lengths.load_state_dict(loop["response_lengths"])
            order = prompt_order(run).with_sizes(config["data"])
            position = stored_position(loop, order)
            position.num_prompts = load_pool(run, loop["group_pool"], path, position, order)
            skipped = dict(loop["consecutive_skipped_updates"])
        _print(f"resumed after step {position.step} from {path}")
        if not self.is_rolled_back:
            self._print_changed_settings(config)
            for line in changed:
                _print(f"warning: {line}")
        is_own = path.resolve() == directory.final_path(self._root, position.step).resolve()
        return StartPoint(path, position, run_id, is_own, skipped_updates=skipped)

    def _print_changed_settings(self, stored: dict[str, Any]) -> None:
        pairs = run_files.differences(without_secrets(stored), recorded(self._run.config))
        changed = [key for key in pairs if not is_free_on_resume(key)]
        if changed:
            texts = [f"{key} {' -> '.join(map(yaml_text, pairs[key]))}" for key in changed]
            listed = ", ".join(texts)
            _print(f"settings that differ from the checkpoint's: {listed}")

    # ------------------------------------------------------------ the directory

    def _check_no_run(self) -> None:
        if ownership.has_run(self._root):
            raise UserError(
                f"trainer.val_only: the run in {self._root} has no training checkpoint; "
                "trainer.resume_mode=disable validates model.path, which may be an export (hf/)"
            )

    def _claim(self, start: StartPoint) -> None:
        """Claim the directory for a new run. Move the files of an earlier one away."""
        path = start.checkpoint
        given = [] if path is None else [("trainer.resume_from_path", path)]
        moved = ownership.move_away(self._root, [*paths(self._run.config), *given])
        if moved is not None:
            begins = f"another run begins in {self._root}"
            _print(f"{begins}: the files of the earlier one are in {moved}")
        ownership.claim(self._root, start.run_id, start.position.step, path)
        if path is not None and (left := path.parent / run_files.ADJUSTMENTS_FILE).exists():
            ours = "this run has the settings of its config"
            _print(f"warning: {ours}; those that the earlier run changed are in {left}")

    def _check_and_clear(self, start: StartPoint) -> None:
        """Refuse files of another run. Quarantine or remove files of later steps, which this run
        repeats."""
        step = start.position.step
        owner = ownership.owner(self._root)
        if owner not in (None, start.run_id):
            raise UserError(
                f"{self._root}: its {run_files.RUN_FILE} says run {owner}, its newest checkpoint "
                f"is of run {start.run_id}; a directory belongs to one run: move the checkpoint to "
                "another trainer.default_local_dir, or give it as trainer.resume_from_path with "
                "trainer.resume_mode=resume_path"
            )
        ownership.clear_success(self._root)
        if owner is None:
            ownership.claim(self._root, start.run_id, 0, None)
        self._quarantine_after(step)
        metrics = self._root / run_files.METRICS_FILE
        if later := [n for n in run_files.steps_logged(metrics) if n > step]:
            _print(
                f"{run_files.METRICS_FILE} goes to step {max(later)}; the {len(later)} rows after "
                f"step {step} are dropped: the run repeats these steps"
            )
            run_files.keep_up_to(metrics, step)  # also where trainer.logger has no jsonl
        for line in ownership.drop_later(self._root, step):
            _print(line)

    def _quarantine_after(self, last: int) -> None:
        for step in directory.steps_with_checkpoint(self._root):
            if step > last:
                name = directory.quarantine_step(self._root, step).name
                _print(f"global_step_{step} is quarantined as {name}")


def stored_position(loop: dict[str, Any], order: PromptOrder) -> Position:
    """Return the position that a checkpoint's loop state has. One of an earlier version counts
    batches, and prompts without the remainder of each epoch: they are replaced. order: with the
    checkpoint's sizes of a batch."""
    position = dict(loop["position"])
    if "num_batches" in position:
        position["num_prompts"] = order.position(position.pop("num_batches") * order.batch_size)
        loop["group_pool"]["num_drawn"] = order.position(loop["group_pool"]["num_drawn"])
    return Position(**position)


def _print(line: str) -> None:
    print_line(line, rank_0_only=True)
