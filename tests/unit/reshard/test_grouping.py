"""Rollout groups where neither tensor parallel size divides the other: no other grouping receives
fewer bytes, by the plan's own count and by exhaustive search."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import replace

import pytest
from simulated_ranks import SimulatedMesh, check_movement, expected_vllm, make_shape

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.reshard.grouping import _assignment, choose_rollout_groups
from rlhf_mc.reshard.placement import rollout_layouts, training_layouts
from rlhf_mc.reshard.plan import make_plan
from rlhf_mc.rollout.vllm_layout import vllm_layout
from rlhf_mc.topology.mesh import Mesh, rollout_groups

SIZES = {
    "hidden_size": 4,
    "ffn_hidden_size": 120,
    "num_heads": 60,
    "head_dim": 2,
    "vocab_size": 960,
}
SHAPES = {
    "heads": make_shape(num_layers=6, num_kv_heads=60, **SIZES),
    "grouped heads": make_shape(
        num_layers=6, num_kv_heads=1, tie_embeddings=True, **SIZES | {"head_dim": 60}
    ),
}
"""Shapes whose sizes are divisible by all tensor parallel sizes below."""


def small_meshes() -> list[tuple[Mesh, int]]:
    """Return each mesh of at most 12 ranks with each rollout TP size such that neither TP size
    divides the other."""
    found = []
    for world in range(1, 13):
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        for tp, pp, rollout_tp in itertools.product(divisors, repeat=3):
            if world % (tp * pp) == 0 and 6 % pp == 0 and tp % rollout_tp and rollout_tp % tp:
                found.append((Mesh(world, tp, pp), rollout_tp))
    return found


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


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_rollout_groups_receive_the_fewest_bytes(name: str) -> None:
    shape = SHAPES[name]
    num_better = 0
    meshes = small_meshes()
    assert len(meshes) > 10
    for mesh, rollout_tp in meshes:
        groups = choose_rollout_groups(
            shape, mesh, rollout_tp, vllm_layout, ranks_per_node=mesh.world
        )
        assert sorted(itertools.chain(*groups)) == list(range(mesh.world))
        assert {len(group) for group in groups} == {rollout_tp}
        got, usual = (received(shape, mesh, g) for g in (groups, rollout_groups(mesh, rollout_tp)))
        assert got == fewest_bytes(shape, mesh, rollout_tp), f"{mesh} -> {rollout_tp}: {groups}"
        assert got <= usual
        num_better += got < usual
        if got == usual:
            assert groups == rollout_groups(mesh, rollout_tp)
    assert num_better > 5


@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_node", [3, 4, 8])
def test_rollout_groups_span_no_more_nodes(ranks_per_node: int) -> None:
    def nodes(groups: list[list[int]]) -> int:
        return sum(len({rank // ranks_per_node for rank in group}) for group in groups)

    shape = SHAPES["heads"]
    for mesh, rollout_tp in small_meshes():
        groups = choose_rollout_groups(shape, mesh, rollout_tp, vllm_layout, ranks_per_node)
        usual = rollout_groups(mesh, rollout_tp)
        assert nodes(groups) <= nodes(usual)
        if groups != usual:
            assert received(shape, mesh, groups) < received(shape, mesh, usual)


def test_tp_2_to_rollout_tp_3_on_six_ranks() -> None:
    """Group ranks by halves: the thirds of a tensor lie in its first half, across both, and in its
    second half."""
    shape = SHAPES["heads"]
    mesh = Mesh(world=6, tp=2, pp=1)
    groups = choose_rollout_groups(shape, mesh, 3, vllm_layout)
    assert all(group == sorted(group) for group in groups)
    assert all(rank % 2 == 0 for rank, *_ in groups) and all(group[2] % 2 for group in groups)
    assert received(shape, mesh, rollout_groups(mesh, 3)) == 3 * received(shape, mesh, groups)


def test_plan_from_tp_2_to_rollout_tp_3_is_exact() -> None:
    """Check that each element arrives where it belongs, and that no rank receives what it already
    holds."""
    shape = make_shape(
        num_layers=2, num_heads=6, num_kv_heads=6, ffn_hidden_size=12, vocab_size=190
    )
    training = SimulatedMesh(shape, tp=2, dp=3, stages=[range(2)])
    groups = choose_rollout_groups(shape, Mesh(world=6, tp=2, pp=1), 3, vllm_layout)
    rollout_rank = {rank: n for group in groups for n, rank in enumerate(group)}
    target = rollout_layouts(shape, groups, vllm_layout)
    want = [expected_vllm(shape, rollout_rank[rank], 3) for rank in range(6)]
    check_movement(
        make_plan(training.layouts(), target, 8, 1000), training.expected(), want, target, 1000
    )


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
def test_stride_rule_is_optimal_where_one_size_divides_the_other(
    world: int, tp: int, pp: int, rollout_tp: int, cp: int
) -> None:
    shape = make_shape(num_layers=2, num_heads=8, num_kv_heads=8, vocab_size=128)
    mesh = Mesh(world, tp, pp, cp=cp)
    groups = choose_rollout_groups(shape, mesh, rollout_tp, vllm_layout)
    assert groups == rollout_groups(mesh, rollout_tp)
    assert received(shape, mesh, groups) == fewest_bytes(shape, mesh, rollout_tp)


def test_assignment_has_the_least_sum() -> None:
    draw = random.Random(0)
    for size in (1, 2, 3, 5, 6):
        for _ in range(20):
            cost = [[draw.randrange(-9, 10) for _ in range(size)] for _ in range(size)]
            columns = _assignment(cost)
            assert sorted(columns) == list(range(size))
            sums = [
                sum(cost[r][c] for r, c in enumerate(order))
                for order in itertools.permutations(range(size))
            ]
            assert sum(cost[r][c] for r, c in enumerate(columns)) == min(sums)


def test_an_engine_that_fits_in_a_node_does_not_leave_it() -> None:
    """Training TP 16 over two nodes of 8, rollout TP 8: at a stride of 2 each engine would be on
    both nodes."""
    shape = SHAPES["heads"]
    shape = replace(shape, num_heads=64, num_kv_heads=64, ffn_hidden_size=128, vocab_size=1024)
    mesh = Mesh(32, 16, 1)
    groups = choose_rollout_groups(shape, mesh, 8, vllm_layout, ranks_per_node=8)
    assert sorted(itertools.chain(*groups)) == list(range(32))
    assert all(len({rank // 8 for rank in group}) == 1 for group in groups), groups
    # A node has training shards of half of the rollout shards: 4 ranks keep theirs, and the other 4
    # receive all.
    kept = [
        rank for group in groups for tp_rank, rank in enumerate(group) if rank % 16 // 2 == tp_rank
    ]
    assert len(kept) == 16
    assert choose_rollout_groups(shape, mesh, 8, vllm_layout, ranks_per_node=16) == rollout_groups(
        mesh, 8
    )
