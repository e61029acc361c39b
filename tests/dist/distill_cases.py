"""Functions that the ranks run in test_distillation.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from cases import built_run
from model_cases import TEMPERATURE, _my_micro_batches, logical_tensors, make_engine

from rlhf_mc.algorithms.policy_losses import POLICY_LOSSES
from rlhf_mc.config.reward_schema import DistillationLossConfig, TeacherModelConfig
from rlhf_mc.config.schema import ActorConfig, OptimConfig
from rlhf_mc.data.batch import Prompt, RaggedBatch, ragged_indices
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.models.sequence_rows import TopTokens
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.topology.consensus import sum_over_ranks
from rlhf_mc.topology.groups import build_role_groups
from rlhf_mc.topology.mesh import Mesh
from rlhf_mc.trainer import loop, step_state
from rlhf_mc.trainer.teachers import Teacher
from rlhf_mc.trainer.update import ActorTerms, actor_objective

BUDGET = 40
"""Tokens of a micro-batch, which give each replica several micro-batches."""


class Layout(NamedTuple):
    """Layout of a model on all ranks."""

    tp: int = 1
    pp: int = 1
    cp: int = 1


@contextlib.contextmanager
def student_and_teacher(
    student: str, teacher: str, layouts: tuple[Layout, Layout]
) -> Iterator[tuple[ModelEngine, Teacher]]:
    """Build both models, each in its own layout. teacher: checkpoint, or "actor"."""
    meshes = {
        role: Mesh(dist.get_world_size(), at.tp, at.pp, cp=at.cp)
        for role, at in zip(("actor", "teacher"), layouts, strict=True)
    }
    groups = build_role_groups(meshes)
    actor = make_engine(student, "actor", groups["actor"])
    section = TeacherModelConfig(teacher)
    if teacher == "actor":
        engine = actor.as_scorer()
        section = TeacherModelConfig(source="actor", prompt_key="hint")
    else:
        engine = make_engine(teacher, "actor", groups["teacher"])
    yield actor, Teacher("distillation.teacher_models.t", section, engine, BUDGET)


def taught(
    actor: ModelEngine, teacher: Teacher, batch: RaggedBatch, prompts: Sequence[Prompt], k: int
) -> RaggedBatch:
    """Return the batch with the teacher's log-probs, and let the actor's losses read its most
    probable tokens."""
    batch = batch.with_fields(numbers=torch.arange(7, 7 + batch.num_sequences))
    sequences, scores = teacher.score(
        teacher.batch(batch, prompts), actor.shape.vocab_size, TEMPERATURE, k
    )
    positions = torch.from_numpy(ragged_indices(batch.response_lens.numpy(), sequences))
    log_probs = torch.zeros(len(batch.rollout_log_probs))
    log_probs[positions] = scores[:, 0]
    actor.teacher_top = TopTokens(actor.groups, k) if k else None
    if actor.teacher_top is not None:
        actor.teacher_top.store(batch.select(sequences), scores[:, 1:])
    return batch.with_fields(teacher_log_probs=sum_over_ranks(log_probs))


def gradients(
    student: str,
    teacher: str,
    layouts: tuple[Layout, Layout],
    batch: RaggedBatch,
    prompts: Sequence[Prompt],
    losses: Sequence[DistillationLossConfig],
    cfg: ActorConfig,
) -> list[tuple[RaggedBatch, torch.Tensor | None, dict[str, float], dict[str, torch.Tensor]]]:
    """Return for each loss the batch with the teacher's log-probs, its most probable tokens [R, 2
    k], the statistics of the actor's loss, and its gradient of each logical tensor as gathered on
    this rank."""
    out = []
    with student_and_teacher(student, teacher, layouts) as (actor, model):
        actor.make_trainable(OptimConfig(), total_steps=1)
        for loss in losses:
            k = loss.topk if loss.loss_mode == "forward_kl_topk" else 0
            mini = taught(actor, model, batch, prompts, k)
            top = actor.teacher_top
            rows = None if top is None else sum_over_ranks(top.rows(mini))
            terms = ActorTerms(
                POLICY_LOSSES["vanilla"],
                0.0,
                0.0,
                1,
                torch.Generator(),
                distillation=loss,
                teacher_top=top,
            )
            objective = actor_objective(mini, cfg, actor.shape.vocab_size, TEMPERATURE, terms)
            stats = actor.backward(mini, _my_micro_batches(actor, mini, BUDGET), objective)
            grads = {
                name: param.main_grad
                for name, param in actor.named_parameters().items()
                if param.requires_grad
            }
            out.append((mini, rows, stats, logical_tensors(actor, grads)))
    return out


def steps(config_path: str, overrides: Sequence[str], count: int = 2) -> list[dict[str, Any]]:
    """Return of each step the metrics, and the fields of the batch."""
    out = []
    with built_run(config_path, list(overrides)) as run:
        for step in range(1, count + 1):
            state = step_state.begin_step(
                step, RankStatus(), (step - 1) * run.config.data.train_batch_size
            )
            batch = loop.one_step(run, state, StopRequests(run.config.trainer))
            sources = np.array([prompt.data_source for prompt in state.prompts])
            out.append({"metrics": dict(state.metrics), "batch": batch, "sources": sources})
    return out
