"""Target tensors that alias source tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_ranks import SimulatedMesh, make_shape

from rlhf_mc.reshard.layout import Layout, Shard, mcore_layout, whole_layout
from rlhf_mc.reshard.plan import make_plan
from rlhf_mc.rollout.vllm_layout import vllm_layout


@pytest.mark.parametrize("tp, dp", [(2, 2), (1, 2), (4, 1)])
def test_equal_layouts_alias_all_but_interleaved_heads(tp: int, dp: int) -> None:
    mesh = SimulatedMesh(
        make_shape(num_kv_heads=4, hidden_size=16, vocab_size=128), tp, dp, [range(3)]
    )
    target = [vllm_layout(mesh.shape, r % tp, tp) for r in range(tp * dp)]
    plan = make_plan(mesh.layouts(), target, 4, 1 << 20, share=True)
    for rank in range(tp * dp):
        part = plan.for_rank(rank)
        copied = {t.dst_local for t in part.copies}
        assert {a.dst_local for a in part.aliases} | copied == set(target[rank].shapes)
        assert all("qkv_proj" in name for name in copied) and bool(copied) == (tp < 4)
        assert part.buckets == ()


def test_complete_rows_of_a_larger_shard_are_aliased() -> None:
    """TP 1 to TP 2 aliases halves of the embedding, a KV group and norms, but not gate_up, whose
    halves are not adjacent, or o_proj, which is split by columns."""
    shape = make_shape(hidden_size=16, qkv_bias=False)
    source = [mcore_layout(shape, 0, 1, range(3), True, True)]
    plan = make_plan(source, [vllm_layout(shape, 1, 2)], 4, 1 << 20, share=True)
    aliases = {a.dst_local: a for a in plan.for_rank(0).aliases}
    assert {name.split(".")[-2] for name in aliases} == {
        "embed_tokens", "lm_head", "qkv_proj", "input_layernorm", "post_attention_layernorm", "norm"
    }  # fmt: skip
    assert (aliases["lm_head.weight"].row, aliases["lm_head.weight"].rows) == (64, 64)


def test_unaligned_views_are_copied() -> None:
    layouts = (
        [whole_layout({"w": (6, 3)})],
        [Layout({"v": (3, 3)}, (Shard("w", ((3, 6), (0, 3)), "v", (0, 0)),))],
    )
    assert make_plan(*layouts, 4, 100, share=True).shared_bytes == (0,)  # 36 bytes into w
    assert make_plan(*layouts, 16, 100, share=True).shared_bytes == (16 * 9,)


def test_float32_targets_are_copied() -> None:
    whole = whole_layout({"w": (6, 8), "router": (6, 8)})
    plan = make_plan(
        [whole], [replace(whole, float32=frozenset({"router"}))], 2, 1000, share=True
    ).for_rank(0)
    assert [alias.dst_local for alias in plan.aliases] == ["w"]
    assert [copy.dst_local for copy in plan.copies] == ["router"]
