"""Plans executed on simulated ranks, in one process: packing and unpacking are those of the
package.

The tensors that the engines should hold are computed from unsharded tensors by chunk, view and cat,
independently of layout.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from families import changed, traits

from rlhf_mc.architectures.spec import ModelShape, padded_vocab_size
from rlhf_mc.reshard.execute import aliased_views, bind, execute
from rlhf_mc.reshard.layout import Layout, logical_shapes, mcore_layout
from rlhf_mc.reshard.plan import Plan

PADDING = -1


def make_shape(**changes) -> ModelShape:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "vocab_size": 70,
        "max_position_embeddings": 64,
    }
    return changed(ModelShape.from_hf_config(config), **({"qkv_bias": True} | changes))


def numbered(shape: ModelShape) -> dict[str, torch.Tensor]:
    """Return the logical tensors; all elements of all tensors are distinct numbers."""
    tensors = {}
    start = 0
    for name, size in logical_shapes(shape).items():
        numel = math.prod(size)
        tensors[name] = torch.arange(start, start + numel).view(size)
        start += numel
    return tensors


def padded_chunk(weight: torch.Tensor, rows: int, tp_rank: int, tp_size: int) -> torch.Tensor:
    padding = torch.full((rows - weight.shape[0], weight.shape[1]), PADDING)
    return torch.cat([weight, padding]).chunk(tp_size)[tp_rank]


def expected_mcore(
    shape: ModelShape, t: int, tp: int, layers: range, first: bool, last: bool
) -> dict:
    """Return the tensors of a Megatron-Core rank: per KV group [q heads, k, v]; [gate; up]; rows of
    the padded vocabulary."""
    block = traits(shape)
    full = numbered(shape)
    out = {}
    rows = padded_vocab_size(shape.vocab_size, tp)
    if first:
        out["embedding.word_embeddings.weight"] = padded_chunk(
            full["model.embed_tokens.weight"], rows, t, tp
        )
    for local, i in enumerate(layers):
        hf = f"model.layers.{i}."
        mc = f"decoder.layers.{local}."
        out[mc + "input_layernorm.weight"] = full[hf + "input_layernorm.weight"]
        out[mc + "pre_mlp_layernorm.weight"] = full[hf + "post_attention_layernorm.weight"]
        for kind in ["weight"] + ["bias"] * block.qkv_bias:
            grouped = [
                full[f"{hf}self_attn.{x}_proj.{kind}"].reshape(block.num_kv_heads, -1, *rest)
                for x in "qkv"
                for rest in [(shape.hidden_size,) if kind == "weight" else ()]
            ]
            out[f"{mc}self_attention.linear_qkv.{kind}"] = (
                torch.cat(grouped, dim=1).flatten(0, 1).chunk(tp)[t]
            )
        for kind in ["weight"] + ["bias"] * block.mlp_bias:
            halves = [full[f"{hf}mlp.{x}_proj.{kind}"].chunk(tp)[t] for x in ("gate", "up")]
            out[f"{mc}mlp.linear_fc1.{kind}"] = torch.cat(halves)
        out[mc + "self_attention.linear_proj.weight"] = full[hf + "self_attn.o_proj.weight"].chunk(
            tp, dim=1
        )[t]
        out[mc + "mlp.linear_fc2.weight"] = full[hf + "mlp.down_proj.weight"].chunk(tp, dim=1)[t]
        if block.o_bias:
            out[mc + "self_attention.linear_proj.bias"] = full[hf + "self_attn.o_proj.bias"]
        if block.mlp_bias:
            out[mc + "mlp.linear_fc2.bias"] = full[hf + "mlp.down_proj.bias"]
    if last:
        out["decoder.final_layernorm.weight"] = full["model.norm.weight"]
        if shape.value_head:
            out["output_layer.weight"] = full["score.weight"]
        elif not shape.tie_embeddings:
            out["output_layer.weight"] = padded_chunk(full["lm_head.weight"], rows, t, tp)
        elif not first:
            out["output_layer.weight"] = padded_chunk(
                full["model.embed_tokens.weight"], rows, t, tp
            )
    return out


def expected_vllm(shape: ModelShape, t: int, tp: int) -> dict:
    """Return the tensors of a vLLM rank: [q of its heads; k; v], with KV heads replicated if there
    are fewer than ranks."""
    block = traits(shape)
    full = numbered(shape)
    out = {}
    rows = -(-shape.vocab_size // 64) * 64
    out["model.embed_tokens.weight"] = padded_chunk(full["model.embed_tokens.weight"], rows, t, tp)
    repeats = max(1, tp // block.num_kv_heads)
    for i in range(shape.num_layers):
        hf = f"model.layers.{i}."
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            out[hf + norm] = full[hf + norm]
        for kind in ["weight"] + ["bias"] * block.qkv_bias:
            q, k, v = (full[f"{hf}self_attn.{x}_proj.{kind}"] for x in "qkv")
            repeated = [
                x.unflatten(0, (-1, block.head_dim)).repeat_interleave(repeats, 0).flatten(0, 1)
                for x in (k, v)
            ]
            out[f"{hf}self_attn.qkv_proj.{kind}"] = torch.cat(
                [x.chunk(tp)[t] for x in (q, *repeated)]
            )
        for kind in ["weight"] + ["bias"] * block.mlp_bias:
            halves = [full[f"{hf}mlp.{x}_proj.{kind}"].chunk(tp)[t] for x in ("gate", "up")]
            out[f"{hf}mlp.gate_up_proj.{kind}"] = torch.cat(halves)
        out[hf + "self_attn.o_proj.weight"] = full[hf + "self_attn.o_proj.weight"].chunk(tp, dim=1)[
            t
        ]
        out[hf + "mlp.down_proj.weight"] = full[hf + "mlp.down_proj.weight"].chunk(tp, dim=1)[t]
        if block.o_bias:
            out[hf + "self_attn.o_proj.bias"] = full[hf + "self_attn.o_proj.bias"]
        if block.mlp_bias:
            out[hf + "mlp.down_proj.bias"] = full[hf + "mlp.down_proj.bias"]
    out["model.norm.weight"] = full["model.norm.weight"]
    if not shape.tie_embeddings:
        out["lm_head.weight"] = padded_chunk(full["lm_head.weight"], rows, t, tp)
    return out


def empty(layout: Layout) -> dict[str, torch.Tensor]:
    return {name: torch.full(size, PADDING) for name, size in layout.shapes.items()}


def run_plan(plan: Plan, sources: list[dict], targets: list[dict]) -> None:
    """Execute every rank's part. A dict carries the messages of a bucket."""
    parts = [plan.for_rank(rank) for rank in range(len(sources))]
    for part, source, target in zip(parts, sources, targets, strict=True):
        target.update(aliased_views(part, source))
        execute(replace(part, buckets=()), source, target, transport=None)
    sides = zip(parts, sources, targets, strict=True)
    buckets = [bind(part, *tensors, torch.int64).kept().buckets for part, *tensors in sides]
    for number in range(len(plan.buckets)):
        wires = {}
        for rank, part in enumerate(parts):
            outbox = torch.empty(sum(t.numel for t in part.buckets[number][0]), dtype=torch.int64)
            wires |= {
                (rank, peer): flat for peer, flat in buckets[rank][number].pack(outbox).items()
            }
        for rank in range(len(parts)):
            bucket = buckets[rank][number]
            bucket.unpack({peer: wires.pop((peer, rank)) for peer in bucket.sizes})
        assert not wires, "a message without a receiver"


