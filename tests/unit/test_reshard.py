"""Layouts, plans and their execution, in one process: every rank is simulated, packing and unpacking are the real ones.

What the engines hold is computed here from whole tensors by chunk, view and cat, independently of layout.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_mc.architectures.spec import ModelShape, padded_vocab_size
from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard.execute import aliased_views, by_peer, execute, pack, unpack
from rlhf_mc.reshard.layout import (
    EMPTY,
    Layout,
    Shard,
    check_mcore,
    check_vllm,
    hf_layout,
    logical_shapes,
    mcore_layout,
    vllm_layout,
    whole_layout,
)
from rlhf_mc.reshard.plan import MIN_SLICE_BYTES, Plan, make_plan
from rlhf_mc.reshard.transport import Local

PADDING = -1


def make_shape(**changes) -> ModelShape:
    sizes = {
        "family": "llama",
        "num_layers": 3,
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 2,
        "vocab_size": 70,
        "tie_embeddings": False,
        "qkv_bias": True,
        "norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 64,
    }
    return ModelShape(**(sizes | changes))


def numbered(shape: ModelShape) -> dict[str, torch.Tensor]:
    """Logical tensors whose every element is a number of its own."""
    tensors, start = {}, 0
    for name, size in logical_shapes(shape).items():
        numel = math.prod(size)
        tensors[name] = torch.arange(start, start + numel).view(size)
        start += numel
    return tensors


def padded_chunk(weight: torch.Tensor, rows: int, tp_rank: int, tp_size: int) -> torch.Tensor:
    padding = torch.full((rows - weight.shape[0], weight.shape[1]), PADDING)
    return torch.cat([weight, padding]).chunk(tp_size)[tp_rank]


def expected_mcore(shape: ModelShape, t: int, tp: int, layers: range, first: bool, last: bool) -> dict:
    """What the Megatron rank holds: per KV group [q heads, k, v]; [gate; up]; rows of the padded vocabulary."""
    full, out = numbered(shape), {}
    rows = padded_vocab_size(shape.vocab_size, tp)
    if first:
        out["embedding.word_embeddings.weight"] = padded_chunk(full["model.embed_tokens.weight"], rows, t, tp)
    for local, i in enumerate(layers):
        hf, mc = f"model.layers.{i}.", f"decoder.layers.{local}."
        out[mc + "input_layernorm.weight"] = full[hf + "input_layernorm.weight"]
        out[mc + "pre_mlp_layernorm.weight"] = full[hf + "post_attention_layernorm.weight"]
        for kind in ["weight"] + ["bias"] * shape.qkv_bias:
            grouped = [
                full[f"{hf}self_attn.{x}_proj.{kind}"].reshape(shape.num_kv_heads, -1, *rest)
                for x in "qkv"
                for rest in [(shape.hidden_size,) if kind == "weight" else ()]
            ]
            out[f"{mc}self_attention.linear_qkv.{kind}"] = torch.cat(grouped, dim=1).flatten(0, 1).chunk(tp)[t]
        for kind in ["weight"] + ["bias"] * shape.mlp_bias:
            halves = [full[f"{hf}mlp.{x}_proj.{kind}"].chunk(tp)[t] for x in ("gate", "up")]
            out[f"{mc}mlp.linear_fc1.{kind}"] = torch.cat(halves)
        out[mc + "self_attention.linear_proj.weight"] = full[hf + "self_attn.o_proj.weight"].chunk(tp, dim=1)[t]
        out[mc + "mlp.linear_fc2.weight"] = full[hf + "mlp.down_proj.weight"].chunk(tp, dim=1)[t]
        if shape.o_bias:
            out[mc + "self_attention.linear_proj.bias"] = full[hf + "self_attn.o_proj.bias"]
        if shape.mlp_bias:
            out[mc + "mlp.linear_fc2.bias"] = full[hf + "mlp.down_proj.bias"]
    if last:
        out["decoder.final_layernorm.weight"] = full["model.norm.weight"]
        if shape.value_head:
            out["output_layer.weight"] = full["score.weight"]
        elif not shape.tie_embeddings:
            out["output_layer.weight"] = padded_chunk(full["lm_head.weight"], rows, t, tp)
        elif not first:
            out["output_layer.weight"] = padded_chunk(full["model.embed_tokens.weight"], rows, t, tp)
    return out


def expected_vllm(shape: ModelShape, t: int, tp: int) -> dict:
    """What the vLLM rank holds: [q of its heads; k; v], KV heads repeated where ranks outnumber them."""
    full, out = numbered(shape), {}
    rows = -(-shape.vocab_size // 64) * 64
    out["model.embed_tokens.weight"] = padded_chunk(full["model.embed_tokens.weight"], rows, t, tp)
    repeats = max(1, tp // shape.num_kv_heads)
    for i in range(shape.num_layers):
        hf = f"model.layers.{i}."
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            out[hf + norm] = full[hf + norm]
        for kind in ["weight"] + ["bias"] * shape.qkv_bias:
            q, k, v = (full[f"{hf}self_attn.{x}_proj.{kind}"] for x in "qkv")
            repeated = [
                x.unflatten(0, (-1, shape.head_dim)).repeat_interleave(repeats, 0).flatten(0, 1) for x in (k, v)
            ]
            out[f"{hf}self_attn.qkv_proj.{kind}"] = torch.cat([x.chunk(tp)[t] for x in (q, *repeated)])
        for kind in ["weight"] + ["bias"] * shape.mlp_bias:
            halves = [full[f"{hf}mlp.{x}_proj.{kind}"].chunk(tp)[t] for x in ("gate", "up")]
            out[f"{hf}mlp.gate_up_proj.{kind}"] = torch.cat(halves)
        out[hf + "self_attn.o_proj.weight"] = full[hf + "self_attn.o_proj.weight"].chunk(tp, dim=1)[t]
        out[hf + "mlp.down_proj.weight"] = full[hf + "mlp.down_proj.weight"].chunk(tp, dim=1)[t]
        if shape.o_bias:
            out[hf + "self_attn.o_proj.bias"] = full[hf + "self_attn.o_proj.bias"]
        if shape.mlp_bias:
            out[hf + "mlp.down_proj.bias"] = full[hf + "mlp.down_proj.bias"]
    out["model.norm.weight"] = full["model.norm.weight"]
    if not shape.tie_embeddings:
        out["lm_head.weight"] = padded_chunk(full["lm_head.weight"], rows, t, tp)
    return out


def empty(layout: Layout) -> dict[str, torch.Tensor]:
    return {name: torch.full(size, PADDING) for name, size in layout.shapes.items()}


def run_plan(plan: Plan, sources: list[dict], targets: list[dict]) -> None:
    """Every rank's part, with the exchange of a bucket done by a dict."""
    parts = [plan.for_rank(rank) for rank in range(len(sources))]
    for part, source, target in zip(parts, sources, targets, strict=True):
        target.update(aliased_views(part, source))
        execute(replace(part, buckets=()), source, target, Local())
    for number in range(len(plan.buckets)):
        wires = {}
        for rank, part in enumerate(parts):
            for peer, transfers in by_peer(part.buckets[number][0], lambda t: t.dst_rank).items():
                wires[rank, peer] = torch.empty(sum(t.numel for t in transfers), dtype=torch.int64)
                pack(wires[rank, peer], transfers, sources[rank], targets[rank])
        for rank, part in enumerate(parts):
            for peer, transfers in by_peer(part.buckets[number][1], lambda t: t.src_rank).items():
                unpack(wires.pop((peer, rank)), transfers, targets[rank])
        assert not wires, "something was sent that nobody receives"


