"""Functions that the ranks run in test_filter_groups.py and test_masked_samples.py."""

from __future__ import annotations

import hashlib
from typing import Any

from cases import built_run
from resume_cases import blocks

from rlhf_mc.config.errors import UserError
from rlhf_mc.patching import replaced
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer import loop, update
from rlhf_mc.trainer.token_budget import train_step


def train_and_record_updates(config_path: str, overrides: list[str]) -> dict[str, Any]:
    """Run `train`. Return too of each update its model, its step, its responses by their numbers in
    the run, and of each step these numbers and the sample mask."""
    updates = []

    def record(engine: Any, mini: Any, loss: Any, budget: Any, number: int) -> Any:
        updates.append((engine.name, budget.step, mini.numbers.tolist()))
        return train_step(engine, mini, loss, budget, number)

    with replaced(update, "train_step", record):
        return train(config_path, overrides) | {"updates": updates}


def train(config_path: str, overrides: list[str]) -> dict[str, Any]:
    """Run the whole loop. Return of each step its number, its prompts, a digest of its tokens, its
    scores, its metrics, and the numbers and the mask of its responses; the last weights; and the
    UserError that ended the run, if any."""
    steps = []
    error = ""
    with built_run(config_path, overrides) as run:
        try:
            for step in loop.steps(run, RankStatus(), StopRequests(run.config.trainer)):
                assert step.batch.scores is not None and step.batch.numbers is not None
                assert step.batch.sample_mask is not None
                steps.append(
                    {
                        "step": step.number,
                        "prompts": [prompt.index for prompt in step.prompts],
                        "tokens": hashlib.sha256(step.batch.tokens.numpy().tobytes()).hexdigest(),
                        "scores": step.batch.scores.tolist(),
                        "metrics": dict(step.metrics),
                        "numbers": step.batch.numbers.tolist(),
                        "sample_mask": step.batch.sample_mask.tolist(),
                    }
                )
        except UserError as caught:
            error = str(caught)
        return {"steps": steps, "last": blocks(run), "error": error}
