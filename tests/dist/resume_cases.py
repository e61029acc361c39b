"""Functions that the ranks run in test_resume.py and test_bad_checkpoints.py: whole runs, and
resuming them."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from cases import built_run

from rlhf_mc.checkpoint import directory
from rlhf_mc.checkpoint.training_blocks import model_blocks
from rlhf_mc.config.errors import UserError
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.run_files import METRICS_FILE, SUCCESS_FILE
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer import loop
from rlhf_mc.trainer.resume import Resume, StartPoint, lock_directory, saved_models
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.save import CheckpointSaver
from rlhf_mc.trainer.step_state import StepState

Blocks = list[tuple[str, tuple[int, ...], Any, np.ndarray]]
"""Blocks of one rank: key, shape of the whole tensor, box in it, bytes of the elements."""


def blocks(run: Run) -> Blocks:
    """Return all blocks that this rank holds of a checkpoint, whichever rank writes them."""
    found = [block for model in saved_models(run) for block in model_blocks(model)]
    return [
        (
            block.key,
            block.global_shape,
            block.box,
            block.data.detach().contiguous().view(torch.uint8).numpy().copy(),
        )
        for block in found
    ]


def train(config_path: str, overrides: list[str], record_at: int) -> dict[str, Any]:
    """Run the whole loop. Return the steps that it ran, the state of the models at step `record_at`
    ("then", if the run passed or resumed at that step) and after the last step ("last"), and
    whether the run was marked as a success.
    """
    recorded: dict[str, Any] = {"steps": []}
    with built_run(config_path, overrides) as run, _recording(run, recorded, record_at):
        loop.fit(run)
        recorded["marked"] = (Path(run.config.trainer.default_local_dir) / SUCCESS_FILE).is_file()
        recorded["last"] = blocks(run)
    return recorded


@contextlib.contextmanager
def _recording(run: Run, recorded: dict[str, Any], record_at: int) -> Iterator[None]:
    step_done = CheckpointSaver.step_done
    load = Resume.load

    def recorded_step_done(self: CheckpointSaver, state: StepState, *args: Any) -> None:
        recorded["steps"].append(state.step)
        if state.step == record_at:
            recorded["then"] = blocks(run)
        step_done(self, state, *args)

    def recorded_load(self: Resume, timer: PhaseTimer) -> StartPoint:
        start = load(self, timer)
        recorded["marked_at_start"] = (self._root / SUCCESS_FILE).is_file()
        if start.position.step == record_at:
            recorded["then"] = blocks(run)
        return start

    with (
        mock.patch.object(CheckpointSaver, "step_done", recorded_step_done),
        mock.patch.object(Resume, "load", recorded_load),
    ):
        yield


def load(run: Run) -> int:
    """Lock the run's directory and resume. Return the step of the checkpoint."""
    lock = lock_directory(run.config.trainer)
    try:
        return Resume(run, saved_models(run)).load(PhaseTimer()).position.step
    finally:
        if dist.get_rank() == 0:
            lock.release()


def resume_attempts(config_path: str, root: str, attempts: list[list[str]]) -> list[str]:
    """Build a run once and make several attempts to resume, each with trainer settings "key=value"
    and environment variables "NAME=value". Return "step N" or the error message of each attempt.
    """
    out = []
    with built_run(config_path, [f"trainer.default_local_dir={root}"]) as run:
        trainer = run.config.trainer
        original = vars(trainer).copy()
        for attempt in attempts:
            settings = dict(item.split("=", 1) for item in attempt)
            variables = {key: value for key, value in settings.items() if key.isupper()}
            vars(trainer).update(
                {key: value for key, value in settings.items() if key not in variables}
            )
            with mock.patch.dict(os.environ, variables):
                try:
                    out.append(f"step {load(run)}")
                except UserError as error:
                    out.append(str(error))
            vars(trainer).update(original)
    return out


def resume_with_read_error_on_rank_1(config_path: str, roots: dict[str, str]) -> list[int]:
    """Resume in each directory while rank 1 cannot read one file of step 3, the key. Return the
    steps resumed from."""
    read = directory.read_file
    steps = []

    def failing_read(path: Path, at: Path) -> bytes:
        if path == at and dist.get_rank() == 1:
            raise directory.CorruptCheckpoint(f"{path}: cannot be read (Stale file handle)")
        return read(path)

    with built_run(config_path, []) as run:
        for name, root in roots.items():
            run.config.trainer.default_local_dir = root
            at = Path(root) / "global_step_3" / name
            with mock.patch.object(directory, "read_file", functools.partial(failing_read, at=at)):
                steps.append(load(run))
    return steps


def train_on_a_full_disk(config_path: str, root: str, is_async: bool) -> tuple[str, list[str]]:
    """Train a step and then another one, in which a synchronous save finds the disk full, or
    metrics.jsonl does while
    a checkpoint is written. Return the error, and the names of the files that are left in the
    directory."""
    overrides = [
        f"trainer.default_local_dir={root}",
        "trainer.save_freq=1",
        f"trainer.async_save={is_async}",
    ]
    metrics = Path(root) / METRICS_FILE
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with built_run(config_path, overrides) as run:
        steps = loop.steps(run, RankStatus(), StopRequests(run.config.trainer))
        try:
            next(steps)
            if is_async:
                _fill_disk_of(metrics)
            else:
                resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.stat().st_size, unlimited[1]))
            next(steps)
        except UserError as error:
            return str(error), sorted(path.name for path in Path(root).iterdir())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
            steps.close()
    raise AssertionError("the second step is logged")


def _fill_disk_of(path: Path) -> None:
    """Let this process, if it has the file open, find no space for it."""
    full = os.open("/dev/full", os.O_WRONLY)
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if link.readlink() == path:
                os.dup2(full, int(link.name))
    os.close(full)


def save_on_a_full_disk(config_path: str, root: str, limit: int) -> list[str]:
    """Save a checkpoint synchronously and one in the background while files may have at most
    `limit` bytes, which stands for a full disk, then one after which the old checkpoint cannot be
    deleted. Return the message of each.
    """
    out = []
    with built_run(config_path, [f"trainer.default_local_dir={root}"]) as run:
        saver = CheckpointSaver(run, saved_models(run), lock_directory(run.config.trainer))
        saver.step_done(StepState(1, PhaseTimer(), num_prompts=1), None)
        saver.save_last_step(PhaseTimer())
        for step, wait in ((2, True), (3, False)):
            saver.step_done(StepState(step, PhaseTimer(), num_prompts=step), None)
            unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
            try:
                if wait:
                    saver.save_last_step(PhaseTimer())
                else:
                    saver.begin(PhaseTimer())
                saver.finish()
                out.append("saved")
            except UserError as error:
                out.append(str(error))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        run.config.trainer.max_ckpt_to_keep = 1
        with mock.patch.object(
            directory, "remove", side_effect=PermissionError(13, "Permission denied", "old")
        ):
            saver.step_done(StepState(4, PhaseTimer(), num_prompts=4), None)
            with contextlib.redirect_stderr(io.StringIO()) as stderr:
                saver.save_last_step(PhaseTimer())
        out.append(stderr.getvalue())
    return out
