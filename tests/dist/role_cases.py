"""Models of several roles on the same ranks, each in a layout of its own, used in turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from model_cases import TEMPERATURE, _my_micro_batches, _objective, logical_tensors, make_engine

from rlhf_mc.config.schema import OptimConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.topology.groups import Groups, build_role_groups
from rlhf_mc.topology.mesh import Mesh
from rlhf_mc.trainer.scoring import log_prob_head, score_sequences, score_tokens, value_head

BUDGET = 40
"""Tokens of a micro-batch: several for each replica."""


class RolePlacement(NamedTuple):
    """A role's checkpoint and layout."""

    checkpoint: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    sequence_parallel: bool = False


def take_turns(places: Mapping[str, RolePlacement], batch: RaggedBatch) -> dict[str, Any]:
    """What a PPO step does with its models, all of which exist at the same time: scores, then gradients, then an
    optimizer step of actor and critic, then scores again. Tensors are whole, as this rank sees them."""
    world = dist.get_world_size()
    meshes = {role: Mesh(world, at.tp, at.pp, at.ep, vpp=at.vpp) for role, at in places.items()}
    groups = build_role_groups(meshes)
    engines = {
        role: make_engine(
            at.checkpoint,
            "critic" if role in ("critic", "reward_model") else "actor",
            groups[role],
            sequence_parallel=at.sequence_parallel,
        )
        for role, at in places.items()
    }
    out: dict[str, Any] = {"communicators": _communicators(groups)}
    trained = {role: engines[role] for role in ("actor", "critic")}
    for engine in trained.values():
        engine.make_trainable(OptimConfig(lr=1e-2, eps=1e-3), total_steps=1)
    out["before"] = {role: _scores(role, engine, batch) for role, engine in engines.items()}
    for engine in trained.values():
        engine.backward(batch, _my_micro_batches(engine, batch, BUDGET), _objective(engine, batch, "token-mean"))
    # Only now, so that the one's pass could have spoilt the other's gradients.
    out["gradients"] = {role: logical_tensors(engine, _main_grads(engine)) for role, engine in trained.items()}
    out["steps"] = {
        role: engine.train_step(
            batch, _my_micro_batches(engine, batch, BUDGET), _objective(engine, batch, "token-mean")
        )
        for role, engine in trained.items()
    }
    out["after"] = {role: _scores(role, engine, batch) for role, engine in engines.items()}
    out["weights"] = {role: logical_tensors(engine, engine.params) for role, engine in engines.items()}
    assert not parallel_state.is_initialized()
    return out


def _main_grads(engine: ModelEngine) -> dict[str, torch.Tensor]:
    return {name: param.main_grad for name, param in engine.named_parameters().items()}


def _scores(role: str, engine: ModelEngine, batch: RaggedBatch) -> torch.Tensor:
    if role == "reward_model":
        return score_sequences(engine, batch, BUDGET)
    head = value_head if engine.name == "critic" else log_prob_head(engine.shape.vocab_size, TEMPERATURE)
    return score_tokens(engine, batch, head, BUDGET)


def _communicators(groups: Mapping[str, Groups]) -> list[tuple[int, ...]]:
    """The ranks of each process group that this rank is in."""
    found = {}
    for role in groups.values():
        for field in fields(role.collection):
            group = getattr(role.collection, field.name)
            if group is not None:
                found[id(group)] = tuple(dist.get_process_group_ranks(group))
    return sorted(found.values())
