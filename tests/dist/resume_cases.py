"""What the ranks run in test_resume.py: the loop itself, cut off and gone on with."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from cases import a_run

from rlhf_mc.checkpoint.blocks import Role, blocks_of
from rlhf_mc.trainer import ppo
from rlhf_mc.trainer.setup import Run, layouts_of


class Killed(Exception):
    """Ends the loop as a kill would: nothing is tidied up."""


@contextlib.contextmanager
def killed_in(step: int | None, phase: str) -> Iterator[None]:
    """The loop ends where `phase` of `step` begins."""
    original = getattr(ppo, phase)

    def kill(run: Run, state: Any, *args: Any) -> Any:
        if state.step == step:
            raise Killed
        return original(run, state, *args)

    setattr(ppo, phase, kill)
    try:
        yield
    except Killed:
        pass
    finally:
        setattr(ppo, phase, original)


def train(config_path: str, overrides: list[str], kill_step: int | None = None, kill_phase: str = "rollout") -> Any:
    """The whole loop. Returns its first step, and a digest of every tensor that a checkpoint would hold."""
    with a_run(config_path, overrides) as run:
        with killed_in(kill_step, kill_phase), steps_done() as steps:
            ppo.fit(run)
        return steps[0], digests(run)


@contextlib.contextmanager
def steps_done() -> Iterator[list[int]]:
    """The steps in which the loop came to its end."""
    steps: list[int] = []
    original = ppo.log

    def note(sinks: Any, state: Any) -> None:
        steps.append(state.step)
        original(sinks, state)

    ppo.log = note
    try:
        yield steps
    finally:
        ppo.log = original


def digests(run: Run) -> dict[str, str]:
    """Of each block of this rank, weights and optimizer state."""
    blocks = [block for engine in (run.actor, run.critic) for block in blocks_of(Role(engine, layouts_of(engine)))]
    return {
        f"{block.key} {block.box}": hashlib.sha256(block.data.contiguous().view(torch.uint8).numpy()).hexdigest()
        for block in blocks
    }
