"""When training checkpoints are written, which are kept, and where a run goes on. What is in them is the subject of
checkpoint/.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlhf_mc.checkpoint import directory
from rlhf_mc.checkpoint.blocks import Role
from rlhf_mc.checkpoint.inputs import check_unchanged
from rlhf_mc.checkpoint.lock import Lock
from rlhf_mc.checkpoint.training import Save, load, stored_config, stored_inputs
from rlhf_mc.checkpoint.writer import HostBuffers
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import to_dict
from rlhf_mc.topology.agreement import disk_error, gather_objects, on_rank_0, raise_together
from rlhf_mc.trainer import success
from rlhf_mc.trainer.setup import Run, layouts_of

_OF_NO_EFFECT = {
    f"trainer.{key}"
    for key in (
        "default_local_dir",
        "resume_mode",
        "resume_from_path",
        "resume_changed_inputs",
        "save_freq",
        "export_freq",
        "max_ckpt_to_keep",
        "keep_best",
        "async_save",
        "logger",
        "log_val_generations",
        "dist_timeout_seconds",
        "heartbeat_timeout_seconds",
        "preemption_grace_seconds",
        "stop_before_minutes",
    )
}
"""Settings whose change does not change what is computed."""


@dataclass
class Position:
    """Where a run stands between two steps, beside its models."""

    step: int = 0
    """The last one that is complete."""
    accuracy: float | None = None
    """Mean validation accuracy after that step; None: it was not measured then."""
    best_step: int | None = None
    """The saved step of the highest accuracy, of equal ones the latest."""
    best_accuracy: float | None = None


class Checkpoints:
    """The training checkpoints of one run. Every rank must make each of its calls, unless it says otherwise."""

    def __init__(self, run: Run) -> None:
        """Takes hold of the directory. UserError where another run holds it."""
        self._run = run
        self._cfg = run.config.trainer
        self._root = Path(self._cfg.default_local_dir)
        self._roles = [Role(engine, layouts_of(engine)) for engine in (run.actor, run.critic)]
        self._buffers = HostBuffers() if self._cfg.async_save else None
        self._in_flight: Save | None = None
        self._saved: int | None = None
        self._lock = Lock(self._root)
        self.position = Position()
        self._loop_state: dict[str, Any] = {}
        on_rank_0(f"trainer.default_local_dir: {self._root}", self._take)

    def _take(self) -> None:
        self._lock.take()
        success.clear(self._root)
        directory.remove_leftovers(self._root)

    # ------------------------------------------------------------ resume

    def resume(self) -> Position:
        """Takes the run to where the checkpoint of trainer.resume_mode was written; without one, nothing changes.
        UserError where a checkpoint that was named, or all there are, cannot be used."""
        path = self._find()
        if path is None:
            self._skipped_go_on_after(0, {})  # an attempt that was killed before its first checkpoint left samples
        else:
            allowed = self._cfg.resume_changed_inputs == "allow"
            changed = check_unchanged(stored_inputs(path), self._run.inputs, allowed, str(path))
            loop = load(path, self._roles)
            self._run.kl_controller.load_state_dict(loop["kl_controller"])
            self.position = Position(**loop["position"])
            self._skipped_go_on_after(self.position.step, loop["skipped_in_a_row"])
            self._say(f"resumed after step {self.position.step} from {path}")
            self._say_what_changed(path)
            for line in changed:
                self._say(f"WARNING: {line}")
            if path.parent.resolve() == self._root.resolve():
                self._saved = self.position.step
                on_rank_0(str(self._root), self._set_later_ones_aside)
            else:
                self.position.best_step = self.position.best_accuracy = None  # that one lies elsewhere
        self._note()
        return self.position

    def _skipped_go_on_after(self, step: int, in_a_row: dict[str, int]) -> None:
        skipped = self._run.skipped
        raise_together(disk_error(str(self._root), lambda: skipped.go_on_after(step, in_a_row)))

    def _find(self) -> Path | None:
        """The checkpoint to go on from, its checksums found right."""
        steps: list[int] = gather_objects(directory.steps_with_checkpoint(self._root))[0]
        given = self._cfg.resume_from_path if self._cfg.resume_mode == "resume_path" else None
        if self._cfg.resume_mode == "auto" or (given is not None and self._began_at(given, steps)):
            return self._newest_whole(steps)
        is_own = given is not None and Path(given).resolve().parent == self._root.resolve()
        if steps and self._cfg.save_freq > 0 and not is_own:
            raise UserError(
                f"trainer.resume_mode is {self._cfg.resume_mode}, and {self._root} holds training checkpoints of an "
                "earlier run, which this one's would be mixed with; remove them, or give another "
                "trainer.default_local_dir"
            )
        if given is None:
            return None
        directory.verify(Path(given))
        return Path(given)

    def _began_at(self, given: str, steps: list[int]) -> bool:
        """Whether the newest checkpoint whose settings can be read is of a run that began at the given one too: the
        same command, started again by a job's requeue, goes on from there."""
        mine = None
        for step in reversed(steps) if dist.get_rank() == 0 else ():
            with contextlib.suppress(Exception):  # not verified yet, so it may be anything
                mine = stored_config(directory.final_path(self._root, step))["trainer"]["resume_from_path"]
                break
        return gather_objects(mine == given)[0]

    def _newest_whole(self, steps: list[int]) -> Path | None:
        for step in reversed(steps):
            path = directory.final_path(self._root, step)
            try:
                directory.verify(path)
                return path
            except directory.Damaged as error:
                self._say(f"WARNING: {error}; going back to the checkpoint before it")
        if steps:
            raise UserError(
                f"{self._root}: none of the {len(steps)} training checkpoints is whole; to begin anew, give another "
                "trainer.default_local_dir"
            )
        return None

    def _set_later_ones_aside(self) -> None:
        """Damaged ones, and those of a run that went on from here before, must not be taken for this one's."""
        for step in directory.steps_with_checkpoint(self._root):
            if step > self.position.step:
                self._say(f"global_step_{step} is set aside as {directory.set_aside(self._root, step).name}")

    def _say_what_changed(self, path: Path) -> None:
        before, now = (_flat(tree) for tree in (stored_config(path), to_dict(self._run.config)))
        changed = [key for key in now if before.get(key) != now[key] and key not in _OF_NO_EFFECT]
        if changed:
            listed = ", ".join(f"{key} {before.get(key)} -> {now[key]}" for key in changed)
            self._say(f"settings that differ from the checkpoint's: {listed}")

    # ------------------------------------------------------------ save

    def step_done(self, step: int, accuracy: float | None) -> None:
        """Takes note that a step is complete; accuracy: of a validation after it. A rank may call it by itself."""
        self.position.step, self.position.accuracy = step, accuracy
        self._note()

    def _note(self) -> None:
        """The small state as it is now: what a later phase changes of it is not of the step that is complete."""
        self._loop_state = {
            "kl_controller": self._run.kl_controller.state_dict(),
            "skipped_in_a_row": dict(self._run.skipped.in_a_row),
        }

    def is_due(self, is_last: bool) -> bool:
        """Whether trainer.save_freq asks for a checkpoint of the complete step. A rank may call it by itself."""
        freq = self._cfg.save_freq
        return freq > 0 and self._saved != self.position.step and (self.position.step % freq == 0 or is_last)

    def begin(self, wait: bool = False) -> None:
        """Begins the checkpoint of the complete step, before any weight has changed since. With trainer.async_save it
        is written while training goes on, unless `wait`. It counts once `advance` or `close` has committed it."""
        self._commit()
        position = self.position
        best = -math.inf if position.best_accuracy is None else position.best_accuracy
        if position.accuracy is not None and position.accuracy >= best:
            position.best_step, position.best_accuracy = position.step, position.accuracy
        loop = {**self._loop_state, "position": asdict(position)}
        buffers = None if wait else self._buffers
        with self._saying_what_is_kept():
            on_rank_0("trainer.default_local_dir", self._lock.check_still_ours)
            self._in_flight = Save(
                self._root, position.step, self._roles, loop, to_dict(self._run.config), self._run.inputs, buffers
            )

    def advance(self, wait: bool = False) -> None:
        """Commits the checkpoint under way if all ranks have written their part of it, or once they have."""
        if self._in_flight is not None and (wait or self._in_flight.is_written()):
            self._commit()

    def save_now(self) -> None:
        """The checkpoint of the complete step is on the disk and counts when this returns. No weight may have changed
        since that step: a run gives way between two steps, or before the updates of one."""
        under_way = self._in_flight.step if self._in_flight is not None else None
        if self.position.step > 0 and self.position.step not in (self._saved, under_way):
            self.begin(wait=True)
        self._commit()

    def close(self) -> None:
        """Commits what is under way."""
        self._commit()

    def let_go(self) -> None:
        """Gives the directory free, however the run ended. A rank calls it by itself."""
        if dist.get_rank() == 0:
            self._lock.release()

    def _commit(self) -> None:
        if self._in_flight is None:
            return
        save, self._in_flight = self._in_flight, None
        with self._saying_what_is_kept():
            on_rank_0("trainer.default_local_dir", self._lock.check_still_ours)
            save.commit()
        self._saved = save.step
        if dist.get_rank() == 0 and (error := disk_error(str(self._root), self._remove_old)) is not None:
            self._say(f"WARNING: an old checkpoint cannot be deleted: {error}")

    def _remove_old(self) -> None:
        steps = directory.steps_with_checkpoint(self._root)
        best = self.position.best_step if self._cfg.keep_best else None
        for step in directory.to_remove(steps, self._cfg.max_ckpt_to_keep, best):
            directory.remove(self._root, step)

    @contextlib.contextmanager
    def _saying_what_is_kept(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            kept = (
                "no checkpoint was complete before"
                if self._saved is None
                else (
                    f"the checkpoint of step {self._saved} is complete and untouched: "
                    f"{directory.final_path(self._root, self._saved)}"
                )
            )
            raise UserError(f"{error}; {kept}") from error

    def _say(self, line: str) -> None:
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError, ValueError):  # standard error may be full or closed
                print(f"rlhf_mc: {line}", file=sys.stderr, flush=True)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{section.key: value}"""
    out: dict[str, Any] = {}
    for name, value in tree.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return out
