"""Rank arithmetic: Megatron-Core's order of ranks, and the rollout groups that reuse the training
layout."""

from __future__ import annotations

from fractions import Fraction

import pytest
from megatron.core.parallel_state import RankGenerator

from rlhf_mc.topology.groups import _group_ranks
from rlhf_mc.topology.mesh import Coordinate, Mesh, rollout_groups


def test_rank_order_is_tp_then_dp_then_pp() -> None:
    mesh = Mesh(world=8, tp=2, pp=2)
    assert mesh.dp == 2
    assert [mesh.coordinate(rank) for rank in (0, 1, 2, 4, 7)] == [
        Coordinate(tp=0, dp=0, pp=0),
        Coordinate(tp=1, dp=0, pp=0),
        Coordinate(tp=0, dp=1, pp=0),
        Coordinate(tp=0, dp=0, pp=1),
        Coordinate(tp=1, dp=1, pp=1),
    ]
    assert [list(*mesh.chunk_layers(6, pp)) for pp in (0, 1)] == [[0, 1, 2], [3, 4, 5]]


def test_smaller_rollout_tp_takes_ranks_at_a_stride() -> None:
    # TP 4 to TP 2: rank 1 holds quarter 1, part of half 0, so it is the first of its engine.
    assert rollout_groups(Mesh(world=8, tp=4, pp=1), 2) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert rollout_groups(Mesh(world=4, tp=4, pp=1), 4) == [[0, 1, 2, 3]]


def test_larger_rollout_tp_takes_neighbours_in_shard_order() -> None:
    assert rollout_groups(Mesh(world=4, tp=1, pp=2), 2) == [[0, 1], [2, 3]]
    # Ranks 0 and 2 hold the first half, so they take its quarters.
    assert rollout_groups(Mesh(world=4, tp=2, pp=1), 4) == [[0, 2, 1, 3]]


def test_smaller_shard_of_a_rank_is_part_of_its_larger_one() -> None:
    for tp, rollout_tp in ((2, 1), (4, 2), (8, 2), (8, 4), (4, 8), (2, 8), (1, 4), (2, 16)):
        mesh = Mesh(world=16, tp=tp, pp=1)
        groups = rollout_groups(mesh, rollout_tp)
        assert sorted(rank for group in groups for rank in group) == list(range(16))
        for group in groups:
            for part, rank in enumerate(group):
                ends = [
                    Fraction(s + at, n)
                    for s, n in ((mesh.coordinate(rank).tp, tp), (part, rollout_tp))
                    for at in (0, 1)
                ]
                inside = (ends[2] <= ends[0] and ends[1] <= ends[3]) or (
                    ends[0] <= ends[2] and ends[3] <= ends[1]
                )
                assert inside, (tp, rollout_tp, group)


def test_uneven_stages() -> None:
    def sizes(
        num_layers: int, pp: int, first: int | None = None, last: int | None = None
    ) -> list[int] | None:
        return Mesh(pp, 1, pp, first_stage_layers=first, last_stage_layers=last).stage_sizes(
            num_layers
        )

    assert sizes(12, 3) == [4, 4, 4]
    assert sizes(12, 3, first=2) == [2, 5, 5]
    assert sizes(12, 3, last=2) == [5, 5, 2]
    assert sizes(12, 4, first=3, last=1) == [3, 4, 4, 1]
    assert sizes(5, 2, first=3, last=2) == [3, 2]
    assert (
        sizes(5, 2)
        is sizes(5, 2, first=3, last=3)
        is sizes(4, 3, first=4)
        is sizes(6, 3, first=1)
        is None
    )
    mesh = Mesh(world=4, tp=1, pp=4, first_stage_layers=3, last_stage_layers=1)
    assert [list(*mesh.chunk_layers(8, pp)) for pp in range(4)] == [[0, 1, 2], [3, 4], [5, 6], [7]]


def test_virtual_pipeline_chunks_interleave_layers() -> None:
    mesh = Mesh(world=2, tp=1, pp=2, vpp=2)
    assert [[list(chunk) for chunk in mesh.chunk_layers(8, pp)] for pp in range(2)] == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
    ]
    assert Mesh(world=2, tp=1, pp=2).chunk_layers(8, 1) == [range(4, 8)]
    assert mesh.stage_sizes(8) == [4, 4]
    assert mesh.stage_sizes(6) is None


def test_expert_parallel_ranks_are_neighbouring_replicas() -> None:
    mesh = Mesh(world=8, tp=2, pp=1, ep=2)
    assert [mesh.coordinate(rank).ep for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("world", "tp", "pp", "ep", "cp"),
    [
        (1, 1, 1, 1, 1), (4, 2, 2, 1, 1), (8, 2, 2, 1, 1), (8, 2, 1, 2, 1), (16, 2, 2, 2, 1),
        (16, 1, 2, 4, 1),
        (24, 2, 3, 2, 1), (16, 2, 2, 1, 2), (32, 2, 2, 2, 4), (32, 2, 2, 4, 2), (24, 2, 1, 6, 4),
        (48, 2, 2, 2, 3),
    ],
)  # fmt: skip
def test_groups_match_megatron_core(world: int, tp: int, pp: int, ep: int, cp: int) -> None:
    """Compare with RankGenerator, from which initialize_model_parallel builds its groups."""
    mesh = Mesh(world, tp, pp, ep, cp=cp)
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=tp, ep=1, dp=mesh.dp, pp=pp, cp=cp, order=order)
    experts = RankGenerator(tp=tp, ep=ep, dp=mesh.replicas // ep, pp=pp, cp=1, order=order)
    of_dense = {
        **{name: name for name in ("tp", "pp", "dp", "cp")},
        **{"mp": "tp-pp", "tp_cp": "tp-cp", "dp_cp": "dp-cp", "tp_dp_cp": "tp-dp-cp"},
    }
    of_experts = {"ep": "ep", "expt_tp": "tp", "expt_dp": "dp"}
    of_experts |= {"tp_ep": "tp-ep", "tp_ep_pp": "tp-ep-pp"}
    found = _group_ranks(mesh)
    for generator, names in ((dense, of_dense), (experts, of_experts)):
        for name, token in names.items():
            assert sorted(found.pop(name)) == sorted(generator.get_ranks(token)), name
    assert found.pop("intra_dist_opt") == [list(range(world))]
    ends = [[stages[0], stages[-1]] if pp > 1 else stages for stages in dense.get_ranks("pp")]
    assert sorted(found.pop("embd")) == sorted(ends)
    assert sorted(found.pop("pos_embd")) == sorted([stage[0]] for stage in dense.get_ranks("pp"))
    # of the ranks of a micro-batch
    assert not {name for name in found if not name.startswith("cp_")}
