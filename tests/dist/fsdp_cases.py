"""Functions that the ranks run in test_fsdp.py: engines with strategy fsdp2 beside the same engines
with Megatron-Core's distributed optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpu_parts.engines import (
    TEMPERATURE,
    Role,
    logical_tensors,
    make_engine,
    my_micro_batches,
    objective,
    score_tokens,
    with_targets,
)
from replay_cases import BALANCE

from rlhf_mc.config.model_schema import FsdpConfig
from rlhf_mc.config.schema import OptimConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import ModelEngine, engine_layouts
from rlhf_mc.models.expert_parts import RouterBalance
from rlhf_mc.models.heads import log_prob_head, value_head
from rlhf_mc.models.router_replay import ExpertReplay
from rlhf_mc.reshard.freeze import frozen_parameters, frozen_tensors
from rlhf_mc.reshard.layout import correction_biases
from rlhf_mc.topology.groups import ProcessGroups, build_groups
from rlhf_mc.topology.mesh import Mesh

BUDGET = 32
# A large eps keeps Adam smooth where a gradient is all but zero.
OPTIM = OptimConfig(lr=1e-3, weight_decay=0.1, eps=1e-3, clip_grad=0.5)


class Case(NamedTuple):
    """One model on one mesh."""

    checkpoint: str
    role: Role = "actor"
    shards: int = 0
    """0: all ranks."""
    cp: int = 1
    megatron: dict[str, Any] = {}
    sharding: dict[str, Any] = {}
    distributed: bool = True
    """Compare with the distributed optimizer, of which no rank has the whole gradient."""
    freeze: tuple[str, ...] = ()
    """Patterns, as in actor.freeze."""
    budget: int = BUDGET
    """Tokens of a micro-batch."""
    routers: bool = False
    """Add the routers' losses, update their correction biases, and replay recorded experts."""


class Outcome(NamedTuple):
    """Results of a strategy."""

    scores: torch.Tensor
    stats: dict[str, float]
    gradients: dict[str, torch.Tensor]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    """After the steps."""


@contextmanager
def sharded_groups(shards: int = 1, cp: int = 1) -> Iterator[ProcessGroups]:
    """Build the process groups of a mesh of which each parameter is sharded over `shards` ranks."""
    yield build_groups(Mesh(dist.get_world_size(), 1, 1, cp=cp, shards=shards))


def outcomes(case: Case, batch: RaggedBatch, steps: int = 2) -> tuple[Outcome, Outcome]:
    """Return what the distributed optimizer computes, and fsdp2."""
    world = dist.get_world_size()
    with sharded_groups(cp=case.cp) as groups:
        zero_1 = {"use_distributed_optimizer": case.distributed}
        engine = make_engine(case.checkpoint, case.role, groups, **zero_1, **case.megatron)
        if case.role == "actor":
            batch = with_targets(engine, batch)
        wanted = outcome(case, engine, batch, steps)
    with sharded_groups(case.shards or world, case.cp) as groups:
        fsdp = FsdpConfig(case.shards or -1, **case.sharding)
        engine = make_engine(case.checkpoint, case.role, groups, fsdp=fsdp, **case.megatron)
        return wanted, outcome(case, engine, batch, steps)


def outcome(case: Case, engine: ModelEngine, batch: RaggedBatch, steps: int) -> Outcome:
    """Score the batch, train on it, and score it again with the new weights."""
    head = (
        log_prob_head(engine.shape.vocab_size, TEMPERATURE)
        if engine.name == "actor"
        else value_head
    )
    frozen = frozen_tensors("actor.freeze", case.freeze, engine.shape)
    layout = engine_layouts(engine)[engine.groups.rank]
    engine.make_trainable(OPTIM, total_steps=steps, frozen=frozen_parameters(frozen, layout))
    if case.routers:
        settings = BALANCE
        if not correction_biases(engine.shape):
            settings = replace(BALANCE, moe_router_bias_update_rate=0.0)
        engine.replay = ExpertReplay("recompute", engine.shape, engine.groups, engine.chunks)
        engine.balance = RouterBalance(settings, engine.shape, engine.groups, engine.chunks)
    scores = [score_tokens(engine, batch, head, case.budget)]
    micro_batches = my_micro_batches(engine, batch, case.budget)
    loss = objective(engine, batch, "token-mean")
    stats = engine.backward(batch, micro_batches, loss)
    zeros = {name: torch.zeros(param.shape) for name, param in engine.named_parameters().items()}
    gradients = logical_tensors(engine, zeros | dict(engine.strategy.gradients()))
    skipped = engine.train_step(batch, micro_batches, lambda *args: _spoilt(*loss(*args)))
    assert skipped.skipped
    kept = [name for name, grad in engine.strategy.gradients() if not (grad == 0).all()]
    assert kept == [], "a skipped update keeps its gradient"
    norms = []
    for _ in range(steps):
        norms.append(engine.train_step(batch, micro_batches, loss).grad_norm)
        engine.end_of_ppo_step()
    scores.append(score_tokens(engine, batch, head, case.budget))
    if engine.balance is not None:
        stats |= engine.balance.losses()
    weights = {name: param.float() for name, param in engine.params.items()}
    return Outcome(torch.stack(scores), stats, gradients, norms, logical_tensors(engine, weights))


def _spoilt(value: torch.Tensor, stats: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
    """Return a loss that is not finite, with the statistics."""
    return value * torch.nan, stats


def all_outcomes(cases: Sequence[Case], batch: RaggedBatch) -> list[tuple[Outcome, Outcome]]:
    """Return `outcomes` of each case."""
    return [outcomes(case, batch) for case in cases]
