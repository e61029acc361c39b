"""Functions that the ranks run in test_reshard_ranks.py: plans on plain tensors, between
processes."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.reshard.execute import execute
from rlhf_mc.reshard.layout import Layout, logical_shapes
from rlhf_mc.reshard.placement import rollout_layouts, training_layouts
from rlhf_mc.reshard.plan import make_plan
from rlhf_mc.reshard.transport import PointToPoint
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
    tp: int,
    pp: int,
    first_layers: int | None,
    rollout_tp: int,
    bucket: int,
    ranks_per_node: int,
) -> bool:
    """Run two weight updates. Return whether the rank has exactly the expected tensors."""
    rank = dist.get_rank()
    mesh = Mesh(dist.get_world_size(), tp, pp, first_stage_layers=first_layers)
    training = training_layouts(SHAPE, mesh)
    rollout = rollout_layouts(SHAPE, rollout_groups(mesh, rollout_tp), vllm_layout)
    part = make_plan(training, rollout, 4, bucket, ranks_per_node).for_rank(rank)
    source = numbered_tensors(training[rank])
    wanted = numbered_tensors(rollout[rank])
    target = {name: torch.full(size, -1.0) for name, size in rollout[rank].shapes.items()}
    for _ in range(2):
        for tensor in target.values():
            tensor.fill_(-1.0)
        execute(part, source, target, PointToPoint(dist.group.WORLD))
        verify(part, source, target, dist.group.WORLD)
    return all(torch.equal(target[name], wanted[name]) for name in wanted)
