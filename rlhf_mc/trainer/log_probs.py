"""Forward passes over a batch: log-probs of actor and reference, values of the critic. No weight changes here."""

from __future__ import annotations

import torch

from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models import heads
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.models.heads import Head
from rlhf_mc.topology.consensus import sum_over_ranks
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.step_state import StepState, start_slowest_rank
from rlhf_mc.trainer.token_budget import my_micro_batches


def log_probs(run: Run, state: StepState, batch: RaggedBatch) -> RaggedBatch:
    """Compute old log-probs (actor), compared with the rollout engine's, and, if the run has these models, reference
    log-probs and values (critic)."""
    head = heads.log_prob_head(run.actor.shape.vocab_size, run.config.rollout.temperature)
    bypass = run.config.algorithm.rollout_correction.bypass_mode
    passes: dict[str, tuple[str, ModelEngine, Head]] = {}
    if not bypass or run.log_prob_check.is_first:
        passes["old_log_probs"] = ("old_log_prob", run.actor, head)
    if run.reference is not None:
        passes["ref_log_probs"] = ("ref", run.reference, head)
    if run.critic is not None:
        passes["values"] = ("values", run.critic, heads.value_head)
    mine: dict[str, torch.Tensor] = {}
    for name, (phase, engine, pass_head) in passes.items():
        with run.offload_schedule.phase(state.timer, phase):
            mine[name] = my_token_scores(engine, batch, pass_head, run.token_budgets[phase])
    if "old_log_probs" in mine:
        start_slowest_rank(state, "old_log_prob")
    if mine:
        # Once for all passes: a rank that is the slower one in the first may be the faster one in the next.
        with run.offload_schedule.phase(state.timer, "sum_log_probs"):
            summed = sum_over_ranks(torch.stack(list(mine.values())))
        batch = batch.with_fields(**dict(zip(mine, summed, strict=True)))
    if "old_log_probs" in mine:
        run.log_prob_check.check(batch, state.step)
    # With bypass_mode in the first step too, so that a resumed run computes the same.
    return batch.with_fields(old_log_probs=batch.rollout_log_probs) if bypass else batch


def score_tokens(engine: ModelEngine, batch: RaggedBatch, head: Head, budget: int) -> torch.Tensor:
    """Return the head's number for every response token of the batch: [R] float32, on every rank. Every rank must call
    it. A step, which makes several passes, sums the parts of all of them at once."""
    return sum_over_ranks(my_token_scores(engine, batch, head, budget))


def my_token_scores(engine: ModelEngine, batch: RaggedBatch, head: Head, budget: int) -> torch.Tensor:
    """Return what this rank has of `score_tokens`, on the device: [R] float32, 0 for the tokens of other ranks."""
    return engine.my_scores(batch, my_micro_batches(engine, batch, budget), head)