@dataclass
class Mesh:
    """A training mesh: tensor-parallel ranks innermost, then data-parallel, then stages of the given layers."""

    shape: ModelShape
    tp: int
    dp: int
    stages: list[range]

    def coordinates(self) -> list[tuple[int, int, range, bool, bool]]:
        last = len(self.stages) - 1
        return [
            (t, self.tp, layers, p == 0, p == last)
            for p, layers in enumerate(self.stages)
            for _ in range(self.dp)
            for t in range(self.tp)
        ]

    @property
    def world(self) -> int:
        return self.tp * self.dp * len(self.stages)

    def layouts(self) -> list[Layout]:
        return [mcore_layout(self.shape, *c) for c in self.coordinates()]

    def expected(self) -> list[dict]:
        return [expected_mcore(self.shape, *c) for c in self.coordinates()]


def can_split(shape: ModelShape, tp: int) -> bool:
    """Return whether Megatron-Core takes this tensor parallel size, of which those here divide the other sizes."""
    rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return shape.num_heads % tp == 0 and rows % tp == 0


@st.composite
def meshes(draw, value_heads: tuple[bool, ...] = (False,)) -> Mesh:
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
    cuts = sorted(draw(st.sets(st.integers(1, num_layers - 1), max_size=2))) if num_layers > 1 else []
    stages = [range(a, b) for a, b in zip([0, *cuts], [*cuts, num_layers], strict=True)]
    tp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if can_split(shape, n)]))
    return Mesh(shape, tp, draw(st.sampled_from([1, 2, 3, 4])), stages)


