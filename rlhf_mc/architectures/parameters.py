"""The table of parameters: one row for each parameter of each kind of layer, and of the model
outside its layers.

A row has the parameter's names in Megatron-Core, the Hugging Face tensors that it concatenates, and
the names of their dimensions, which decide the tensor-parallel split. ModelShape.dims has the sizes
of the dimensions; reshard/layout.py computes the shards of each rank. A rollout engine derives its
own names from the Hugging Face names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rlhf_mc.architectures.families import FAMILIES
from rlhf_mc.architectures.spec import LayerKind, ModelShape

SPLIT_DIMS = frozenset(
    {
        *(
            "q",
            "gated_q",
            "kv",
            "heads",
            "keys_values",
            "values",
            "ffn",
            "expert_ffn",
            "shared_ffn",
            "vocab",
        ),
        *("linear_qkvz", "linear_qkv", "linear_ba", "linear_heads", "linear_values"),
    }
)
"""Dimensions that tensor parallelism splits. A tensor has at most one of them; a tensor with none
is replicated."""

StagePlacement = Literal["first", "layer", "expert", "last", "last_if_not_first"]
"""The pipeline stage that holds a parameter: the first, the last, or the stage of its layer;
`expert`: the stage of its layer, one parameter per expert."""


@dataclass(frozen=True)
class HeadRows:
    """Rows of a Hugging Face tensor: `size` rows of each of `heads` heads, which begin `stride`
    rows apart."""

    tensor: str
    start: int
    size: int
    stride: int
    heads: int


@dataclass(frozen=True)
class Param:
    """One parameter. In names, `{i}` is the layer and `{e}` the expert: global indices in Hugging
    Face names, indices local to the rank in the names of an engine."""

    stage: StagePlacement
    hf: Mapping[str, tuple[str, ...]]
    """Hugging Face tensors that it concatenates along their split dimension, in order -> dimensions
    of each."""
    mcore: str
    """Name in Megatron-Core's local layer spec."""
    mcore_te: str | None = None
    """Name in the Transformer Engine layer spec, which fuses norms with the next linear layer and
    has one module for the experts of a layer; None: as `mcore`."""
    rows: tuple[HeadRows, ...] = ()
    """The rows that a rank has of its heads, in order; none: its part of each tensor in turn."""
    kind: LayerKind | None = None
    """The kind of layer that has it; None: it is outside the layers."""
    is_correction_bias: bool = False
    """It is a router's correction bias: without a gradient, and float32 whatever the type of the
    model."""


_HF = "model.layers.{i}."
_MC = "decoder.layers.{i}."


def _norm(hf: str, mcore: str, fused_with: str | None = None, dim: str = "hidden") -> Param:
    """fused_with: the linear layer whose module has the norm's weight in the Transformer Engine
    layer spec."""
    te = _MC + fused_with + ".layer_norm_weight" if fused_with else None
    return Param("layer", {f"{_HF}{hf}.weight": (dim,)}, f"{_MC}{mcore}.weight", te)


def _linear(
    mcore: str, hf: Mapping[str, tuple[str, ...]], bias: bool, rows: Sequence[HeadRows] = ()
) -> list[Param]:
    """Return the weight and the bias of a linear layer. hf: its modules -> (output, input)
    dimension of each. rows: as in Param, of modules."""
    return [
        Param(
            "layer",
            {f"{_HF}{module}.{kind}": dims[:num_dims] for module, dims in hf.items()},
            f"{_MC}{mcore}.{kind}",
            rows=tuple(replace(part, tensor=f"{_HF}{part.tensor}.{kind}") for part in rows),
        )
        for kind, num_dims in (("weight", None), ("bias", 1))[: 1 + bias]
    ]


