"""What the ranks run in test_resume.py and test_bad_checkpoints.py: the loop itself, and what it goes on from."""

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
from cases import a_run

from rlhf_mc.checkpoint import directory
from rlhf_mc.checkpoint.training_blocks import TrainedModel, blocks_of
from rlhf_mc.config.errors import UserError
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.trainer import checkpointing, loop, success
from rlhf_mc.trainer.checkpointing import Checkpoints, Position
from rlhf_mc.trainer.setup import Run, layouts_of

Blocks = list[tuple[str, tuple[int, ...], Any, np.ndarray]]
"""Of one rank: key, shape of the whole tensor, place in it, bytes of the elements."""


def blocks(run: Run) -> Blocks:
    """All that a checkpoint would hold of this rank, whoever writes it."""
    found = [
        block for engine in (run.actor, run.critic) for block in blocks_of(TrainedModel(engine, layouts_of(engine)))
    ]
    return [
        (block.key, block.global_shape, block.box, block.data.detach().contiguous().view(torch.uint8).numpy().copy())
        for block in found
    ]


def train(config_path: str, overrides: list[str], look_at: int) -> dict[str, Any]:
    """The whole loop. Returns its first step, and the state of the models after step `look_at`, where the run came
    through it or began there, and after the last."""
    seen: dict[str, Any] = {"steps": []}
    with a_run(config_path, overrides) as run, _watching(run, seen, look_at):
        loop.fit(run)
        seen["marked"] = (Path(run.config.trainer.default_local_dir) / success.NAME).is_file()
        seen["last"] = blocks(run)
    return seen


@contextlib.contextmanager
def _watching(run: Run, seen: dict[str, Any], look_at: int) -> Iterator[None]:
    step_done = Checkpoints.step_done
    resume = Checkpoints.resume

    def note_step(self: Checkpoints, step: int, accuracy: float | None) -> None:
        seen["steps"].append(step)
        if step == look_at:
            seen["then"] = blocks(run)
        step_done(self, step, accuracy)

    def note_resumed(self: Checkpoints) -> Position:
        position = resume(self)
        seen["marked_at_start"] = (self._root / success.NAME).is_file()
        if position.step == look_at:
            seen["then"] = blocks(run)
        return position

    checkpointing.Checkpoints.step_done = note_step
    checkpointing.Checkpoints.resume = note_resumed
    try:
        yield
    finally:
        checkpointing.Checkpoints.step_done = step_done
        checkpointing.Checkpoints.resume = resume


def resume_each(config_path: str, root: str, ways: list[list[str]]) -> list[str]:
    """Builds a run once and resumes in several ways, each a list of trainer settings "key=value" (its directory below
    root) and variables of the environment "NAME=value". Returns "step N" or the error's text of each."""
    out = []
    with a_run(config_path, [f"trainer.default_local_dir={root}"]) as run:
        trainer = run.config.trainer
        usual = vars(trainer).copy()
        for way in ways:
            settings = dict(item.split("=", 1) for item in way)
            variables = {key: value for key, value in settings.items() if key.isupper()}
            vars(trainer).update({key: value for key, value in settings.items() if key not in variables})
            with mock.patch.dict(os.environ, variables):
                checkpoints = Checkpoints(run)
                try:
                    out.append(f"step {checkpoints.resume().step}")
                except UserError as error:
                    out.append(str(error))
                finally:
                    checkpoints.release()
            vars(trainer).update(usual)
    return out


def resume_where_rank_1_cannot_read(config_path: str, roots: dict[str, str]) -> list[int]:
    """Resumes in each directory, where rank 1 cannot read the file of step 3 that is the key. Returns the steps."""
    read = directory.read_file
    steps = []

    def refused(path: Path, at: Path) -> bytes:
        if path == at and dist.get_rank() == 1:
            raise directory.CorruptCheckpoint(f"{path}: cannot be read (Stale file handle)")
        return read(path)

    with a_run(config_path, []) as run:
        for name, root in roots.items():
            run.config.trainer.default_local_dir = root
            at = Path(root) / "global_step_3" / name
            with mock.patch.object(directory, "read_file", functools.partial(refused, at=at)):
                checkpoints = Checkpoints(run)
                with run.offload_schedule.phase(PhaseTimer(), "load_checkpoint"):
                    steps.append(checkpoints.resume().step)
                checkpoints.release()
    return steps


def save_where_the_disk_refuses(config_path: str, root: str, limit: int) -> list[str]:
    """Two checkpoints, at once and in the background, while the system refuses files beyond `limit` bytes, as a full
    disk does; then one after which the older one cannot be deleted. Returns what was said of each."""
    out = []
    with a_run(config_path, [f"trainer.default_local_dir={root}"]) as run:
        checkpoints = Checkpoints(run)
        checkpoints.step_done(1, None)
        checkpoints.save_now()
        for step, wait in ((2, True), (3, False)):
            checkpoints.step_done(step, None)
            unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
            try:
                with run.offload_schedule.phase(PhaseTimer(), "save_checkpoint"):
                    checkpoints.begin(wait=wait)
                checkpoints.commit()
                out.append("saved")
            except UserError as error:
                out.append(str(error))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        run.config.trainer.max_ckpt_to_keep = 1
        with mock.patch.object(directory, "remove", side_effect=PermissionError(13, "Permission denied", "old")):
            checkpoints.step_done(4, None)
            with contextlib.redirect_stderr(io.StringIO()) as said:
                checkpoints.save_now()
        out.append(said.getvalue())
    return out
