"""Plans are exact, minimal and balanced, and fill their buckets."""

from __future__ import annotations

import pytest
from families import traits
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_ranks import (
    SimulatedMesh,
    can_split,
    check_movement,
    elements,
    expected_vllm,
    make_shape,
    numbered,
)

from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard.layout import EMPTY, Layout, hf_layout, mcore_layout, whole_layout
from rlhf_mc.reshard.plan import MIN_SLICE_BYTES, make_plan
from rlhf_mc.rollout.vllm_layout import vllm_layout


@st.composite
def meshes(draw, value_heads: tuple[bool, ...] = (False,)) -> SimulatedMesh:
    num_layers = draw(st.integers(1, 3))
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    head_dim = draw(st.sampled_from([1, 2]))
    flags = {f: draw(st.booleans()) for f in ("tie_embeddings", "qkv_bias", "o_bias", "mlp_bias")}
    shape = make_shape(
        num_layers=num_layers,
        hidden_size=draw(st.integers(1, 3)),
        ffn_hidden_size=8,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=draw(st.integers(1, 140)),
        value_head=draw(st.sampled_from(value_heads)),
        **flags,
    )
    bounds = (
        sorted(draw(st.sets(st.integers(1, num_layers - 1), max_size=2))) if num_layers > 1 else []
    )
    stages = [range(a, b) for a, b in zip([0, *bounds], [*bounds, num_layers], strict=True)]
    tp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if can_split(shape, n)]))
    return SimulatedMesh(shape, tp, draw(st.sampled_from([1, 2, 3, 4])), stages)


