"""Layouts of every model family, dense and with experts, and plans of experts.

The tensors that the engines should hold are computed from unsharded tensors by chunk, view, cat and
stack, independently of layout.py.
"""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import EXTRA, shape_of, traits
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_ranks import (
    PADDING,
    check_movement,
    elements,
    empty,
    make_shape,
    numbered,
    padded_chunk,
)

from rlhf_mc.architectures.families import FAMILIES
from rlhf_mc.architectures.hf_config import HYBRID
from rlhf_mc.architectures.spec import ModelShape, padded_vocab_size
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import MegatronConfig
from rlhf_mc.reshard.execute import LocalTensors
from rlhf_mc.reshard.layout import (
    EMPTY,
    Layout,
    Shard,
    Stack,
    check_mcore,
    hf_layout,
    logical_shapes,
    mcore_layout,
)
from rlhf_mc.reshard.model_checks import check_layout, cp_comm_type
from rlhf_mc.reshard.placement import rollout_layouts, training_layouts
from rlhf_mc.reshard.plan import Plan, _SenderBalancer, make_plan
from rlhf_mc.rollout.vllm_layout import check_vllm, vllm_layout
from rlhf_mc.topology.mesh import Mesh, rollout_groups

MIXTRAL = {
    "block_sparse_moe": "mlp",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
}
"""Parts of the names of mixtral's tensors -> of the other families'."""
GPT_OSS = {".mlp.router.": ".mlp.gate."}
QWEN3_NEXT = {".shared_expert.": ".shared_experts."}


def checkpoint(shape: ModelShape) -> dict[str, torch.Tensor]:
    """Return the tensors of the checkpoint, with names of some families as the other families have
    them."""
    return {
        renamed(name, MIXTRAL | GPT_OSS | QWEN3_NEXT): tensor
        for name, tensor in numbered(shape).items()
    }


def renamed(name: str, parts: dict[str, str]) -> str:
    for part, other in parts.items():
        name = name.replace(part, other)
    return name


def norms(full: dict, shape: ModelShape, i: int) -> dict[str, torch.Tensor]:
    """Return Megatron's name in the layer -> the layer's norms, which are replicated on every
    rank."""
    block = traits(shape)
    hf = f"model.layers.{i}."
    out = {
        "input_layernorm.weight": full[hf + "input_layernorm.weight"],
        "pre_mlp_layernorm.weight": full[hf + "post_attention_layernorm.weight"],
    }
    if block.kv_lora_rank:
        for x in ("q", "kv") if block.q_lora_rank else ("kv",):
            out[f"self_attention.{x}_layernorm.weight"] = full[
                f"{hf}self_attn.{x}_a_layernorm.weight"
            ]
    if block.qk_norm and i not in block.linear_layers:
        out["self_attention.q_layernorm.weight"] = full[hf + "self_attn.q_norm.weight"]
        out["self_attention.k_layernorm.weight"] = full[hf + "self_attn.k_norm.weight"]
    return out


def latent_mcore(full: dict, shape: ModelShape, i: int, t: int, tp: int) -> dict[str, torch.Tensor]:
    """Return the projections of a layer's latent attention on a Megatron-Core rank, by their names
    in it."""
    hf = f"model.layers.{i}.self_attn."
    out = {
        "linear_kv_down_proj": full[hf + "kv_a_proj_with_mqa.weight"],
        "linear_kv_up_proj": full[hf + "kv_b_proj.weight"].chunk(tp)[t],
        "linear_proj": full[hf + "o_proj.weight"].chunk(tp, 1)[t],
    }
    if traits(shape).q_lora_rank:
        out["linear_q_down_proj"] = full[hf + "q_a_proj.weight"]
        out["linear_q_up_proj"] = full[hf + "q_b_proj.weight"].chunk(tp)[t]
    else:
        out["linear_q_proj"] = full[hf + "q_proj.weight"].chunk(tp)[t]
    return {f"self_attention.{name}.weight": tensor for name, tensor in out.items()}


def latent_vllm(full: dict, shape: ModelShape, i: int, t: int, tp: int) -> dict[str, torch.Tensor]:
    """Return the projections of a layer's latent attention on a vLLM rank. vLLM joins those to
    latent vectors."""
    hf = f"model.layers.{i}.self_attn."
    latents = full[hf + "kv_a_proj_with_mqa.weight"]
    out = {hf + "kv_b_proj.weight": full[hf + "kv_b_proj.weight"].chunk(tp)[t]}
    if not traits(shape).q_lora_rank:
        query = hf + "q_proj.weight"
        return out | {hf + "kv_a_proj_with_mqa.weight": latents, query: full[query].chunk(tp)[t]}
    out[hf + "fused_qkv_a_proj.weight"] = torch.cat([full[hf + "q_a_proj.weight"], latents])
    return out | {hf + "q_b_proj.weight": full[hf + "q_b_proj.weight"].chunk(tp)[t]}


