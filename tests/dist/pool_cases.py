"""Functions that the ranks run in test_pooled_rollout.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from cases import built_run
from resume_cases import blocks

from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.patching import replaced
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer import loop
from rlhf_mc.trainer.run import Run


@contextmanager
def submitted_rows(run: Any) -> Iterator[Counter[str]]:
    """Count the rows that are submitted to the reward workers, and those that are while the engine
    generates."""
    rows: Counter[str] = Counter()
    submit = run.rewards.submit

    def counting(prompts: Any, *args: Any) -> Any:
        rows["all"] += len(prompts)
        rows["early"] += len(prompts) * (run.rollout.num_unfinished > 0)
        return submit(prompts, *args)

    run.rewards.submit = counting
    yield rows


def train_with_older_weights(config_path: str, overrides: list[str]) -> dict[str, Any]:
    """Run `train` with an engine that gets in each step, from the second on, the weights that the
    actor had a step before."""
    actors: list[dict[str, torch.Tensor]] = []

    def update_weights(run: Run, timer: PhaseTimer) -> None:
        params = run.actor.rollout_params
        actors.append({name: param.clone() for name, param in params.items()})
        run.weight_sync.run(actors[-2:][0], run.rollout.params)
        run.rollout.weights_updated()

    with replaced(loop, "update_weights", update_weights):
        return train(config_path, overrides)


def train(config_path: str, overrides: list[str]) -> dict[str, Any]:
    """Run the whole loop. Return of each step its number, prompts, responses, the ages of their
    tokens, importance weights, scores and metrics, and the rows that this rank's reward workers
    have got, in all and while its engine generated; and the last weights."""
    steps = []
    with built_run(config_path, overrides) as run, submitted_rows(run) as rows:
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
                    "texts": run.tokenizer.batch_decode(
                        step.batch.responses(), skip_special_tokens=True
                    ),
                    "truths": [prompt.ground_truth for prompt in step.prompts],
                    "scores": step.batch.scores.tolist(),
                    "sample_mask": step.batch.sample_mask.tolist(),
                    "turns": None if step.batch.turns is None else step.batch.turns.tolist(),
                    "advantages": step.batch.advantages.tolist(),
                    "greedy_scores": None
                    if step.batch.greedy_scores is None
                    else step.batch.greedy_scores.tolist(),
                    "submitted": dict(rows),
                }
            )
            rows.clear()
        return {"steps": steps, "last": blocks(run)}
