"""Functions that the ranks run in test_filter_groups.py."""

from __future__ import annotations

import hashlib
from typing import Any

from cases import built_run
from resume_cases import blocks

from rlhf_mc.config.errors import UserError
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer import loop


def train(config_path: str, overrides: list[str]) -> dict[str, Any]:
    """Run the whole loop. Return of each step its number, its prompts, a digest of its tokens, its
    scores and its metrics; the last weights; and the UserError that ended the run, if any."""
    steps = []
    error = ""
    with built_run(config_path, overrides) as run:
        try:
            for step in loop.steps(run, RankStatus(), StopRequests(run.config.trainer)):
                assert step.batch.scores is not None
                steps.append(
                    {
                        "step": step.number,
                        "prompts": [prompt.index for prompt in step.prompts],
                        "tokens": hashlib.sha256(step.batch.tokens.numpy().tobytes()).hexdigest(),
                        "scores": step.batch.scores.tolist(),
                        "metrics": dict(step.metrics),
                    }
                )
        except UserError as caught:
            error = str(caught)
        return {"steps": steps, "last": blocks(run), "error": error}