@dataclass
class SimulatedMesh:
    """A training mesh: tensor-parallel ranks innermost, then data-parallel, then stages of the
    given layers."""

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
    """Return whether Megatron-Core can split the shape's attention over tp ranks."""
    block = traits(shape)
    rows = (block.num_heads + 2 * block.num_kv_heads) * block.head_dim
    return block.num_heads % tp == 0 and rows % tp == 0


def elements(tensors: dict) -> set[int]:
    return {n for t in tensors.values() for n in t.flatten().tolist()} - {PADDING}


def check_movement(
    plan: Plan, have: list[dict], want: list[dict], target: list[Layout], bucket_bytes: int
) -> None:
    filled = [empty(layout) for layout in target]
    run_plan(plan, have, filled)
    for rank, (got, wanted) in enumerate(zip(filled, want, strict=True)):
        assert got.keys() == wanted.keys()
        for name in wanted:
            assert torch.equal(got[name], wanted[name]), f"rank {rank}: {name}"
    for rank in range(len(have)):
        part = plan.for_rank(rank)
        # The lower bound: elements that the rank needs and lacks.
        missing = len(elements(want[rank]) - elements(have[rank]))
        assert part.received_bytes == plan.received_bytes[rank] == plan.itemsize * missing
        assert part.sent_bytes == plan.sent_bytes[rank]
        assert part.copied_bytes == plan.copied_bytes[rank]
        assert plan.shared_bytes[rank] == plan.itemsize * sum(a.numel for a in part.aliases)
        filled = plan.shared_bytes[rank] + part.copied_bytes + part.received_bytes
        assert filled == plan.itemsize * len(elements(want[rank]))
        for transfer in (t for _, receives in part.buckets for t in receives):
            assert transfer.src_rank != rank
        for sends, receives in part.buckets:
            for transfers in (sends, receives):
                # A row of stacked experts is a row of one expert.
                one_row = sum(
                    t.count * math.prod(t.extent[max(1, len(t.extent) - 1) :]) for t in transfers
                )
                size = sum(t.numel for t in transfers)
                assert size * plan.itemsize <= bucket_bytes or size == one_row
