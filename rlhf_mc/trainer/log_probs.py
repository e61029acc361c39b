"""Forward passes over a batch: log-probs of actor, reference and teachers, values of the critic. No
weight changes here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from rlhf_mc.config.roles import has_old_log_prob_pass, has_ref_pass, num_teacher_tokens
from rlhf_mc.data.batch import Prompt, RaggedBatch, ragged_indices
from rlhf_mc.models import heads
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.models.heads import Head
from rlhf_mc.models.sequence_rows import TopTokens
from rlhf_mc.runtime.work import WAITING, working
from rlhf_mc.topology.consensus import sum_over_ranks
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.step_state import StepState, start_slowest_rank
from rlhf_mc.trainer.token_budget import my_micro_batches

_SUMMED_TOGETHER = 1 << 26
"""Numbers of teachers that are summed over the ranks at a time, on the device: 256 MiB."""


def log_probs(run: Run, state: StepState, batch: RaggedBatch) -> RaggedBatch:
    """Compute old log-probs (actor), compared with the rollout engine's, and, if the run has these
    models, reference log-probs and values (critic). The batch has no old log-probs where the
    actor's only update computes them itself. A rank of a rollout pool computes those of its models
    alone."""
    cfg = run.config
    head = heads.log_prob_head(run.actor.shape.vocab_size, cfg.rollout.temperature)
    bypass = cfg.algorithm.rollout_correction.bypass_mode
    replay = "off" if run.actor.replay is None else run.actor.replay.mode
    is_read = run.log_prob_check.is_first if bypass else state.step <= cfg.trainer.critic_warmup
    passes: dict[str, tuple[str, ModelEngine, Head]] = {}
    if is_read or has_old_log_prob_pass(cfg, replay):
        passes["old_log_probs"] = ("old_log_prob", run.actor, head)
    reference = run.reference if has_ref_pass(cfg) else None
    if reference is not None:
        passes["ref_log_probs"] = ("ref", reference, head)
    if run.critic is not None:
        passes["values"] = ("values", run.critic, heads.value_head)
    passes = {name: of for name, of in passes.items() if of[1].groups.is_member}
    parts: dict[str, torch.Tensor] = {}  # this rank's parts of the results
    for name, (phase, engine, pass_head) in passes.items():
        with run.offload_schedule.phase(state.timer, phase):
            contexts = batch.contexts()
            micro_batches = my_micro_batches(engine, contexts, run.token_budgets[phase])
            parts[name] = engine.my_scores(contexts, micro_batches, pass_head)
    if "old_log_probs" in parts:
        start_slowest_rank(state, "old_log_prob", run.groups.members)
    if reference is not None and reference.groups.mesh.first:
        scores = torch.zeros(len(batch.rollout_log_probs))
        if (part := parts.pop("ref_log_probs", None)) is not None:
            scores = sum_over_ranks(part, reference.groups.members)
        batch = batch.with_fields(ref_log_probs=from_rollout_pool(run, state, reference, scores))
    if parts:
        # Once for all passes: a rank that is the slower one in the first may be the faster one in
        # the next.
        with run.offload_schedule.phase(state.timer, "sum_log_probs"):
            summed = sum_over_ranks(torch.stack(list(parts.values())), run.groups.members)
        batch = batch.with_fields(**dict(zip(parts, summed, strict=True)))
    if "old_log_probs" in parts:
        compare_with_engine(run, state, batch)
    # With bypass_mode in the first step too, so that a resumed run computes the same.
    return batch.with_fields(old_log_probs=batch.rollout_log_probs) if bypass else batch


def from_rollout_pool(
    run: Run, state: StepState, engine: ModelEngine, scores: torch.Tensor
) -> torch.Tensor:
    """Return the scores of a model of the rollout pool. Its ranks begin to send theirs, which are
    equal, and do not wait for the ranks that train, which may still be in passes of theirs. scores:
    on the host; where the model is not, room for them. Every rank must call it, unless it raises
    an error that `pools_at_work` raises on all ranks."""
    groups = engine.groups
    if groups.is_member:
        sent = dist.broadcast(scores, groups.mesh.first, run.exchange, async_op=True)
        state.sent.append(sent)
        return scores
    with state.timer.phase("idle"), working(WAITING):
        dist.broadcast(scores, groups.mesh.first, run.exchange)
    return scores


def compare_with_engine(run: Run, state: StepState, batch: RaggedBatch) -> None:
    """Check the old log-probs against the rollout engine's. With router replay of the engine's
    experts, add the shares of choices that the routers themselves would not have made. Every rank
    that trains must call it."""
    if run.actor.replay is not None and run.actor.replay.mode == "rollout":
        share, by_layer, of_prompts = run.actor.replay.differing_shares()
        state.metrics["training/expert_choices_diff"] = share
        if run.actor.shares_prompts:
            state.metrics["training/prompt_expert_choices_diff"] = of_prompts
        state.metrics |= {
            f"training/expert_choices_diff/layer_{n}": diff for n, diff in by_layer.items()
        }
    run.log_prob_check.check(batch, state.step)


def teacher_log_probs(
    run: Run, state: StepState, prompts: Sequence[Prompt], batch: RaggedBatch
) -> RaggedBatch:
    """Return the batch with the log-probs of the teachers, if the run has any and updates the actor
    in this step: each scores the rows of its data source. prompts: of each sequence. Raise
    UserError, on every rank that trains, if a log-prob is not finite. A rank of a rollout pool
    computes those of its teachers alone."""
    if not run.teachers or state.step <= run.config.trainer.critic_warmup:
        return batch
    k = num_teacher_tokens(run.config)
    student = run.actor.shape.vocab_size, run.config.rollout.temperature
    # the log-prob of each drawn token, and the probability of the teacher's most probable ones
    scores = torch.zeros(len(batch.rollout_log_probs), 2)
    top = TopTokens(run.groups, k)
    rows_of = {teacher: rows for teacher in run.teachers if len(rows := teacher.rows(prompts))}
    lens = batch.response_lens.numpy()
    tokens = {
        teacher: torch.from_numpy(ragged_indices(lens, rows.numpy()))
        for teacher, rows in rows_of.items()
    }
    own = [teacher for teacher in rows_of if teacher.engine.groups.is_member]
    for teacher in own:
        rows = rows_of[teacher]
        read = teacher.batch(batch.select(rows), [prompts[i] for i in rows]).contexts()
        with run.offload_schedule.phase(state.timer, teacher.role):
            sequences, part = teacher.score(read, *student, k)
        positions = tokens[teacher][ragged_indices(read.response_lens.numpy(), sequences)]
        scores[positions] = torch.stack([part[:, 0], part[:, 1 + k :].exp().sum(1)], 1)
        top.store(read.select(torch.from_numpy(sequences)), part[:, 1:])
    if own:
        with run.offload_schedule.phase(state.timer, "sum_log_probs"):
            scores = sum_over_ranks(scores, own[0].engine.groups.members)
    for teacher, rows in rows_of.items():
        if teacher.engine.groups.mesh.first:
            of = tokens[teacher]
            scores[of] = from_rollout_pool(run, state, teacher.engine, scores[of])
            if k:
                read = batch.select(rows).contexts()
                _top_from_rollout_pool(run, state, teacher.engine, read, top)
    if not run.trains:
        return batch
    for teacher, of in tokens.items():  # an error is the same on every rank
        state.metrics |= teacher.metrics(scores[of], batch.rollout_log_probs[of], state.step, k)
    run.actor.teacher_top = top if k else None
    return batch.with_fields(teacher_log_probs=scores[:, 0].contiguous())


def _top_from_rollout_pool(
    run: Run, state: StepState, engine: ModelEngine, batch: RaggedBatch, top: TopTokens
) -> None:
    """Store on each rank that trains a share of the rows of a teacher of the rollout pool. batch:
    the sequences that it has scored. As from_rollout_pool."""
    rows = top.rows(batch)
    if engine.groups.is_member:
        for part in rows.split(max(1, _SUMMED_TOGETHER // rows.shape[1])):
            part.copy_(sum_over_ranks(part, engine.groups.members))
    rows = from_rollout_pool(run, state, engine, rows)
    if run.trains:
        share = np.arange(run.groups.rank, batch.num_sequences, run.groups.mesh.world)
        kept = torch.from_numpy(ragged_indices(batch.response_lens.numpy(), share))
        top.store(batch.select(torch.from_numpy(share)), rows[kept])
