"""Rank arithmetic: Megatron-Core's order of ranks, and the rollout groups that reuse the training layout."""

from __future__ import annotations

from rlhf_mc.topology.mesh import Coordinate, Mesh, rollout_groups


def test_tensor_parallel_neighbours_come_first_then_data_then_pipeline() -> None:
    mesh = Mesh(world=8, tp=2, pp=2)
    assert mesh.dp == 2
    assert [mesh.coordinate(rank) for rank in (0, 1, 2, 4, 7)] == [
        Coordinate(tp=0, dp=0, pp=0),
        Coordinate(tp=1, dp=0, pp=0),
        Coordinate(tp=0, dp=1, pp=0),
        Coordinate(tp=0, dp=0, pp=1),
        Coordinate(tp=1, dp=1, pp=1),
    ]
    assert [list(mesh.stage_layers(6, pp)) for pp in (0, 1)] == [[0, 1, 2], [3, 4, 5]]


def test_a_smaller_engine_takes_ranks_at_a_stride_inside_a_training_group() -> None:
    # TP 4 to TP 2: rank 1 holds quarter 1, part of half 0, so it is the first of its engine.
    assert rollout_groups(Mesh(world=8, tp=4, pp=1), 2) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert rollout_groups(Mesh(world=4, tp=4, pp=1), 4) == [[0, 1, 2, 3]]


def test_a_larger_engine_takes_neighbours() -> None:
    assert rollout_groups(Mesh(world=4, tp=1, pp=2), 2) == [[0, 1], [2, 3]]
    assert rollout_groups(Mesh(world=4, tp=2, pp=1), 4) == [[0, 1, 2, 3]]


def test_every_training_shard_is_part_of_its_ranks_generation_shard() -> None:
    for tp, rollout_tp in ((2, 1), (4, 2), (8, 2), (8, 4)):
        mesh = Mesh(world=16, tp=tp, pp=1)
        for group in rollout_groups(mesh, rollout_tp):
            for part, rank in enumerate(group):
                assert mesh.coordinate(rank).tp * rollout_tp // tp == part
