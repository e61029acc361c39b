"""Functions that the ranks run in test_roles.py: models of several roles on the same ranks, each in
its own layout."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpu_parts.engines import score_tokens
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import p2p_communication
from model_cases import TEMPERATURE, _my_micro_batches, _objective, logical_tensors, make_engine

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import OptimConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.models.heads import log_prob_head, value_head
from rlhf_mc.patching import replaced
from rlhf_mc.topology import groups as topology
from rlhf_mc.topology.groups import ProcessGroups, build_role_groups
from rlhf_mc.topology.mesh import Mesh
from rlhf_mc.trainer.reward_models import score_sequences

BUDGET = 40
"""Tokens of a micro-batch, which give each replica several micro-batches."""


class RolePlacement(NamedTuple):
    """Checkpoint and layout of a role."""

    checkpoint: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    sequence_parallel: bool = False


def step_all_roles(placements: Mapping[str, RolePlacement], batch: RaggedBatch) -> dict[str, Any]:
    """Run the passes of a PPO step on all roles' models, built together: scores, gradients, an
    optimizer step of actor and critic, and scores again. Return the results, tensors gathered on
    this rank, and the groups ("connected") in which building them ran an all-reduce, and those
    ("exchanging") in which batches of messages were sent later. Also return the groups in which
    building them sent messages one by one ("paired"), and those of later such messages
    ("messaging")."""
    with (
        recorded_groups(dist, "all_reduce") as connected,
        recorded_groups(p2p_communication, "_p2p_ops") as paired,
    ):
        groups = build_role_groups(meshes_of(placements))
    with (
        recorded_groups(dist, "batch_isend_irecv") as exchanging,
        recorded_groups(p2p_communication, "_p2p_ops") as messaging,
    ):
        out = _step(placements, groups, batch)
    return {
        **out,
        "connected": connected,
        "exchanging": exchanging,
        "paired": paired,
        "messaging": messaging,
    }


def connect_late(seconds: float) -> str:
    """Connect the world while rank 1 joins after the others have given up. Return this rank's
    error, if any. All have connected at the end."""
    store = dist.distributed_c10d._get_default_store()
    error = ""
    if dist.get_rank() == 1:
        store.wait(["gave up"])
        seconds = 600.0
    try:
        with replaced(topology, "_LATER_SECONDS", 0.0):
            topology._connect([dist.group.WORLD], [], seconds)
    except UserError as failure:
        error = str(failure)
        store.set("gave up", "")
    for thread in threading.enumerate():
        if thread.name == "first collectives":
            thread.join()
    dist.barrier()
    return error


def meshes_of(placements: Mapping[str, RolePlacement]) -> dict[str, Mesh]:
    """Return the mesh of each role over all ranks."""
    world = dist.get_world_size()
    return {role: Mesh(world, at.tp, at.pp, at.ep, vpp=at.vpp) for role, at in placements.items()}


@contextlib.contextmanager
def recorded_groups(module: Any, name: str) -> Iterator[set[tuple[int, ...]]]:
    """Yield a set of the ranks of each group in which a function of torch.distributed or of
    Megatron-Core is called while the body runs."""
    found: set[tuple[int, ...]] = set()
    original = getattr(module, name)

    def record(*args: Any, **kwargs: Any) -> Any:
        group = args[0][0].group if name == "batch_isend_irecv" else kwargs.get("group")
        found.add(tuple(dist.get_process_group_ranks(group)))
        return original(*args, **kwargs)

    with replaced(module, name, record):
        yield found


def _step(
    placements: Mapping[str, RolePlacement], groups: Mapping[str, ProcessGroups], batch: RaggedBatch
) -> dict[str, Any]:
    engines = {
        role: make_engine(
            at.checkpoint,
            "critic" if role in ("critic", "reward_model") else "actor",
            groups[role],
            sequence_parallel=at.sequence_parallel,
        )
        for role, at in placements.items()
    }
    out: dict[str, Any] = {"communicators": _communicators(groups)}
    trained = {role: engines[role] for role in ("actor", "critic")}
    for engine in trained.values():
        engine.make_trainable(OptimConfig(lr=1e-2, eps=1e-3), total_steps=1)
    out["before"] = {role: _scores(role, engine, batch) for role, engine in engines.items()}
    for engine in trained.values():
        engine.backward(
            batch, _my_micro_batches(engine, batch, BUDGET), _objective(engine, batch, "token-mean")
        )
    # After all passes, to catch one model's pass overwriting the other's gradients.
    out["gradients"] = {
        role: logical_tensors(engine, _main_grads(engine)) for role, engine in trained.items()
    }
    out["steps"] = {
        role: engine.train_step(
            batch, _my_micro_batches(engine, batch, BUDGET), _objective(engine, batch, "token-mean")
        ).grad_norm
        for role, engine in trained.items()
    }
    out["after"] = {role: _scores(role, engine, batch) for role, engine in engines.items()}
    out["weights"] = {
        role: logical_tensors(engine, engine.params) for role, engine in engines.items()
    }
    assert not parallel_state.is_initialized()
    return out


def _main_grads(engine: ModelEngine) -> dict[str, torch.Tensor]:
    return {name: param.main_grad for name, param in engine.named_parameters().items()}


def _scores(role: str, engine: ModelEngine, batch: RaggedBatch) -> torch.Tensor:
    if role == "reward_model":
        return score_sequences(engine, batch, BUDGET)
    head = (
        value_head
        if engine.name == "critic"
        else log_prob_head(engine.shape.vocab_size, TEMPERATURE)
    )
    return score_tokens(engine, batch, head, BUDGET)


def _communicators(groups: Mapping[str, ProcessGroups]) -> list[tuple[int, ...]]:
    """Return the ranks of each process group that this rank is in."""
    found = {}
    for role in groups.values():
        for field in fields(role.collection):
            group = getattr(role.collection, field.name, None)
            if group is not None:
                found[id(group)] = tuple(dist.get_process_group_ranks(group))
    return sorted(found.values())
