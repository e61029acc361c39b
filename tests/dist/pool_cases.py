"""Functions that the ranks run in test_pooled_rollout.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from cases import built_run
from resume_cases import blocks

from rlhf_mc.data.batch import Generation, RaggedBatch
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.patching import replaced
from rlhf_mc.rollout import engine_loop
from rlhf_mc.rollout.base import RolloutEngine
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer import loop, update
from rlhf_mc.trainer.pool import generate
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.step_state import StepState


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


def train_while_generating(config_path: str, overrides: list[str]) -> dict[str, Any]:
    """Run `train` where in the first step the actor's update waits for the generation of the next
    batch to begin, and that generation for the update to begin. Raise an error where one begins
    only after the other has ended."""
    store = dist.distributed_c10d._get_default_store()
    num_calls = 0

    def await_both(own: str, other: str) -> None:
        store.set(f"{config_path}/{own}", "")
        store.wait([f"{config_path}/{other}"], timedelta(seconds=60))

    def update_actor(run: Run, state: StepState, batch: RaggedBatch) -> RaggedBatch:
        if state.step == 1:
            await_both("update", "generation")
        return update.update_actor(run, state, batch)

    def generate_responses(engine: RolloutEngine, *args: Any) -> dict[int, Generation]:
        nonlocal num_calls
        num_calls += 1
        if engine.max_running and num_calls == 2:  # the first one generates the step's own batch
            await_both("generation", "update")
        return engine_loop.generate_responses(engine, *args)

    with (
        replaced(loop, "update_actor", update_actor),
        replaced(generate, "generate_responses", generate_responses),
    ):
        return train(config_path, overrides)


def timeouts(config_path: str, overrides: list[str]) -> list[float]:
    """Return the seconds after which a collective of this rank's engines fails, and of all ranks;
    of a rank without an engine the latter alone."""
    with built_run(config_path, overrides) as run:
        return [
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group in (run.rollout_pool, dist.group.WORLD)
            if isinstance(group, dist.ProcessGroup)
        ]


def values(field: torch.Tensor | None) -> list[Any] | None:
    """Return the values of a field of a batch; None where it has none."""
    return None if field is None else field.tolist()


def train(config_path: str, overrides: list[str]) -> dict[str, Any]:
    """Run the whole loop. Return of each step its number, prompts, responses, the ages of their
    tokens, importance weights, scores and metrics, and the rows that this rank's reward workers
    have got, in all and while its engine generated; and the last weights."""
    steps = []
    with built_run(config_path, overrides) as run, submitted_rows(run) as rows:
        for step in loop.steps(run, RankStatus(), StopRequests(run.config.trainer)):
            steps.append(
                {
                    "step": step.number,
                    "prompts": [prompt.index for prompt in step.prompts],
                    "responses": step.batch.responses(),
                    "rollout_log_probs": step.batch.rollout_log_probs.tolist(),
                    "ages": values(step.batch.token_ages),
                    "is_weights": values(step.batch.is_weights),
                    "metrics": dict(step.metrics),
                    "texts": run.tokenizer.batch_decode(
                        step.batch.responses(), skip_special_tokens=True
                    ),
                    "truths": [prompt.ground_truth for prompt in step.prompts],
                    # None on a rank of a rollout pool
                    "scores": values(step.batch.scores),
                    "sample_mask": values(step.batch.sample_mask),
                    "turns": values(step.batch.turns),
                    "advantages": values(step.batch.advantages),
                    "greedy_scores": values(step.batch.greedy_scores),
                    "submitted": dict(rows),
                }
            )
            rows.clear()
        return {"steps": steps, "last": blocks(run)}