def delta_net(
    full: dict, shape: ModelShape, i: int, t: int, tp: int
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of a layer's delta net on a Megatron-Core rank and on a vLLM rank, by
    their names there."""
    block = traits(shape)
    hf = f"model.layers.{i}.linear_attn."
    keys = block.linear_key_heads
    values = block.linear_value_heads
    sizes = (
        block.linear_key_dim,
        block.linear_key_dim,
        *2 * (values // keys * block.linear_value_dim,),
    )
    if block.split_delta_nets:
        return split_delta_net(full, block, hf, t, tp)
    of_heads = full[hf + "in_proj_qkvz.weight"].unflatten(0, (keys, -1)).split(sizes, dim=1)
    of_heads += full[hf + "in_proj_ba.weight"].unflatten(0, (keys, -1)).chunk(2, dim=1)
    conv = full[hf + "conv1d.weight"].split(
        (keys * sizes[0], keys * sizes[0], values * block.linear_value_dim)
    )
    same = {name: full[hf + name].chunk(tp)[t] for name in ("A_log", "dt_bias")}
    same |= {
        "conv1d.weight": torch.cat([part.chunk(tp)[t] for part in conv]),
        "out_proj.weight": full[hf + "out_proj.weight"].chunk(tp, 1)[t],
    }
    norm = full[hf + "norm.weight"]
    in_proj = torch.cat([part.chunk(tp)[t].flatten(0, 1) for part in of_heads])
    projections = {
        f"in_proj_{x}.weight": full[f"{hf}in_proj_{x}.weight"].chunk(tp)[t] for x in ("qkvz", "ba")
    }
    return {
        "self_attention.": {**same, "in_proj.weight": in_proj, "out_norm.weight": norm},
        "linear_attn.": {**same, **projections, "norm.weight": norm},
    }


def split_delta_net(
    full: dict, block: SimpleNamespace, hf: str, t: int, tp: int
) -> dict[str, dict[str, torch.Tensor]]:
    """Return what delta_net does, of projections in four tensors."""
    keys = block.linear_key_heads * block.linear_key_dim
    sizes = (keys, keys, block.linear_value_heads * block.linear_value_dim)

    def of_rank(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.chunk(tp)[t] for tensor in tensors])

    qkv, z, b, a = (full[f"{hf}in_proj_{x}.weight"] for x in ("qkv", "z", "b", "a"))
    same = {name: of_rank(full[hf + name]) for name in ("A_log", "dt_bias")} | {
        "conv1d.weight": of_rank(*full[hf + "conv1d.weight"].split(sizes)),
        "out_proj.weight": full[hf + "out_proj.weight"].chunk(tp, 1)[t],
    }
    qkvz = of_rank(*qkv.split(sizes), z)
    ba = of_rank(b, a)
    norm = full[hf + "norm.weight"]
    vllm = {"in_proj_qkvz.weight": qkvz, "in_proj_ba.weight": ba, "norm.weight": norm}
    mcore = {"in_proj.weight": torch.cat([qkvz, ba]), "out_norm.weight": norm}
    return {"self_attention.": same | mcore, "linear_attn.": same | vllm}


def expected_mcore(
    shape: ModelShape, t: int, tp: int, e: int = 0, ep: int = 1
) -> dict[str, torch.Tensor]:
    """Return the tensors of a Megatron-Core rank without pipeline parallelism. e of ep: its
    expert-parallel rank."""
    block = traits(shape)
    full = checkpoint(shape)
    out = {}
    rows = padded_vocab_size(shape.vocab_size, tp)
    out["embedding.word_embeddings.weight"] = padded_chunk(
        full["model.embed_tokens.weight"], rows, t, tp
    )
    for i in range(shape.num_layers):
        hf = f"model.layers.{i}."
        mc = f"decoder.layers.{i}."
        out |= {mc + name: norm for name, norm in norms(full, shape, i).items()}
        if block.kv_lora_rank:
            out |= {
                mc + name: tensor for name, tensor in latent_mcore(full, shape, i, t, tp).items()
            }
        if i in block.linear_layers:
            part = "self_attention."
            out |= {
                mc + part + name: tensor
                for name, tensor in delta_net(full, shape, i, t, tp)[part].items()
            }
        attends = not block.kv_lora_rank and i not in block.linear_layers
        for kind in (["weight"] + ["bias"] * block.qkv_bias) * attends:
            qkv = [full[f"{hf}self_attn.{x}_proj.{kind}"] for x in "qkv"]
            if block.attention_gate:
                qkv = [*qkv[0].unflatten(0, (block.num_heads, 2, -1)).unbind(1), *qkv[1:]]
                qkv[:2] = (x.flatten(0, 1) for x in qkv[:2])
            grouped = torch.cat([x.unflatten(0, (block.num_kv_heads, -1)) for x in qkv], dim=1)
            out[f"{mc}self_attention.linear_qkv.{kind}"] = grouped.flatten(0, 1).chunk(tp)[t]
        if attends:
            out[mc + "self_attention.linear_proj.weight"] = full[
                hf + "self_attn.o_proj.weight"
            ].chunk(tp, 1)[t]
        if block.o_bias:
            out[mc + "self_attention.linear_proj.bias"] = full[hf + "self_attn.o_proj.bias"]
        if block.sinks:
            out[mc + "self_attention.core_attention.softmax_offset"] = full[
                hf + "self_attn.sinks"
            ].chunk(tp)[t]
        num_experts = shape.num_experts if i in shape.expert_layers else 0
        if num_experts:
            out[mc + "mlp.router.weight"] = full[hf + "mlp.gate.weight"]
        if num_experts and block.mlp_bias:
            out[mc + "mlp.router.bias"] = full[hf + "mlp.gate.bias"]
        if num_experts and block.sigmoid_router:
            out[mc + "mlp.router.expert_bias"] = full[hf + "mlp.gate.e_score_correction_bias"]
        if num_experts and block.shared_expert_gate:
            out[mc + "mlp.shared_experts.gate_weight"] = full[hf + "mlp.shared_expert_gate.weight"]
        if num_experts and block.shared_ffn_hidden_size:
            gate, up, down = (
                full[f"{hf}mlp.shared_experts.{x}_proj.weight"] for x in ("gate", "up", "down")
            )
            out[mc + "mlp.shared_experts.linear_fc1.weight"] = torch.cat(
                [gate.chunk(tp)[t], up.chunk(tp)[t]]
            )
            out[mc + "mlp.shared_experts.linear_fc2.weight"] = down.chunk(tp, 1)[t]
        per_rank = num_experts // ep
        sources = {
            f"mlp.experts.local_experts.{n}.": f"mlp.experts.{e * per_rank + n}."
            for n in range(per_rank)
        }
        for local, source in (sources or {"mlp.": "mlp."}).items():
            gate, up, down = (full[f"{hf}{source}{x}_proj.weight"] for x in ("gate", "up", "down"))
            out[mc + local + "linear_fc1.weight"] = torch.cat([gate.chunk(tp)[t], up.chunk(tp)[t]])
            out[mc + local + "linear_fc2.weight"] = down.chunk(tp, 1)[t]
            if block.mlp_bias:
                gate, up = (full[f"{hf}{source}{x}_proj.bias"].chunk(tp)[t] for x in ("gate", "up"))
                out[mc + local + "linear_fc1.bias"] = torch.cat([gate, up])
                out[mc + local + "linear_fc2.bias"] = full[f"{hf}{source}down_proj.bias"]
    out["decoder.final_layernorm.weight"] = full["model.norm.weight"]
    if not shape.tie_embeddings:
        out["output_layer.weight"] = padded_chunk(full["lm_head.weight"], rows, t, tp)
    return out


def as_transformer_engine(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a mixture of experts by their names in Transformer Engine's layers.
    These names and their shapes are those of models built from Megatron-Core 0.16.1 and the Python
    of Transformer Engine 2.11 (docs/internals/gpu_readings.md)."""
    renames = {
        r"\.input_layernorm\.weight": ".self_attention.linear_qkv.layer_norm_weight",
        r"\.local_experts\.(\d+)\.(linear_fc\d)\.(weight|bias)": r".\2.\3\1",
    }
    out = {}
    for name, tensor in tensors.items():
        if name.replace("pre_mlp_layernorm", "mlp.linear_fc1") in tensors:  # of a dense layer
            name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        for pattern, replacement in renames.items():
            name = re.sub(pattern, replacement, name)
        out[name] = tensor
    return out


def expected_vllm(shape: ModelShape, t: int, tp: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a vLLM rank. All experts of a layer are stacked, and each is split."""
    block = traits(shape)
    full = checkpoint(shape)
    out = {}
    rows = padded_vocab_size(shape.vocab_size, 1)
    for name in ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not shape.tie_embeddings):
        out[name] = padded_chunk(full[name], rows, t, tp)
    for i in range(shape.num_layers):
        hf = f"model.layers.{i}."
        same = ("norm", "mlp.gate.", "shared_expert_gate")
        out |= {
            n: x for n, x in full.items() if n.startswith(hf) and any(part in n for part in same)
        }
        if i in block.linear_layers:
            part = "linear_attn."
            out |= {
                hf + part + name: tensor
                for name, tensor in delta_net(full, shape, i, t, tp)[part].items()
            }
        attends = not block.kv_lora_rank and i not in block.linear_layers
        if block.kv_lora_rank:
            out |= latent_vllm(full, shape, i, t, tp)
        for kind in (["weight"] + ["bias"] * block.qkv_bias) * attends:
            qkv = [full[f"{hf}self_attn.{x}_proj.{kind}"].chunk(tp)[t] for x in "qkv"]
            out[f"{hf}self_attn.qkv_proj.{kind}"] = torch.cat(qkv)
        if i not in block.linear_layers:
            out[hf + "self_attn.o_proj.weight"] = full[hf + "self_attn.o_proj.weight"].chunk(tp, 1)[
                t
            ]
        if block.o_bias:
            out[hf + "self_attn.o_proj.bias"] = full[hf + "self_attn.o_proj.bias"]
        if block.sinks:
            out[hf + "self_attn.sinks"] = full[hf + "self_attn.sinks"].chunk(tp)[t]
        num_experts = shape.num_experts if i in shape.expert_layers else 0
        sources = [f"{hf}mlp.experts.{n}." for n in range(num_experts)] or [hf + "mlp."]
        gate_up = [
            torch.cat([full[s + f"{x}_proj.weight"].chunk(tp)[t] for x in ("gate", "up")])
            for s in sources
        ]
        down = [full[s + "down_proj.weight"].chunk(tp, 1)[t] for s in sources]
        if num_experts and block.shared_ffn_hidden_size:
            shared = hf + "mlp.shared_experts."
            halves = [full[f"{shared}{x}_proj.weight"].chunk(tp)[t] for x in ("gate", "up")]
            out[shared + "gate_up_proj.weight"] = torch.cat(halves)
            out[shared + "down_proj.weight"] = full[shared + "down_proj.weight"].chunk(tp, 1)[t]
        if num_experts:
            out[hf + "mlp.experts.routed_experts.w13_weight"] = torch.stack(gate_up)
            out[hf + "mlp.experts.routed_experts.w2_weight"] = torch.stack(down)
            if shape.family == "gpt_oss":
                out |= vllm_experts_of_gpt_oss(full, hf, sources, t, tp)
        else:
            out[hf + "mlp.gate_up_proj.weight"] = gate_up[0]
            out[hf + "mlp.down_proj.weight"] = down[0]
    out["model.norm.weight"] = full["model.norm.weight"]
    if shape.family in HYBRID:
        return {
            name.replace(".shared_experts.", ".shared_expert."): tensor
            for name, tensor in out.items()
        }
    if shape.family == "mixtral":
        return {name.replace("mlp.", "block_sparse_moe."): tensor for name, tensor in out.items()}
    if shape.family == "gpt_oss":
        parts = {
            ".mlp.gate.": ".mlp.router.",
            ".self_attn.": ".attn.",
            "model.embed_tokens": "model.embedding",
        }
        return {renamed(name, parts): tensor for name, tensor in out.items()}
    return out


def vllm_experts_of_gpt_oss(
    full: dict[str, torch.Tensor], hf: str, sources: list[str], t: int, tp: int
) -> dict[str, torch.Tensor]:
    """Return vLLM's tensors with the rows of gate and up in turn; the first rank alone has the
    biases of outputs."""
    out = {}
    for kind in ("weight", "bias"):
        halves = [
            [full[f"{s}{x}_proj.{kind}"].chunk(tp)[t] for x in ("gate", "up")] for s in sources
        ]
        in_turn = [torch.stack(pair, dim=1).flatten(0, 1) for pair in halves]
        out[f"{hf}mlp.experts.routed_experts.w13_{kind}"] = torch.stack(in_turn)
    biases = torch.stack([full[f"{s}down_proj.bias"] for s in sources])
    out[hf + "mlp.experts.routed_experts.w2_bias"] = (
        biases if t == 0 else torch.full_like(biases, PADDING)
    )
    return out


def fill(layout: Layout, shape: ModelShape) -> dict[str, torch.Tensor]:
    """Return the local tensors that the layout describes."""
    full = numbered(shape)
    out = empty(layout)
    for shard in layout.shards:
        block = full[shard.tensor][tuple(slice(*sides) for sides in shard.box)]
        lead = len(shard.offset) - len(shard.box)
        target = LocalTensors(out).whole(shard.local)[shard.offset[:lead]]
        target[
            tuple(slice(at, at + n) for at, n in zip(shard.offset[lead:], block.shape, strict=True))
        ] = block
    return out


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        assert torch.equal(got[name], want), name


def unpipelined(shape: ModelShape, t: int, tp: int, **experts: int) -> Layout:
    return mcore_layout(shape, t, tp, range(shape.num_layers), True, True, **experts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp", [1, 2])
def test_layouts_of_every_family(family: str, tp: int) -> None:
    shape = shape_of(family)
    for t in range(tp):
        assert_same(fill(unpipelined(shape, t, tp), shape), expected_mcore(shape, t, tp))
        assert_same(fill(vllm_layout(shape, t, tp), shape), expected_vllm(shape, t, tp))


def test_layouts_of_latent_attention_without_a_latent_of_queries() -> None:
    shape = shape_of("deepseek_v3", q_lora_rank=None)
    for t in range(2):
        assert_same(fill(unpipelined(shape, t, 2), shape), expected_mcore(shape, t, 2))
        assert_same(fill(vllm_layout(shape, t, 2), shape), expected_vllm(shape, t, 2))


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "qwen3_5_moe"])
def test_plans_of_other_attentions_are_exact_and_minimal(family: str) -> None:
    """Plan from TP 2 and EP 2 to rollout TP 2: what vLLM joins and replicates comes from two
    parameters, and what it orders by heads from one."""
    shape = shape_of(family)
    places = [(t, 2, e, 2) for e in range(2) for t in range(2)]
    source = [unpipelined(shape, t, 2, ep_rank=e, ep_size=2) for t, _, e, _ in places]
    target = [vllm_layout(shape, t, 2) for t, *_ in places]
    have = [expected_mcore(shape, *at) for at in places]
    check_movement(
        make_plan(source, target, 8, 1000, 2),
        have,
        [expected_vllm(shape, t, 2) for t, *_ in places],
        target,
        1000,
    )


@st.composite
def expert_shapes(draw: st.DrawFn) -> ModelShape:
    kv_heads = draw(st.sampled_from([2, 4]))
    family = draw(st.sampled_from(["qwen3_moe", "mixtral", "gpt_oss"]))
    num_layers = draw(st.integers(1, 3))
    num_experts = draw(st.sampled_from([4, 8]))
    experts = {
        "num_local_experts": num_experts,
        "intermediate_size": draw(st.sampled_from([2, 4, 6])),
    }
    if family == "qwen3_moe":
        dense = draw(st.lists(st.integers(0, num_layers - 1), max_size=num_layers - 1))
        experts = {
            "num_experts": num_experts,
            "moe_intermediate_size": draw(st.sampled_from([2, 4, 6])),
            "mlp_only_layers": dense,
        }
    return shape_of(
        family,
        num_hidden_layers=num_layers,
        hidden_size=draw(st.integers(1, 3)),
        num_attention_heads=kv_heads * draw(st.sampled_from([1, 2])),
        num_key_value_heads=kv_heads,
        head_dim=draw(st.integers(1, 2)),
        vocab_size=draw(st.integers(1, 70)),
        tie_word_embeddings=draw(st.booleans()) and family != "gpt_oss",
        **experts,
    )


@settings(max_examples=30, deadline=None)
@given(expert_shapes(), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]))
def test_layouts_of_expert_parallel_ranks(shape: ModelShape, tp: int, ep: int) -> None:
    for e in range(ep):
        for t in range(tp):
            wanted = expected_mcore(shape, t, tp, e, ep)
            assert_same(fill(unpipelined(shape, t, tp, ep_rank=e, ep_size=ep), shape), wanted)
            layout = unpipelined(shape, t, tp, ep_rank=e, ep_size=ep, transformer_engine=True)
            assert_same(fill(layout, shape), as_transformer_engine(wanted))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_plans_of_experts_are_exact_and_minimal(data: st.DataObject) -> None:
    """Plan from every expert parallelism to every rollout layout, to a file and from a file."""
    shape = data.draw(expert_shapes())
    tp, ep, dp = data.draw(
        st.sampled_from([(1, 1, 2), (1, 2, 1), (1, 4, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)])
    )
    coordinates = [(t, tp, e, ep) for _ in range(dp) for e in range(ep) for t in range(tp)]
    is_te = data.draw(st.booleans())
    source = [
        unpipelined(shape, t, tp, ep_rank=e, ep_size=ep, transformer_engine=is_te)
        for t, tp, e, ep in coordinates
    ]
    have = [expected_mcore(shape, *at) for at in coordinates]
    if is_te:
        have = [as_transformer_engine(tensors) for tensors in have]
    rollout = data.draw(st.sampled_from([1, 2]))
    ranks = data.draw(st.permutations([r % rollout for r in range(len(coordinates))]))
    target = [vllm_layout(shape, r, rollout) for r in ranks]
    bucket = data.draw(st.sampled_from([100, 1000, 1 << 20]))
    nodes = data.draw(st.sampled_from([1, 2, 8]))
    want = [expected_vllm(shape, r, rollout) for r in ranks]
    check_movement(make_plan(source, target, 8, bucket, nodes), have, want, target, bucket)
    file = [hf_layout(shape)] + [EMPTY] * (len(coordinates) - 1)
    content = [numbered(shape)] + [{}] * (len(coordinates) - 1)
    check_movement(make_plan(source, file, 8, bucket), have, content, file, bucket)
    check_movement(make_plan(file, source, 8, bucket), content, have, source, bucket)


def plan_of_experts(num_experts: int, bucket: int) -> Plan:
    """Return the plan of four ranks from TP 2 and EP 2 to rollout TP 4; nodes have two ranks."""
    shape = shape_of(
        "qwen3_moe", num_experts=num_experts, num_key_value_heads=4, moe_intermediate_size=64
    )
    source = [unpipelined(shape, t, 2, ep_rank=e, ep_size=2) for e in range(2) for t in range(2)]
    return make_plan(source, [vllm_layout(shape, r, 4) for r in range(4)], 4, bucket, 2)


@pytest.mark.parametrize("mesh", [Mesh(64, tp=2, pp=2, ep=8), Mesh(64, 1, 1, shards=16)])
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_plan_of_64_ranks_is_at_its_bound(family: str, mesh: Mesh) -> None:
    """Compare with the elements that each rank, and each node, needs and lacks, from Megatron's
    layout and from fsdp2's rows."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    experts = {"n_routed_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 8}
    shape = shape_of(family, num_hidden_layers=4, intermediate_size=8, **heads, **experts)
    source = training_layouts(shape, mesh)
    target = rollout_layouts(shape, rollout_groups(mesh, 8), vllm_layout)
    distinct = {id(layout): layout for layout in (*source, *target)}
    held = {key: elements(fill(layout, shape)) for key, layout in distinct.items()}
    plan = make_plan(source, target, 2, 1000)
    lacks = [held[id(want)] - held[id(have)] for have, want in zip(source, target, strict=True)]
    assert plan.received_bytes == tuple(2 * len(one) for one in lacks)
    for node in range(0, 64, 8):
        on_node = set().union(*(held[id(layout)] for layout in source[node : node + 8]))
        lacking = set().union(*lacks[node : node + 8]) - on_node
        assert sum(plan.received_from_other_nodes[node : node + 8]) == 2 * len(lacking) > 0


def test_parameters_of_vllm_with_rows_of_gate_and_up_in_turn() -> None:
    layout = vllm_layout(shape_of("gpt_oss"), 1, 2)
    shapes = layout.shapes
    experts = "model.layers.0.mlp.experts.routed_experts."
    assert shapes[experts + "w13_weight"] == (4, 4, 6) and shapes[experts + "w13_bias"] == (4, 4)
    assert shapes["model.layers.0.attn.sinks"] == (2,) and shapes["model.embedding.weight"] == (
        64,
        6,
    )
    assert layout.zero == {f"model.layers.{i}.mlp.experts.routed_experts.w2_bias" for i in range(2)}
    assert not vllm_layout(shape_of("gpt_oss"), 0, 2).zero
    with pytest.raises(
        UserError, match=r"num_key_value_heads is 2, fewer than ranks .*sizes that work: 1, 2$"
    ):
        check_vllm(shape_of("gpt_oss"), 4)


def test_plan_size_is_independent_of_the_number_of_experts() -> None:
    def size(plan: Plan) -> tuple[int, ...]:
        transfers = sum(len(sends) + len(receives) for sends, receives in plan.for_rank(1).buckets)
        moves = sum(len(pattern.moves) + len(pattern.copies) for pattern in plan.patterns)
        return len(plan.patterns), moves, transfers + len(plan.for_rank(1).copies)

    few = plan_of_experts(8, 1 << 20)
    many = plan_of_experts(64, 1 << 20)
    assert size(few) == size(many)
    assert sum(many.received_bytes) > 6 * sum(few.received_bytes) > 0


def test_only_stacks_of_experts_are_split_between_experts() -> None:
    """Use the bias of stacked experts, of two dimensions, and a convolution's weight, of three."""
    balancer = _SenderBalancer(8, 1 << 16)
    stack = Shard(Stack("e", ".bias"), ((0, 3), (0, 4)), "all", (0, 0))
    assert balancer.split(stack, stack.box, 2, 1, 1) == [((0, 3), (0, 2)), ((0, 3), (2, 4))]
    weight = Shard("conv1d.weight", ((0, 3), (0, 1), (0, 4)), "weight", (0, 0, 0))
    parts = [((0, 1), (0, 1), (0, 4)), ((1, 3), (0, 1), (0, 4))]
    assert balancer.split(weight, weight.box, 2, 1, 1) == parts
    assert pickle.loads(pickle.dumps(stack)).tensor.member(2) == "e2.bias"


def test_stacked_experts_fit_into_buckets() -> None:
    """Check that buckets have several experts if they fit, and that an expert larger than a bucket
    is split."""
    expert = 2 * 16 * 6 * 4  # bytes of a rank's gate and up
    roomy = plan_of_experts(16, 4 * expert)
    narrow = plan_of_experts(16, expert // 4)
    for plan, limit in ((roomy, 4 * expert), (narrow, expert // 4)):
        sizes = [
            sum(t.numel for t in got) * 4 for r in range(4) for _, got in plan.for_rank(r).buckets
        ]
        assert max(sizes) <= limit
    assert (
        max(t.extent[0] for _, got in roomy.for_rank(1).buckets for t in got if len(t.extent) == 3)
        > 1
    )
    assert all(
        t.extent[0] == 1 for _, got in narrow.for_rank(1).buckets for t in got if len(t.extent) == 3
    )


def test_norms_of_transformer_engine_layers() -> None:
    """Check that the norm before a router is not fused with a linear layer."""

    def norm_names(family: str) -> set[str]:
        layout = mcore_layout(shape_of(family), 0, 1, range(1), True, True, transformer_engine=True)
        return {name.removeprefix("decoder.layers.0.") for name in layout.shapes if "norm" in name}

    qkv = "self_attention.linear_qkv.layer_norm_weight"
    final = "decoder.final_layernorm.weight"
    heads = {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"}
    latent = {
        "input_layernorm.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
    }
    assert norm_names("deepseek_v3") == {*latent, "mlp.linear_fc1.layer_norm_weight", final}
    assert norm_names("gemma") == {qkv, "mlp.linear_fc1.layer_norm_weight", final}
    assert norm_names("qwen3") == {qkv, "mlp.linear_fc1.layer_norm_weight", final} | heads
    assert norm_names("qwen3_moe") == {qkv, "pre_mlp_layernorm.weight", final} | heads


def test_names_in_hugging_face_checkpoints() -> None:
    names = logical_shapes(shape_of("qwen3_moe"))
    assert names["model.layers.1.mlp.experts.3.up_proj.weight"] == (4, 6)
    assert names["model.layers.1.mlp.experts.0.down_proj.weight"] == (6, 4)
    assert names["model.layers.0.mlp.gate.weight"] == (4, 6)
    assert names["model.layers.0.self_attn.q_norm.weight"] == (3,)
    assert not any("mlp.gate_proj" in name for name in names)


@pytest.mark.parametrize(
    ("check", "sizes", "changes", "message"),
    [
        (
            check_mcore,
            {"tp_size": 1, "ep_size": 3},
            {},
            r"^expert_model_parallel_size 3 \(Megatron\): num_experts is 4, which 3 does not "
            r"divide "
            r"\(model\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight \[4, 6\]\); sizes that work: "
            r"1, 2, 4$",
        ),
        (
            check_mcore,
            {"tp_size": 2},
            {"moe_intermediate_size": 5},
            r"^tensor_model_parallel_size 2 \(Megatron\): moe_intermediate_size is 5, which 2 does "
            r"not divide "
            r"\(model\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight \[5, 6\]\); sizes that work: "
            r"1$",
        ),
        (
            check_vllm,
            {"tp_size": 2},
            {"moe_intermediate_size": 5},
            (
                r"^tensor_model_parallel_size 2 \(vLLM\): moe_intermediate_size is 5.*\[5, 6\]\); "
                r"sizes that work: 1$"
            ),
        ),
        (
            check_vllm,
            {"tp_size": 4},
            {"num_experts": 2},
            (
                r"num_experts is 2, fewer than ranks \(model\.layers\.0\.mlp\.gate\.weight \[2, "
                r"6\]\); "
                r".*work: 1, 2$"
            ),
        ),
    ],
)
def test_invalid_expert_parallel_sizes_are_rejected(
    check: Any, sizes: dict, changes: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check(shape_of("qwen3_moe", **changes), **sizes)


@pytest.mark.parametrize(
    ("check", "tp", "message"),
    [
        (
            check_mcore,
            3,
            r"num_attention_heads is 4.*\(model\.layers\.0\.self_attn\.q_proj\.weight \[12, 6\]\)",
        ),
        (
            check_vllm,
            3,
            r"num_key_value_heads is 2.*\(model\.layers\.0\.self_attn\.k_proj\.weight \[6, 6\]\)",
        ),
    ],
)
def test_error_of_an_invalid_size_names_a_tensor(check: Any, tp: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(shape_of("qwen3"), tp)
    with pytest.raises(
        UserError, match=r"num_attention_heads is 4.*q_b_proj\.weight \[20, 10\]\); .*work: 1, 2, 4"
    ):
        check(shape_of("deepseek_v3"), tp)
    with pytest.raises(
        UserError,
        match=r"linear_num_key_heads is 2, which 4 .*in_proj_qkvz.*; sizes that work: 1, 2",
    ):
        check(shape_of("qwen3_next"), 4)
    with pytest.raises(UserError, match=r"linear_num_key_heads is 2, .*in_proj_qkv.weight"):
        check(shape_of("qwen3_5_text"), 4)


def test_expert_parallelism_of_a_dense_model_is_rejected() -> None:
    with pytest.raises(
        UserError, match=r"expert_model_parallel_size 2 \(Megatron\): a qwen3 model has no experts"
    ):
        check_mcore(shape_of("qwen3"), 1, ep_size=2)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "cp", "wanted"),
    [
        (8, 8, 1, 4, "a2a"),
        (8, 8, 1, 2, "p2p"),  # the same bytes
        (8, 8, 1, 3, "p2p"),  # does not divide the KV heads
        (8, 8, 4, 4, "p2p"),  # nor those of a tensor-parallel rank
        (8, 4, 1, 2, "p2p"),
        (8, 4, 1, 4, "a2a"),
        (28, 4, 1, 4, "p2p"),
        (28, 4, 8, 2, "p2p"),
    ],
)
def test_context_parallel_ranks_move_fewer_bytes(
    heads: int, kv_heads: int, tp: int, cp: int, wanted: str
) -> None:
    shape = make_shape(num_heads=heads, num_kv_heads=kv_heads)
    megatron = MegatronConfig(tensor_model_parallel_size=tp, context_parallel_size=cp)
    assert cp_comm_type(shape, megatron) == wanted
    assert cp_comm_type(shape, replace(megatron, cp_comm_type="a2a")) == "a2a"


@pytest.mark.parametrize(
    ("changes", "megatron", "message"),
    [
        (
            {},
            {"tensor_model_parallel_size": 2},
            "tensor_model_parallel_size: 2 .*needs actor.megatron.sequence_parallel: true",
        ),
        ({}, {"expert_model_parallel_size": 3}, "expert_model_parallel_size 3 .*num_experts is 4"),
        ({"num_experts_per_tok": 1}, {}, "num_experts_per_tok is 1 and norm_topk_prob is true"),
        (
            EXTRA["gpt_oss"] | {"model_type": "gpt_oss"},
            {"context_parallel_size": 2},
            "context_parallel_size: 2; a gp",
        ),
        (
            EXTRA["qwen3_next"] | {"model_type": "qwen3_next"},
            {"context_parallel_size": 2},
            "context_parallel_size: 2; a qwen3_next model has gated delta nets",
        ),
    ],
)
def test_layouts_unsupported_by_megatron_are_rejected(
    changes: dict[str, Any], megatron: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_layout(shape_of("qwen3_moe", **changes), MegatronConfig(**megatron))
    check_layout(shape_of("qwen3_moe"), MegatronConfig(expert_model_parallel_size=2))
