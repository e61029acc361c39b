"""Functions that the ranks run in test_pooled_rollout.py."""

from __future__ import annotations

from typing import Any

from cases import built_run
from resume_cases import blocks

from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer import loop


def train(config_path: str, overrides: list[str]) -> dict[str, Any]:
    """Run the whole loop. Return of each step its number, prompts, responses, the ages of their tokens, importance
    weights and metrics; and the last weights."""
    steps = []
    with built_run(config_path, overrides) as run:
        for step in loop.steps(run, RankStatus(), StopRequests(run.config.trainer)):
            ages = step.batch.token_ages
            weights = step.batch.is_weights
            steps.append(
                {
                    "step": step.number,
                    "prompts": [prompt.index for prompt in step.prompts],
                    "responses": step.batch.responses(),
                    "rollout_log_probs": step.batch.rollout_log_probs.tolist(),
                    "ages": None if ages is None else ages.tolist(),
                    "is_weights": None if weights is None else weights.tolist(),
                    "metrics": dict(step.metrics),
                }
            )
        return {"steps": steps, "last": blocks(run)}