def _delta_net(shape: ModelShape) -> list[Param]:
    """Return the rows of a gated delta net. The projections' tensors have, of each key head, its
    query, its key, and the values and their gates of its value heads; and the two numbers of each
    of these. With split_delta_nets they have all queries, all keys, ... in turn."""
    keys = shape.linear_key_heads
    d_k = shape.linear_key_dim
    d_v = shape.linear_value_dim
    group = shape.linear_value_heads // keys
    qkvz = "linear_attn.in_proj_qkvz"
    starts = itertools.accumulate((0, d_k, d_k, group * d_v))
    stride = 2 * (d_k + group * d_v)
    in_proj = [
        *(
            HeadRows(qkvz, at, size, stride, keys)
            for at, size in zip(starts, (d_k, d_k, *2 * (group * d_v,)), strict=True)
        ),
        *(HeadRows("linear_attn.in_proj_ba", at, group, 2 * group, keys) for at in (0, group)),
    ]

    def query_key_value(module: str) -> list[HeadRows]:
        return [
            *(HeadRows(module, at * keys * d_k, d_k, d_k, keys) for at in (0, 1)),
            HeadRows(module, 2 * keys * d_k, d_v, d_v, shape.linear_value_heads),
        ]

    projections = {
        qkvz: ("linear_qkvz", "hidden"),
        "linear_attn.in_proj_ba": ("linear_ba", "hidden"),
    }
    if shape.split_delta_nets:
        qkv, *others = (f"linear_attn.in_proj_{x}" for x in ("qkv", "z", "b", "a"))
        sizes = zip(others, (d_v, 1, 1), strict=True)
        in_proj = [
            *query_key_value(qkv),
            *(HeadRows(name, 0, n, n, shape.linear_value_heads) for name, n in sizes),
        ]
        dims = ("linear_qkv", "linear_values", "linear_heads", "linear_heads")
        projections = {
            name: (dim, "hidden") for name, dim in zip((qkv, *others), dims, strict=True)
        }
    return [
        _norm("input_layernorm", "input_layernorm", fused_with="self_attention.in_proj"),
        *_linear("self_attention.in_proj", projections, False, in_proj),
        *_linear(
            "self_attention.conv1d",
            {"linear_attn.conv1d": ("linear_qkv", "one", "kernel")},
            False,
            query_key_value("linear_attn.conv1d"),
        ),
        *(
            Param(
                "layer",
                {f"{_HF}linear_attn.{name}": ("linear_heads",)},
                f"{_MC}self_attention.{name}",
            )
            for name in ("dt_bias", "A_log")
        ),
        _norm("linear_attn.norm", "self_attention.out_norm", dim="linear_head"),
        *_linear(
            "self_attention.out_proj",
            {"linear_attn.out_proj": ("hidden", "linear_values")},
            bias=False,
        ),
    ]


def _latent_attention(shape: ModelShape) -> list[Param]:
    def project(mcore: str, hf: str, out: str, of: str = "hidden") -> list[Param]:
        return _linear(f"self_attention.linear_{mcore}", {f"self_attn.{hf}": (out, of)}, bias=False)

    def norm(x: str) -> Param:
        hf = f"self_attn.{x}_a_layernorm"
        return _norm(
            hf,
            f"self_attention.{x}_layernorm",
            f"self_attention.linear_{x}_up_proj",
            dim=f"latent_{x}",
        )

    queries = [
        *project("q_down_proj", "q_a_proj", "latent_q"),
        norm("q"),
        *project("q_up_proj", "q_b_proj", "q", "latent_q"),
    ]
    return [
        _norm("input_layernorm", "input_layernorm"),
        *(queries if shape.q_lora_rank else project("q_proj", "q_proj", "q")),
        *project("kv_down_proj", "kv_a_proj_with_mqa", "latent_kv_rope"),
        norm("kv"),
        *project("kv_up_proj", "kv_b_proj", "keys_values", "latent_kv"),
        *project("proj", "o_proj", "hidden", "values"),
    ]


def _attention(shape: ModelShape) -> list[Param]:
    if shape.kv_lora_rank:
        return _latent_attention(shape)
    qkv = "self_attention.linear_qkv"
    dim = shape.head_dim
    gates = 1 + shape.attention_gate
    rows = [
        *(
            HeadRows("self_attn.q_proj", at * dim, dim, gates * dim, shape.num_heads)
            for at in range(gates)
        ),
        *(HeadRows(f"self_attn.{x}_proj", 0, dim, dim, shape.num_kv_heads) for x in "kv"),
    ]
    heads = {
        "self_attn.q_proj": ("gated_q" if shape.attention_gate else "q", "hidden"),
        "self_attn.k_proj": ("kv", "hidden"),
        "self_attn.v_proj": ("kv", "hidden"),
    }
    params = [
        _norm("input_layernorm", "input_layernorm", fused_with=qkv),
        *_linear(qkv, heads, shape.qkv_bias, rows),
        *_linear("self_attention.linear_proj", {"self_attn.o_proj": ("hidden", "q")}, shape.o_bias),
    ]
    if shape.qk_norm:
        params += [
            _norm(f"self_attn.{x}_norm", f"self_attention.{x}_layernorm", dim="head") for x in "qk"
        ]
    if shape.sinks:
        sinks = {f"{_HF}self_attn.sinks": ("heads",)}
        params.append(Param("layer", sinks, f"{_MC}self_attention.core_attention.softmax_offset"))
    return params


