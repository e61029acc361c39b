"""Rollout groups: no other grouping receives fewer bytes, by the plan's own count; an engine that
fits in a node does not leave it."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
from simulated_ranks import make_shape

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.reshard.layout import EMPTY
from rlhf_mc.reshard.placement import rollout_layouts, training_layouts
from rlhf_mc.reshard.plan import make_plan
from rlhf_mc.rollout.vllm_layout import vllm_layout
from rlhf_mc.topology.mesh import Mesh, rollout_groups

NODE = 8


def received(shape: ModelShape, mesh: Mesh, groups: list[list[int]]) -> int:
    return sum(
        make_plan(
            training_layouts(shape, mesh), rollout_layouts(shape, groups, vllm_layout), 2, 1 << 30
        ).received_bytes
    )


def fewest_bytes(shape: ModelShape, mesh: Mesh, rollout_tp: int) -> int:
    """Return the fewest received bytes over all assignments of ranks to rollout TP ranks, each of
    which is assigned equally often.
    """
    training = training_layouts(shape, mesh)
    # Bytes that each rank receives as each rollout TP rank, by plans in which all ranks have the
    # same TP rank.
    costs = [
        make_plan(
            training, [vllm_layout(shape, t, rollout_tp)] * mesh.world, 2, 1 << 30
        ).received_bytes
        for t in range(rollout_tp)
    ]

    @functools.cache
    def best(rank: int, left: tuple[int, ...]) -> int:
        if rank == mesh.world:
            return 0
        return min(
            costs[t][rank] + best(rank + 1, (*left[:t], left[t] - 1, *left[t + 1 :]))
            for t in range(rollout_tp)
            if left[t]
        )

    return best(0, (mesh.world // rollout_tp,) * rollout_tp)


@pytest.mark.parametrize(
    ("world", "tp", "pp", "rollout_tp", "cp"),
    [
        (8, 4, 1, 2, 1),
        (8, 2, 2, 4, 1),
        (8, 2, 1, 8, 1),
        (4, 1, 2, 2, 1),
        (8, 4, 1, 2, 2),
        (8, 2, 1, 8, 4),
        (8, 1, 2, 2, 2),
    ],
)
def test_no_other_grouping_receives_fewer_bytes(
    world: int, tp: int, pp: int, rollout_tp: int, cp: int
) -> None:
    shape = make_shape(num_layers=2, num_heads=8, num_kv_heads=8, vocab_size=128)
    mesh = Mesh(world, tp, pp, cp=cp)
    groups = rollout_groups(mesh, rollout_tp, NODE)
    assert received(shape, mesh, groups) == fewest_bytes(shape, mesh, rollout_tp)


def test_an_engine_that_fits_in_a_node_does_not_leave_it() -> None:
    """Training TP 16 over two nodes of 8, rollout TP 8: at a stride of 2 each engine would be on
    both nodes."""
    mesh = Mesh(32, 16, 1)
    groups = rollout_groups(mesh, 8, NODE)
    assert sorted(itertools.chain(*groups)) == list(range(32))
    assert all(len({rank // NODE for rank in group}) == 1 for group in groups), groups
    # A node has training shards of half of the rollout shards: 4 ranks have theirs, and the other 4
    # receive all.
    local = [
        rank for group in groups for tp_rank, rank in enumerate(group) if rank % 16 // 2 == tp_rank
    ]
    assert len(local) == 16
    at_stride = rollout_groups(mesh, 8, ranks_per_node=16)
    assert at_stride[0] == list(range(0, 16, 2))


@pytest.mark.parametrize("ranks_per_node", [2, 4, 8])
def test_engines_span_no_more_nodes_than_consecutive_ranks(ranks_per_node: int) -> None:
    def num_nodes(groups: list[list[int]]) -> int:
        return sum(len({rank // ranks_per_node for rank in group}) for group in groups)

    for tp, rollout_tp in itertools.product((1, 2, 4, 8, 16), repeat=2):
        groups = rollout_groups(Mesh(32, tp, 1), rollout_tp, ranks_per_node)
        consecutive = [list(range(start, start + rollout_tp)) for start in range(0, 32, rollout_tp)]
        assert num_nodes(groups) == num_nodes(consecutive), (tp, rollout_tp)


@pytest.mark.parametrize(
    ("num_training", "num_rollout", "tp", "pp", "rollout_tp"),
    [(2, 2, 1, 1, 1), (4, 2, 2, 2, 1), (2, 8, 1, 1, 4), (8, 4, 2, 1, 2), (4, 4, 4, 1, 2)],
)
def test_between_pools_an_engines_rank_receives_its_shard_once(
    num_training: int, num_rollout: int, tp: int, pp: int, rollout_tp: int
) -> None:
    """Check too that no rank copies or shares, and that replicas send equally much. The ranks of
    the rollout pool, which are on one node, get a block that several of them need once."""
    shape = make_shape(num_layers=2, num_heads=8, num_kv_heads=8, hidden_size=1024, head_dim=128)
    engines = rollout_groups(Mesh(num_training, 1, 1), rollout_tp, pool=num_rollout)
    assert sorted(itertools.chain(*engines)) == list(
        range(num_training, num_training + num_rollout)
    )
    assert {len(ranks) for ranks in engines} == {rollout_tp}
    source = [*training_layouts(shape, Mesh(num_training, tp, pp)), *[EMPTY] * num_rollout]
    target = rollout_layouts(shape, engines, vllm_layout)
    assert target[:num_training] == [EMPTY] * num_training
    plan = make_plan(source, target, 2, 1 << 30, ranks_per_node=num_training, share=True)
    shards = [
        2 * sum(math.prod(b - a for a, b in shard.box) for shard in layout.shards)
        for layout in target
    ]
    assert list(plan.received_bytes) == shards and sum(shards) > 0
    assert not any(plan.shared_bytes) and not any(plan.copied_bytes)
    sent = plan.sent_bytes[:num_training]
    assert max(sent) < 1.2 * min(sent) and plan.sender_imbalance < 1.2