def rollout_ranks(mesh: Mesh, draw) -> list[tuple[int, int]]:
    """(tp_rank, tp_size) of each rank: groups of any ranks, so also at a stride or across stages."""
    sizes = [n for n in (1, 2, 4, 8) if mesh.world % n == 0 and mesh.shape.num_heads % n == 0]
    tp = draw(st.sampled_from(sizes))
    return [(t, tp) for t in draw(st.permutations([r % tp for r in range(mesh.world)]))]


def elements(tensors: dict) -> set[int]:
    return {n for t in tensors.values() for n in t.flatten().tolist()} - {PADDING}


def check_movement(plan: Plan, have: list[dict], want: list[dict], target: list[Layout], bucket_bytes: int) -> None:
    filled = [empty(layout) for layout in target]
    run_plan(plan, have, filled)
    for rank, (got, wanted) in enumerate(zip(filled, want, strict=True)):
        assert got.keys() == wanted.keys()
        for name in wanted:
            assert torch.equal(got[name], wanted[name]), f"rank {rank}: {name}"
    for rank in range(len(have)):
        part = plan.for_rank(rank)
        # The lower bound: what the rank wants and does not have.
        missing = len(elements(want[rank]) - elements(have[rank]))
        assert part.received_bytes == plan.received_bytes[rank] == plan.itemsize * missing
        assert part.sent_bytes == plan.sent_bytes[rank]
        assert part.copied_bytes == plan.copied_bytes[rank]
        assert part.shared_bytes == plan.shared_bytes[rank]
        assert part.shared_bytes + part.copied_bytes + part.received_bytes == plan.itemsize * len(elements(want[rank]))
        for transfer in (t for _, receives in part.buckets for t in receives):
            assert transfer.src_rank != rank
        for sends, receives in part.buckets:
            for transfers in (sends, receives):
                # Of stacked experts a row is one of one expert.
                one_row = sum(t.count * math.prod(t.extent[max(1, len(t.extent) - 1) :]) for t in transfers)
                size = sum(t.numel for t in transfers)
                assert size * plan.itemsize <= bucket_bytes or size == one_row


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_training_to_rollout_is_exact_and_minimal(data) -> None:
    mesh = data.draw(meshes())
    ranks = rollout_ranks(mesh, data.draw)
    target = [vllm_layout(mesh.shape, *r) for r in ranks]
    bucket_bytes = data.draw(st.sampled_from([100, 1000, 1 << 20]))
    nodes, share = data.draw(st.sampled_from([1, 2, 3, 8])), data.draw(st.booleans())
    plan = make_plan(mesh.layouts(), target, 8, bucket_bytes, nodes, share)
    if not share:
        assert not any(plan.shared_bytes)
    wanted = [expected_vllm(mesh.shape, *r) for r in ranks]
    check_movement(plan, mesh.expected(), wanted, target, bucket_bytes)
    # And what crosses nodes: a node as a whole receives what it wants and lacks, once.
    for first in range(0, mesh.world, nodes):
        node = range(first, min(first + nodes, mesh.world))
        have = set().union(*(elements(mesh.expected()[r]) for r in node))
        missing = set().union(*(elements(wanted[r]) for r in node)) - have
        assert sum(plan.received_from_other_nodes[r] for r in node) == plan.itemsize * len(missing)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_import_and_export_are_exact(data) -> None:
    mesh = data.draw(meshes((False, True)))
    whole = numbered(mesh.shape)
    file = [hf_layout(mesh.shape)] + [EMPTY] * (mesh.world - 1)
    content = [whole] + [{}] * (mesh.world - 1)
    check_movement(make_plan(file, mesh.layouts(), 8, 4096), content, mesh.expected(), mesh.layouts(), 4096)
    check_movement(make_plan(mesh.layouts(), file, 8, 4096), mesh.expected(), content, file, 4096)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_training_to_training(data) -> None:
    mesh = data.draw(meshes((False, True)))
    layers = range(mesh.shape.num_layers)
    tp = data.draw(st.sampled_from([n for n in (1, 2, 4, 8) if mesh.world % n == 0 and can_split(mesh.shape, n)]))
    other = Mesh(mesh.shape, tp, mesh.world // tp, [layers])
    plan = make_plan(mesh.layouts(), other.layouts(), 8, 2048)
    check_movement(plan, mesh.expected(), other.expected(), other.layouts(), 2048)


@pytest.mark.parametrize("tp, dp", [(2, 2), (1, 2), (4, 1)])
def test_equal_layouts_share_all_but_interleaved_heads(tp: int, dp: int) -> None:
    mesh = Mesh(make_shape(num_kv_heads=4, hidden_size=16, vocab_size=128), tp, dp, [range(3)])
    target = [vllm_layout(mesh.shape, r % tp, tp) for r in range(tp * dp)]
    plan = make_plan(mesh.layouts(), target, 4, 1 << 20, share=True)
    for rank in range(tp * dp):
        part = plan.for_rank(rank)
        copied = {t.dst_local for t in part.copies}
        assert {s.dst_local for s in part.aliases} | copied == set(target[rank].shapes)
        assert all("qkv_proj" in name for name in copied) and bool(copied) == (tp < 4)
        assert part.buckets == ()


def test_a_part_of_what_training_holds_is_shared_where_its_rows_are_whole() -> None:
    """TP 1 to 2: the embedding's halves, a KV group, the norms; not gate_up, whose halves lie apart, nor o_proj, which
    is cut by columns."""
    shape = make_shape(hidden_size=16, qkv_bias=False)
    source = [mcore_layout(shape, 0, 1, range(3), True, True)]
    plan = make_plan(source, [vllm_layout(shape, 1, 2)], 4, 1 << 20, share=True)
    shared = {s.dst_local: s for s in plan.for_rank(0).aliases}
    assert {name.split(".")[-2] for name in shared} == {
        "embed_tokens", "lm_head", "qkv_proj", "input_layernorm", "post_attention_layernorm", "norm"
    }  # fmt: skip
    assert (shared["lm_head.weight"].row, shared["lm_head.weight"].rows) == (64, 64)


def test_what_would_begin_at_an_odd_address_is_copied() -> None:
    layouts = [whole_layout({"w": (6, 3)})], [Layout({"v": (3, 3)}, (Shard("w", ((3, 6), (0, 3)), "v", (0, 0)),))]
    assert make_plan(*layouts, 4, 100, share=True).shared_bytes == (0,)  # 36 bytes into w
    assert make_plan(*layouts, 16, 100, share=True).shared_bytes == (16 * 9,)


def test_the_heads_of_all_groups_travel_as_one_strided_transfer() -> None:
    """q, k and v of a layer are three transfers, however many KV groups there are; each holds the right rows."""
    shape = make_shape(num_layers=1, num_heads=32, num_kv_heads=16, qkv_bias=False)
    plan = make_plan([mcore_layout(shape, 0, 1, range(1), True, True)], [vllm_layout(shape, 0, 1)], 4, 1 << 20)
    qkv = [t for t in plan.for_rank(0).copies if "qkv" in t.dst_local]
    assert sorted((t.count, t.extent[0], t.src_step, t.dst_step) for t in qkv) == [
        (16, 2, 8, 2), (16, 2, 8, 2), (16, 4, 8, 4)
    ]  # fmt: skip


def test_equal_layout_sends_nothing() -> None:
    mesh = Mesh(make_shape(), tp=2, dp=2, stages=[range(3)])
    plan = make_plan(mesh.layouts(), [vllm_layout(mesh.shape, r % 2, 2) for r in range(4)], 4, 1 << 20)
    assert plan.received_bytes == plan.sent_bytes == (0,) * 4 and plan.buckets == ()
    assert all(plan.copied_bytes)


@pytest.mark.parametrize(
    "tp, stages, dp, rollout_tp", [(4, 1, 4, 2), (2, 1, 4, 4), (2, 2, 2, 2), (1, 2, 3, 2), (2, 1, 6, 4)]
)
def test_senders_of_a_block_send_the_same(tp: int, stages: int, dp: int, rollout_tp: int) -> None:
    """Of one parameter that all stages have, no rank sends more than another."""
    shape = make_shape(num_layers=2, num_heads=4, num_kv_heads=4, hidden_size=1024, head_dim=128)
    per_stage = 2 // stages
    mesh = Mesh(shape, tp, dp, [range(p * per_stage, (p + 1) * per_stage) for p in range(stages)])

    def only_o_proj(layout: Layout) -> Layout:
        return Layout(layout.shapes, tuple(p for p in layout.shards if "o_proj" in p.tensor))

    source = {id(x): only_o_proj(x) for x in mesh.layouts()}
    stride = max(1, tp // rollout_tp)
    rollout = [vllm_layout(shape, rank // stride % rollout_tp, rollout_tp) for rank in range(mesh.world)]
    target = {id(x): only_o_proj(x) for x in rollout}
    assert 1024 * 128 * 4 // dp >= MIN_SLICE_BYTES
    plan = make_plan([source[id(x)] for x in mesh.layouts()], [target[id(x)] for x in rollout], 4, 1 << 30, 64)
    assert sum(plan.sent_bytes) > 0
    assert max(plan.sent_bytes) * mesh.world <= 1.05 * sum(plan.sent_bytes), plan.sent_bytes


def test_the_same_node_is_asked_first() -> None:
    """Ranks 0 and 4 hold a tensor that all six want; on one node the two take turns, on two each serves its own."""
    whole = whole_layout({"w": (4, 2)})
    source = [whole, EMPTY, EMPTY, EMPTY, whole, EMPTY]
    for ranks_per_node, senders in [
        (3, {1: 0, 2: 0, 3: 4, 5: 4}),
        (6, {1: 0, 2: 4, 3: 0, 5: 4}),
        (1, {1: 0, 2: 4, 3: 0, 5: 4}),
    ]:
        plan = make_plan(source, [whole] * 6, 4, 1 << 20, ranks_per_node)
        assert {r: t.src_rank for r in range(6) for _, got in plan.for_rank(r).buckets for t in got} == senders
        crossing = {r for r in senders if senders[r] // ranks_per_node != r // ranks_per_node}
        assert plan.received_from_other_nodes == tuple(32 * (r in crossing) for r in range(6))
        assert plan.sender_imbalance == 3.0  # two of six ranks send as much each


def test_a_node_receives_a_block_once_and_its_ranks_forward_it() -> None:
    """Two nodes of four, a stage each: every rank lacks half of the model, which comes once, a quarter to each rank."""
    shape = make_shape(num_layers=2, hidden_size=512, ffn_hidden_size=1024, head_dim=128, qkv_bias=False)
    mesh = Mesh(shape, tp=1, dp=4, stages=[range(1), range(1, 2)])
    layer = Layout(
        {}, tuple(p for p in vllm_layout(shape, 0, 1).shards if ".layers." in p.tensor and "norm" not in p.local)
    )
    plan = make_plan(mesh.layouts(), [layer] * 8, 4, 1 << 20, ranks_per_node=4)
    half = plan.received_bytes[0]
    assert plan.received_bytes == (half,) * 8 and plan.received_from_other_nodes == (half // 4,) * 8
    assert plan.sender_imbalance == 1.0
    for rank in range(8):
        forwarded = [t.forwarded for sends, _ in plan.for_rank(rank).buckets for t in sends]
        assert forwarded == sorted(forwarded) and any(forwarded), "blocks are received before they are forwarded"


def test_all_stages_send_in_every_large_bucket() -> None:
    shape = make_shape(num_layers=8, hidden_size=64, ffn_hidden_size=256)
    mesh = Mesh(shape, tp=1, dp=1, stages=[range(0, 4), range(4, 8)])
    plan = make_plan(mesh.layouts(), [vllm_layout(shape, 0, 1)] * 2, 4, 64 * 256 * 4)
    both = [all(plan.for_rank(rank).buckets[n][0] for rank in (0, 1)) for n in range(len(plan.buckets))]
    assert sum(both) >= 0.8 * len(both), both


def test_missing_source_names_the_tensor() -> None:
    shape = make_shape()
    whole = hf_layout(shape)
    with pytest.raises(UserError, match=r"model\.norm\.weight: rank 0 needs \[0:8\].*nothing of it"):
        make_plan([whole.without({"model.norm.weight"})], [whole], 4, 100)
    with pytest.raises(UserError, match=r"w: rank 0 needs \[0:4, 0:2\] of it for w, and the source has \[0:3, 0:2\]"):
        make_plan([whole_layout({"w": (3, 2)})], [whole_layout({"w": (4, 2)})], 4, 100)


def test_fused_norm_names() -> None:
    layout = mcore_layout(make_shape(), 0, 1, range(3), True, True, fused_norms=True)
    names = {p.local for p in layout.shards if "layernorm" in p.tensor}
    assert {
        "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    } <= names


@pytest.mark.parametrize(
    "check, tp, changes, message",
    [
        (check_mcore, 3, {}, "tensor_model_parallel_size 3 .Megatron.: num_attention_heads is 4.*work: 1, 2, 4$"),
        (check_mcore, 8, {}, "num_attention_heads is 4, which 8 does not divide.*work: 1, 2, 4$"),
        (check_mcore, 2, {"num_heads": 6, "num_kv_heads": 3}, "num_key_value_heads is 3, and neither.*work: 1$"),
        (
            check_mcore,
            4,
            {"num_kv_heads": 1, "head_dim": 1},
            "rows of q, k and v together is 6, which 4 does not divide.*work: 1, 2$",
        ),
        (check_mcore, 2, {"ffn_hidden_size": 15}, "intermediate_size is 15, which 2 does not divide.*work: 1$"),
        (check_vllm, 6, {"num_heads": 12, "num_kv_heads": 4}, "num_key_value_heads is 4.*work: 1, 2, 4$"),
        (check_vllm, 3, {"num_heads": 6, "num_kv_heads": 3, "ffn_hidden_size": 24}, "vocab_size is 128.*work: 1$"),
        (check_vllm, 1, {"value_head": True}, "value head"),
    ],
)
def test_impossible_splits_are_refused(check, tp: int, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(make_shape(**changes), tp)


CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


def test_shape_from_config() -> None:
    shape = ModelShape.from_hf_config(CONFIG | {"rope_theta": 5e5})
    assert (shape.num_kv_heads, shape.head_dim, shape.rope_theta, shape.rope_scaling) == (2, 32, 5e5, None)
    assert shape.qkv_bias and not shape.o_bias and not shape.tie_embeddings
    newer = {"rope_parameters": {"rope_theta": 7e5, "rope_type": "linear", "factor": 8.0}, "attention_bias": True}
    shape = ModelShape.from_hf_config(CONFIG | newer | {"model_type": "llama"})
    assert shape.rope_theta == 7e5 and shape.rope_scaling == {"rope_type": "linear", "factor": 8.0}
    assert shape.qkv_bias and shape.o_bias and not shape.mlp_bias
    assert ModelShape.from_hf_config(CONFIG | {"rope_parameters": {"rope_type": "default"}}).rope_theta == 1e4
    hash(shape)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; known are llama, qwen2"),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "num_attention_heads 3 is not a multiple"),
    ],
)
def test_unsupported_configs_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelShape.from_hf_config(CONFIG | changes)


def test_vocabulary_padding() -> None:
    assert [padded_vocab_size(447, tp) for tp in (1, 2, 64, 3, 128)] == [448, 448, 448, 576, 512]
    assert padded_vocab_size(448, 1) == 448


def test_a_bucket_of_one_byte_goes_row_by_row() -> None:
    mesh = Mesh(make_shape(num_layers=1), tp=2, dp=1, stages=[range(1)])
    target = [vllm_layout(mesh.shape, 0, 1)] * 2
    plan = make_plan(mesh.layouts(), target, 8, 1)
    assert all(t.extent[0] == 1 for _, receives in plan.for_rank(0).buckets for t in receives)
    check_movement(plan, mesh.expected(), [expected_vllm(mesh.shape, 0, 1)] * 2, target, 1)