def _feed_forward(shape: ModelShape) -> list[Param]:
    gate_up = {"mlp.gate_proj": ("ffn", "hidden"), "mlp.up_proj": ("ffn", "hidden")}
    return [
        _norm("post_attention_layernorm", "pre_mlp_layernorm", fused_with="mlp.linear_fc1"),
        *_linear("mlp.linear_fc1", gate_up, shape.mlp_bias),
        *_linear("mlp.linear_fc2", {"mlp.down_proj": ("hidden", "ffn")}, shape.mlp_bias),
    ]


def _experts(shape: ModelShape) -> list[Param]:
    names = FAMILIES[shape.family].expert_names
    expert = f"{_HF}{names.block}.experts.{{e}}."
    linear: dict[str, dict[str, tuple[str, ...]]] = {
        "linear_fc1": {expert + name: ("expert_ffn", "hidden") for name in (names.gate, names.up)},
        "linear_fc2": {expert + names.down: ("hidden", "expert_ffn")},
    }
    local = _MC + "mlp.experts.local_experts.{e}."
    grouped = _MC + "mlp.experts."
    experts = []
    for module, parts in linear.items():
        for kind, num_dims in (
            {"weight": 2, "bias": 1}.items() if shape.mlp_bias else [("weight", 2)]
        ):
            hf = {f"{part}.{kind}": dims[:num_dims] for part, dims in parts.items()}
            experts.append(
                Param("expert", hf, f"{local}{module}.{kind}", f"{grouped}{module}.{kind}{{e}}")
            )
    others = []
    if shape.sigmoid_router:
        bias = {f"{_HF}{names.block}.gate.e_score_correction_bias": ("experts",)}
        others.append(Param("layer", bias, _MC + "mlp.router.expert_bias", is_correction_bias=True))
    if shape.shared_ffn_hidden_size:
        shared = f"{names.block}.{names.shared}."
        gate_up_shared = {
            shared + name: ("shared_ffn", "hidden") for name in (names.gate, names.up)
        }
        others += _linear("mlp.shared_experts.linear_fc1", gate_up_shared, bias=False)
        others += _linear(
            "mlp.shared_experts.linear_fc2",
            {shared + names.down: ("hidden", "shared_ffn")},
            bias=False,
        )
    if shape.shared_expert_gate:
        gate = {f"{_HF}{names.block}.shared_expert_gate.weight": ("one", "hidden")}
        others.append(Param("layer", gate, _MC + "mlp.shared_experts.gate_weight"))
    return [
        # the norm before a router is not fused
        _norm("post_attention_layernorm", "pre_mlp_layernorm"),
        *_linear(
            "mlp.router", {f"{names.block}.{names.router}": ("experts", "hidden")}, shape.mlp_bias
        ),
        *others,
        *experts,
    ]


LAYERS: dict[LayerKind, Callable[[ModelShape], list[Param]]] = {
    "dense": lambda shape: _attention(shape) + _feed_forward(shape),
    "moe": lambda shape: _attention(shape) + _experts(shape),
    "linear_dense": lambda shape: _delta_net(shape) + _feed_forward(shape),
    "linear_moe": lambda shape: _delta_net(shape) + _experts(shape),
}
"""The parameters of a layer, by its kind. ModelShape.layer_kinds has the kind of each layer of a
model."""


def _outside(shape: ModelShape) -> list[Param]:
    """Return the parameters outside the layers."""
    embedding = {"model.embed_tokens.weight": ("vocab", "hidden")}
    params = [
        Param("first", embedding, "embedding.word_embeddings.weight"),
        Param("last", {"model.norm.weight": ("hidden",)}, "decoder.final_layernorm.weight"),
    ]
    if shape.value_head:
        return [*params, Param("last", {"score.weight": ("one", "hidden")}, "output_layer.weight")]
    if shape.tie_embeddings:  # Megatron-Core replicates a tied embedding on the last stage
        return [*params, Param("last_if_not_first", embedding, "output_layer.weight")]
    return [*params, Param("last", {"lm_head.weight": ("vocab", "hidden")}, "output_layer.weight")]


def model_params(shape: ModelShape) -> tuple[Param, ...]:
    """Return the rows of the parameters that this model has, each once."""
    kinds = dict.fromkeys(shape.layer_kinds)
    layers = [replace(param, kind=kind) for kind in kinds for param in LAYERS[kind](shape)]
    return (*_outside(shape), *layers)
