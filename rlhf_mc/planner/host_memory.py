"""Host memory of a node: what offloads, asynchronous saves, the batch, an export and the processes
themselves take.

Weight updates take none on GPUs, where NCCL carries them. The rollout engine copies no weights to
the host when it sleeps. Prompts are not counted: they are known only when the data is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.roles import (
    in_rollout_pool,
    num_teacher_tokens,
    saves_checkpoints,
    shared_models,
)
from rlhf_mc.config.schema import Config, layouts, teachers
from rlhf_mc.planner.full_sharding import full_sharding
from rlhf_mc.planner.lengths import responses_per_prompt
from rlhf_mc.planner.memory import RankMemory, sum_by_name
from rlhf_mc.planner.model_state import ITEMSIZES
from rlhf_mc.planner.storage import TRAINED, weight_bytes
from rlhf_mc.topology.mesh import Mesh, role_mesh

PROCESS = 6 << 30
"""Bytes of a rank's process besides all else: libraries, CUDA's context and NCCL's buffers on the
host. An assumption: a rank on a CPU has 1.8 GB after its start, of which 0.5 GB are its own and the
rest libraries."""
WORKER = 100 << 20
"""Bytes of a process that computes rewards. One with a short function has 24 MB; computer algebra
is a process more."""
EXPORT_FILE = 5_000_000_000
"""Bytes of a file of an export, which one rank gathers (checkpoint/hf_export.py)."""
_PER_TOKEN = 8
"""Bytes of a token in the batch (data/batch.py)."""
_PER_RESPONSE_TOKEN = 100
"""Bytes of a response token in the batch, besides: 8 vectors of float32, and token and log-prob as
Python's numbers."""
_PER_TEACHER_TOKEN = 8
"""Bytes of one of the teacher's most probable tokens at a response token: number and log-prob."""


@dataclass(frozen=True)
class NodeMemory:
    """The host memory of one node, in bytes."""

    node: int
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())


def plan_host_memory(
    cfg: Config, shapes: Mapping[str, ModelShape], plan: Sequence[RankMemory], gpus_per_node: int
) -> NodeMemory:
    """Return the fullest node in a run whose device memory is planned. shapes: of the run's models,
    by role."""
    world = sum(len(ranks.ranks) for ranks in plan)
    nodes: dict[int, dict[str, float]] = {}
    for ranks in plan:
        rank_bytes = _rank_bytes(cfg, shapes, ranks, world)
        for rank in ranks.ranks:
            parts = nodes.setdefault(rank // gpus_per_node, {})
            parts.update(sum_by_name([*parts.items(), *rank_bytes.items()]))
    export = weight_bytes(shapes["actor"], cfg.actor.megatron)
    planned = []
    for node, parts in nodes.items():
        # File i of an export is gathered by rank i.
        before = min(node * gpus_per_node * EXPORT_FILE, export)
        parts["export"] = min(export - before, gpus_per_node * EXPORT_FILE)
        planned.append(NodeMemory(node, {name: size for name, size in parts.items() if size}))
    return max(planned, key=lambda node: node.total)


def _rank_bytes(
    cfg: Config, shapes: Mapping[str, ModelShape], ranks: RankMemory, world: int
) -> dict[str, float]:
    """Return the bytes of one of these ranks. Gradients are offloaded without a copy."""
    parts = {"processes": float(PROCESS + cfg.reward.num_workers * WORKER)}
    copies = 0.0
    for role, state in ranks.states.items():
        settings = layouts(cfg)[role]
        mesh = role_mesh(cfg, role, world)
        if (sharding := full_sharding(cfg, role, shapes[role], mesh)) is not None:
            parts[f"{role} state"] = sharding.host_bytes
        if settings.param_offload:
            parts[f"{role} params"] = state.params
        if role in TRAINED:
            if settings.optimizer_offload:
                parts[f"{role} optimizer"] = state.optimizer
            params = state.stored_params(shapes[role], ITEMSIZES[settings.dtype])
            copies += saved_bytes(params, state.optimizer, mesh)
    if saves_checkpoints(cfg.trainer) and cfg.trainer.async_save:
        parts["asynchronous save"] = copies
    responses = cfg.data.train_batch_size * responses_per_prompt(cfg)
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    parts["batch"] = responses * (
        longest * _PER_TOKEN + cfg.data.max_response_length * _PER_RESPONSE_TOKEN
    )
    parts["teacher's tokens"] = _teacher_sequences(cfg, world) * (
        cfg.data.max_response_length * num_teacher_tokens(cfg) * _PER_TEACHER_TOKEN
    )
    return parts


def _teacher_sequences(cfg: Config, world: int) -> float:
    """Return the most responses of which a rank has the teacher's tokens: those that its replica of
    the teacher scores, or all of a teacher of a rollout pool; and those that its replica trains in
    an update, received and sent to each rank of a replica's last stage."""
    models = {role: shared_models(cfg).get(role, role) for role in teachers(cfg)}
    in_pool = any(in_rollout_pool(cfg, role) for role in models)
    replicas = [1] * in_pool + [role_mesh(cfg, of, world).dp for of in models.values()]
    scored = cfg.data.train_batch_size / min(replicas, default=1)
    mesh = role_mesh(cfg, "actor", world)
    trained = cfg.actor.ppo_mini_batch_size / mesh.dp
    return (scored + (1 + mesh.tp * mesh.cp) * trained) * cfg.rollout.n


def saved_bytes(params: float, optimizer: float, mesh: Mesh) -> float:
    """Return the bytes of a trained model that a rank copies for an asynchronous save: its
    optimizer state, and an equal part of the weights that replicas hold. With experts, most weights
    are theirs, and have fewer replicas. params, optimizer: bytes that the rank holds of what is
    stored."""
    return params * mesh.ep * mesh.shards / mesh.replicas + optimizer
