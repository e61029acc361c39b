"""Functions that the ranks run in test_reshard_ranks.py: plans on plain tensors, between
processes."""

from __future__ import annotations

import functools
import math
import resource
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard.execute import execute
from rlhf_mc.reshard.layout import EMPTY, Layout, logical_shapes, whole_layout
from rlhf_mc.reshard.placement import rollout_layouts, training_layouts
from rlhf_mc.reshard.plan import make_plan
from rlhf_mc.reshard.shared_memory import SharedMemory, host_transport
from rlhf_mc.reshard.transport import PointToPoint, Transport
from rlhf_mc.reshard.verify import verify
from rlhf_mc.rollout.vllm_layout import vllm_layout
from rlhf_mc.topology.mesh import Mesh, rollout_groups

SHAPE = ModelShape.from_hf_config(
    {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    }
)


def numbered_tensors(layout: Layout) -> dict[str, torch.Tensor]:
    """Return the layout's tensors. Each element is the number of its logical element; padding is
    -1."""
    starts = {}
    start = 0
    for name, size in logical_shapes(SHAPE).items():
        starts[name] = start
        start += math.prod(size)
    out = {name: torch.full(size, -1.0) for name, size in layout.shapes.items()}
    for shard in layout.shards:
        size = logical_shapes(SHAPE)[shard.tensor]
        full = torch.arange(starts[shard.tensor], starts[shard.tensor] + math.prod(size)).view(size)
        there = tuple(
            slice(o, o + b - a) for o, (a, b) in zip(shard.offset, shard.box, strict=True)
        )
        out[shard.local][there] = full[tuple(slice(a, b) for a, b in shard.box)].float()
    return out


def update_weights(
    kind: str,
    tp: int,
    pp: int,
    first_layers: int | None,
    rollout_tp: int,
    bucket: int,
    ranks_per_node: int,
) -> tuple[bool, int]:
    """Run one weight update through shared memory ("shared"), through sockets ("sockets"), or
    through sockets because the last rank cannot open the others' memory ("refused") or allocate its
    own ("limited"). With "late" the last rank reads what shared memory has long after the others.
    Return whether the rank has exactly the expected tensors, and the number of ranks that share
    memory.
    """
    rank = dist.get_rank()
    world = dist.get_world_size()
    mesh = Mesh(world, tp, pp, first_stage_layers=first_layers)
    training = training_layouts(SHAPE, mesh)
    rollout = rollout_layouts(SHAPE, rollout_groups(mesh, rollout_tp), vllm_layout)
    part = make_plan(training, rollout, 4, bucket, ranks_per_node).for_rank(rank)
    transport: Transport = PointToPoint(dist.group.WORLD)
    if kind != "sockets":
        is_last = rank == world - 1
        opener = (
            (lambda self, *args: False) if kind == "refused" and is_last else SharedMemory._open
        )
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (1 if kind == "limited" and is_last else soft, hard)
        )
        try:
            with mock.patch.object(SharedMemory, "_open", opener):
                transport = host_transport(part.outbox_bytes, dist.group.WORLD)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if kind == "late" and rank == world - 1:
        transport.exchange = functools.partial(_exchange_late, transport.exchange)
    source = numbered_tensors(training[rank])
    wanted = numbered_tensors(rollout[rank])
    target = {name: torch.full(size, -1.0) for name, size in rollout[rank].shapes.items()}
    for _ in range(2):  # the second reuses the shared memory
        for tensor in target.values():
            tensor.fill_(-1.0)
        execute(part, source, target, transport)
        verify(part, source, target, dist.group.WORLD)
    sharing = len(transport.ranks) if isinstance(transport, SharedMemory) else 0
    return all(torch.equal(target[name], wanted[name]) for name in wanted), sharing


def lose_an_alias() -> str:
    """Verify a plan in which rank 0's tensor is its source and rank 1 has a copy, after rank 0 has
    made a copy too. Return the error."""
    rank = dist.get_rank()
    whole = whole_layout({"w": (4, 2)})
    plan = make_plan([whole, EMPTY], [whole, whole], 4, 1000, share=True).for_rank(rank)
    tensor = torch.arange(8.0).view(4, 2)
    with pytest.raises(UserError) as caught:
        verify(plan, {"w": tensor} if rank == 0 else {}, {"w": tensor.clone()}, dist.group.WORLD)
    return str(caught.value)


def _exchange_late(exchange: Any, *arguments: Any) -> Any:
    incoming = exchange(*arguments)
    time.sleep(0.1)
    return incoming
