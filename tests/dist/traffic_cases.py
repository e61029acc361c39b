"""Functions that the ranks run in test_planned_traffic.py. Each is called on every rank with the
same arguments."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_parts.engines import (
    Role,
    make_engine,
    mesh_groups,
    objective,
    shared_directory,
    token_batch,
)
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_mc.checkpoint import directory
from rlhf_mc.checkpoint.training_blocks import TrainedModel, model_blocks, num_bytes
from rlhf_mc.checkpoint.training_state import Save
from rlhf_mc.checkpoint.training_tensors import HostBuffers
from rlhf_mc.config.schema import OptimConfig
from rlhf_mc.models.engine import engine_layouts
from rlhf_mc.models.heads import log_prob_head, value_head
from rlhf_mc.reshard.execute import execute
from rlhf_mc.reshard.freeze import frozen_parameters, frozen_tensors
from rlhf_mc.reshard.placement import rollout_layouts
from rlhf_mc.reshard.plan import make_plan
from rlhf_mc.reshard.transport import PointToPoint
from rlhf_mc.rollout.vllm_layout import vllm_layout
from rlhf_mc.topology.mesh import rollout_groups

PROMPT = 24
"""Tokens."""
RESPONSE = 40
"""Tokens."""
_SMALL = 8
"""Bytes. The norm of a gradient has no more."""
Counts = dict[tuple[str, tuple[int, ...]], tuple[int, int]]
"""(collective, ranks of its group, or none for messages) -> (bytes, number of calls)."""
_KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "recv_": "receive",
}
"""Operator of torch's c10d -> collective."""


class Recorder(TorchDispatchMode):
    """Counts the bytes of collectives: of the complete vector, for an all-to-all those that this
    rank passes in, and for point-to-point messages those that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
        self._calls: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "c10d":
            self._count(name.partition(".")[0], args)
        return func(*args, **(kwargs or {}))

    def counts(self) -> Counts:
        return {key: (self._bytes[key], self._calls[key]) for key in self._bytes}

    def _count(self, operator: str, args: Any) -> None:
        if operator == "send":
            return
        group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
        ranks = tuple(dist.get_process_group_ranks(group))
        sides = [_tensors(side) for side in args[:2]]
        # Statistics are float64, objects bytes, numbers of tokens integers.
        is_counted = {t.dtype for side in sides for t in side} <= {torch.float32, torch.bfloat16}
        sizes = [sum(t.nbytes for t in side) for side in sides]
        size = sizes[1] if operator == "alltoall_base_" else max(sizes)
        if len(ranks) > 1 and is_counted and size > _SMALL:
            key = (_KINDS[operator], () if operator == "recv_" else ranks)
            self._bytes[key] += size
            self._calls[key] += 1


def _tensors(found: Any) -> list[torch.Tensor]:
    """Return a tensor, or the tensors of nested lists, as a list."""
    if isinstance(found, torch.Tensor):
        return [found]
    return [t for part in found for t in _tensors(part)] if isinstance(found, list | tuple) else []


def recorded(
    checkpoint: str,
    role: Role,
    mesh: dict[str, int],
    micro_batches: int,
    trains: Sequence[bool],
    **megatron: Any,
) -> list[Counts]:
    """Return the collectives of passes of one engine on this rank: of an optimizer step where
    `trains` has True, of a pass without gradients where it has False. Each replica has
    `micro_batches` micro-batches of one sequence."""
    with mesh_groups(**{"tp": 1, "pp": 1, **mesh}) as groups:
        engine = make_engine(checkpoint, role, groups, **megatron)
        replicas = groups.mesh.dp
        batch = token_batch(
            250, [PROMPT] * micro_batches * replicas, [RESPONSE] * micro_batches * replicas
        )
        plan = [[start] for start in range(groups.coordinate.dp, batch.num_sequences, replicas)]
        head = log_prob_head(engine.shape.vocab_size, 1.0) if role == "actor" else value_head
        zeros = batch.rollout_log_probs
        batch = replace(
            batch,
            advantages=zeros + 1,
            old_log_probs=zeros,
            ref_log_probs=zeros,
            values=zeros,
            returns=zeros + 1,
        )
        counts = []
        for is_step in trains:
            if is_step:
                engine.make_trainable(OptimConfig(), 1)
            with Recorder() as recorder:
                if is_step:
                    engine.train_step(batch, plan, objective(engine, batch, "token-mean"))
                else:
                    engine.score(batch, plan, head)
            counts.append(recorder.counts())
        return counts


def saved(
    checkpoint: str, role: Role, mesh: dict[str, int], freeze: Sequence[str], **megatron: Any
) -> dict[str, int]:
    """Save a trained model with Adam's moments, offloaded afterwards. Return the bytes of this
    rank's files by what they hold, and of its arenas."""
    with mesh_groups(**{"tp": 1, "pp": 1, **mesh}) as groups, shared_directory() as root:
        engine = make_engine(
            checkpoint, role, groups, param_offload=True, optimizer_offload=True, **megatron
        )
        layouts = engine_layouts(engine)
        frozen = frozen_tensors("freeze", freeze, engine.shape)
        engine.make_trainable(OptimConfig(), 1, frozen_parameters(frozen, layouts[groups.rank]))
        engine.load_progress({"optimizer_steps": 1, "schedule_steps": 1})
        model = TrainedModel(engine, layouts)
        buffers = HostBuffers()
        save = Save(root, 1, [model], {}, {}, {}, "", buffers)
        save.commit()
        files = [
            path
            for path in directory.final_path(root, 1).iterdir()
            if path.name.startswith(f"__{groups.rank}_")
        ]
        blocks = [block for block in model_blocks(model) if block.is_writer]
        engine.offload.offload_all_but(())
        arenas = {name: group._host.num_bytes for name, group in engine.offload._groups.items()}
        return {
            "tensors": num_bytes(blocks),
            "blocks": len(blocks),
            "files": sum(path.stat().st_size for path in files),
            "asynchronous save": buffers._arena.num_bytes,
            **arenas,
        }


def measured_saves() -> dict[tuple[str, str], tuple[float, int]]:
    """Run benchmarks/gpu/save.py with a small model. Return its seconds and bytes by variant."""
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
    import save

    with shared_directory() as root:
        roles = save.make_roles(128, 1, "bfloat16", 512)
        save.print_bounds(roles)
        return save.measure_variants(roles, root, 1)


def moved(checkpoint: str, mesh: dict[str, int], rollout_tp: int, **megatron: Any) -> int:
    """Return the bytes that arrive at this rank in messages of one weight update, from bfloat16
    weights."""
    with mesh_groups(**{"tp": 1, "pp": 1, **mesh}) as groups:
        engine = make_engine(checkpoint, "actor", groups, dtype="bfloat16", **megatron)
        engines = rollout_groups(groups.mesh, rollout_tp, 2)
        target = rollout_layouts(engine.shape, engines, vllm_layout)
        plan = make_plan(engine_layouts(engine), target, 2, 1 << 20, 2).for_rank(groups.rank)
        tensors = {
            n: torch.empty(size, dtype=torch.bfloat16)
            for n, size in target[groups.rank].shapes.items()
        }
        with Recorder() as recorder:
            execute(plan, engine.params, tensors, PointToPoint(dist.group.WORLD))
        return recorder.counts().get(("receive", ()), (0, 0))[0]