def rollout_ranks(mesh: SimulatedMesh, draw) -> list[tuple[int, int]]:
    """Return (tp_rank, tp_size) of each rank, for groups of arbitrary ranks: at a stride or across
    stages too."""
    sizes = [
        n for n in (1, 2, 4, 8) if mesh.world % n == 0 and traits(mesh.shape).num_heads % n == 0
    ]
    tp = draw(st.sampled_from(sizes))
    return [(t, tp) for t in draw(st.permutations([r % tp for r in range(mesh.world)]))]


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_training_to_rollout_is_exact_and_minimal(data) -> None:
    mesh = data.draw(meshes())
    ranks = rollout_ranks(mesh, data.draw)
    target = [vllm_layout(mesh.shape, *r) for r in ranks]
    bucket_bytes = data.draw(st.sampled_from([100, 1000, 1 << 20]))
    nodes = data.draw(st.sampled_from([1, 2, 3, 8]))
    share = data.draw(st.booleans())
    plan = make_plan(mesh.layouts(), target, 8, bucket_bytes, nodes, share)
    if not share:
        assert not any(plan.shared_bytes)
    wanted = [expected_vllm(mesh.shape, *r) for r in ranks]
    check_movement(plan, mesh.expected(), wanted, target, bucket_bytes)
    # Between nodes: a node as a whole receives what it needs and lacks, once.
    for first in range(0, mesh.world, nodes):
        node = range(first, min(first + nodes, mesh.world))
        have = set().union(*(elements(mesh.expected()[r]) for r in node))
        missing = set().union(*(elements(wanted[r]) for r in node)) - have
        assert sum(plan.received_from_other_nodes[r] for r in node) == plan.itemsize * len(missing)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_import_and_export_are_exact(data) -> None:
    mesh = data.draw(meshes((False, True)))
    whole = numbered(mesh.shape)
    file = [hf_layout(mesh.shape)] + [EMPTY] * (mesh.world - 1)
    content = [whole] + [{}] * (mesh.world - 1)
    check_movement(
        make_plan(file, mesh.layouts(), 8, 4096), content, mesh.expected(), mesh.layouts(), 4096
    )
    check_movement(make_plan(mesh.layouts(), file, 8, 4096), mesh.expected(), content, file, 4096)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_plans_between_training_layouts_are_exact(data) -> None:
    mesh = data.draw(meshes((False, True)))
    layers = range(mesh.shape.num_layers)
    tp = data.draw(
        st.sampled_from(
            [n for n in (1, 2, 4, 8) if mesh.world % n == 0 and can_split(mesh.shape, n)]
        )
    )
    other = SimulatedMesh(mesh.shape, tp, mesh.world // tp, [layers])
    plan = make_plan(mesh.layouts(), other.layouts(), 8, 2048)
    check_movement(plan, mesh.expected(), other.expected(), other.layouts(), 2048)


def test_heads_of_all_groups_are_one_strided_transfer() -> None:
    """Check that q, k and v of a layer are three transfers for any number of KV groups."""
    shape = make_shape(num_layers=1, num_heads=32, num_kv_heads=16, qkv_bias=False)
    plan = make_plan(
        [mcore_layout(shape, 0, 1, range(1), True, True)], [vllm_layout(shape, 0, 1)], 4, 1 << 20
    )
    qkv = [t for t in plan.for_rank(0).copies if "qkv" in t.dst_local]
    assert sorted((t.count, t.extent[0], t.src_step, t.dst_step) for t in qkv) == [
        (16, 2, 8, 2), (16, 2, 8, 2), (16, 4, 8, 4)
    ]  # fmt: skip


def test_equal_layouts_send_nothing() -> None:
    mesh = SimulatedMesh(make_shape(), tp=2, dp=2, stages=[range(3)])
    plan = make_plan(
        mesh.layouts(), [vllm_layout(mesh.shape, r % 2, 2) for r in range(4)], 4, 1 << 20
    )
    assert plan.received_bytes == plan.sent_bytes == (0,) * 4 and plan.buckets == ()
    assert all(plan.copied_bytes)


@pytest.mark.parametrize(
    "tp, stages, dp, rollout_tp",
    [(4, 1, 4, 2), (2, 1, 4, 4), (2, 2, 2, 2), (1, 2, 3, 2), (2, 1, 6, 4)],
)
def test_senders_of_a_block_are_balanced(tp: int, stages: int, dp: int, rollout_tp: int) -> None:
    """Plan one parameter that all stages have: all ranks send equally many bytes."""
    shape = make_shape(num_layers=2, num_heads=4, num_kv_heads=4, hidden_size=1024, head_dim=128)
    per_stage = 2 // stages
    mesh = SimulatedMesh(
        shape, tp, dp, [range(p * per_stage, (p + 1) * per_stage) for p in range(stages)]
    )

    def only_o_proj(layout: Layout) -> Layout:
        return Layout(layout.shapes, tuple(p for p in layout.shards if "o_proj" in p.tensor))

    source = {id(x): only_o_proj(x) for x in mesh.layouts()}
    stride = max(1, tp // rollout_tp)
    rollout = [
        vllm_layout(shape, rank // stride % rollout_tp, rollout_tp) for rank in range(mesh.world)
    ]
    target = {id(x): only_o_proj(x) for x in rollout}
    assert 1024 * 128 * 4 // dp >= MIN_SLICE_BYTES
    plan = make_plan(
        [source[id(x)] for x in mesh.layouts()], [target[id(x)] for x in rollout], 4, 1 << 30, 64
    )
    assert sum(plan.sent_bytes) > 0
    assert max(plan.sent_bytes) * mesh.world <= 1.05 * sum(plan.sent_bytes), plan.sent_bytes


def test_senders_on_the_same_node_come_first() -> None:
    """Ranks 0 and 4 hold a tensor that all six ranks need. On one node they alternate. On two nodes
    each sends within its node."""
    whole = whole_layout({"w": (4, 2)})
    source = [whole, EMPTY, EMPTY, EMPTY, whole, EMPTY]
    for ranks_per_node, senders in [
        (3, {1: 0, 2: 0, 3: 4, 5: 4}),
        (6, {1: 0, 2: 4, 3: 0, 5: 4}),
        (1, {1: 0, 2: 4, 3: 0, 5: 4}),
    ]:
        plan = make_plan(source, [whole] * 6, 4, 1 << 20, ranks_per_node)
        assert {
            r: t.src_rank for r in range(6) for _, got in plan.for_rank(r).buckets for t in got
        } == senders
        other_node = {r for r in senders if senders[r] // ranks_per_node != r // ranks_per_node}
        assert plan.received_from_other_nodes == tuple(32 * (r in other_node) for r in range(6))
        assert plan.source_ranks == (0, 4) and plan.sender_imbalance == 1.0


def test_node_receives_a_block_once_and_its_ranks_forward_it() -> None:
    """Plan for two nodes of four ranks with one stage each. Every rank lacks half of the model,
    which a node receives once, a quarter per rank.
    """
    shape = make_shape(
        num_layers=2, hidden_size=512, ffn_hidden_size=1024, head_dim=128, qkv_bias=False
    )
    mesh = SimulatedMesh(shape, tp=1, dp=4, stages=[range(1), range(1, 2)])
    layer = Layout(
        {},
        tuple(
            p
            for p in vllm_layout(shape, 0, 1).shards
            if ".layers." in p.tensor and "norm" not in p.local
        ),
    )
    plan = make_plan(mesh.layouts(), [layer] * 8, 4, 1 << 20, ranks_per_node=4)
    half = plan.received_bytes[0]
    assert plan.received_bytes == (half,) * 8 and plan.received_from_other_nodes == (half // 4,) * 8
    assert plan.sender_imbalance == 1.0
    for rank in range(8):
        part = plan.for_rank(rank)
        assert any(t.forwarded for sends, _ in part.buckets for t in sends)
        arrived: set[str] = set()
        for sends, receives in part.buckets:
            assert all(t.src_local in arrived for t in sends if t.forwarded), (
                "received before it is forwarded"
            )
            arrived |= {t.dst_local for t in receives}


def test_all_stages_send_in_every_large_bucket() -> None:
    shape = make_shape(num_layers=8, hidden_size=64, ffn_hidden_size=256)
    mesh = SimulatedMesh(shape, tp=1, dp=1, stages=[range(0, 4), range(4, 8)])
    plan = make_plan(mesh.layouts(), [vllm_layout(shape, 0, 1)] * 2, 4, 64 * 256 * 4)
    both = [
        all(plan.for_rank(rank).buckets[n][0] for rank in (0, 1)) for n in range(len(plan.buckets))
    ]
    assert sum(both) >= 0.8 * len(both), both


def test_error_names_a_tensor_that_the_source_lacks() -> None:
    shape = make_shape()
    whole = hf_layout(shape)
    with pytest.raises(
        UserError, match=r"model\.norm\.weight: rank 0 needs \[0:8\].*nothing of it"
    ):
        make_plan([whole.without({"model.norm.weight"})], [whole], 4, 100)
    with pytest.raises(
        UserError,
        match=r"w: rank 0 needs \[0:4, 0:2\] of it for w, and the source has \[0:3, 0:2\]",
    ):
        make_plan([whole_layout({"w": (3, 2)})], [whole_layout({"w": (4, 2)})], 4, 100)


def test_bucket_of_one_byte_moves_single_rows() -> None:
    mesh = SimulatedMesh(make_shape(num_layers=1), tp=2, dp=1, stages=[range(1)])
    target = [vllm_layout(mesh.shape, 0, 1)] * 2
    plan = make_plan(mesh.layouts(), target, 8, 1)
    assert all(t.extent[0] == 1 for _, receives in plan.for_rank(0).buckets for t in receives)
    check_movement(plan, mesh.expected(), [expected_vllm(mesh.shape, 0, 1)] * 2, target, 1)


def test_a_bucket_has_parts_of_later_layers_where_ranks_have_room() -> None:
    """Plan for two stages that send one large tensor each, the first in its first layer, the second
    in its last."""
    sizes = [{"a": (30, 8), "b": (2, 8), "c": (2, 8)}, {"d": (2, 8), "e": (2, 8), "f": (30, 8)}]
    source = [whole_layout(size) for size in sizes]
    plan = make_plan(source, source[::-1], 4, 30 * 8 * 4)
    sent = [
        [sum(t.numel for t in sends) for sends, _ in plan.for_rank(rank).buckets] for rank in (0, 1)
    ]
    assert sent == [[240, 32], [32, 240]]
    assert plan.bucket_maxima() == [(4 * 240, 0), (4 * 240, 0)]
    assert (
        make_plan(source, source[::-1], 4, 30 * 8 * 4, ranks_per_node=1).bucket_maxima()
        == [(0, 4 * 240)] * 2
    )
