"""The table of parameters: one row for each that a model may have.

A row says how the parameter is named in Megatron-Core and in vLLM and which Hugging Face tensors it joins; the names
of the dimensions, whose sizes are ModelShape.dims, say how it is split. Where each block lies on which rank is
computed in layout.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlhf_mc.architectures.spec import ModelShape

SPLIT_DIMS = frozenset({"q", "kv", "ffn", "expert_ffn", "vocab"})
"""Dimensions that tensor parallelism splits; a tensor has at most one of them, others are replicated."""

Place = Literal["first", "layer", "expert", "last", "last of several"]
"""Which pipeline stages hold a parameter; `expert`: once per expert of a layer; `last of several`: the last, unless it
is also the first."""


@dataclass(frozen=True)
class Param:
    """One parameter as the engines hold it. `{i}` stands for the layer and `{e}` for the expert, each numbered as the
    holder does: over the whole model, or over what the rank has."""

    place: Place
    hf: Mapping[str, tuple[str, ...]]
    """The Hugging Face tensors that it joins along their split dimension, in order, each with its dimensions."""
    mcore: str
    """Name in Megatron-Core's local layer spec."""
    vllm: str | None
    """Name in vLLM; None: vLLM has no such parameter. The parameters of all experts of a layer lie
    in one tensor, whose first dimension counts the experts."""
    mcore_fused: str | None = None
    """Name in the Transformer Engine layer spec, which joins norms with the next linear; None: as `mcore`."""
    only_if: str | None = None
    """Attribute of ModelShape that must be true."""


_HF, _MC = "model.layers.{i}.", "decoder.layers.{i}."

PARAMS: tuple[Param, ...] = (
    Param(
        place="first",
        hf={"model.embed_tokens.weight": ("vocab", "hidden")},
        mcore="embedding.word_embeddings.weight",
        vllm="model.embed_tokens.weight",
    ),
    Param(
        place="layer",
        hf={_HF + "input_layernorm.weight": ("hidden",)},
        mcore=_MC + "input_layernorm.weight",
        mcore_fused=_MC + "self_attention.linear_qkv.layer_norm_weight",
        vllm=_HF + "input_layernorm.weight",
    ),
    Param(
        place="layer",
        hf={
            _HF + "self_attn.q_proj.weight": ("q", "hidden"),
            _HF + "self_attn.k_proj.weight": ("kv", "hidden"),
            _HF + "self_attn.v_proj.weight": ("kv", "hidden"),
        },
        mcore=_MC + "self_attention.linear_qkv.weight",
        vllm=_HF + "self_attn.qkv_proj.weight",
    ),
    Param(
        place="layer",
        hf={
            _HF + "self_attn.q_proj.bias": ("q",),
            _HF + "self_attn.k_proj.bias": ("kv",),
            _HF + "self_attn.v_proj.bias": ("kv",),
        },
        mcore=_MC + "self_attention.linear_qkv.bias",
        vllm=_HF + "self_attn.qkv_proj.bias",
        only_if="qkv_bias",
    ),
    Param(
        place="layer",
        hf={_HF + "self_attn.o_proj.weight": ("hidden", "q")},
        mcore=_MC + "self_attention.linear_proj.weight",
        vllm=_HF + "self_attn.o_proj.weight",
    ),
    Param(
        place="layer",
        hf={_HF + "self_attn.o_proj.bias": ("hidden",)},
        mcore=_MC + "self_attention.linear_proj.bias",
        vllm=_HF + "self_attn.o_proj.bias",
        only_if="o_bias",
    ),
    Param(
        place="layer",
        hf={_HF + "self_attn.q_norm.weight": ("head",)},
        mcore=_MC + "self_attention.q_layernorm.weight",
        vllm=_HF + "self_attn.q_norm.weight",
        only_if="qk_norm",
    ),
    Param(
        place="layer",
        hf={_HF + "self_attn.k_norm.weight": ("head",)},
        mcore=_MC + "self_attention.k_layernorm.weight",
        vllm=_HF + "self_attn.k_norm.weight",
        only_if="qk_norm",
    ),
    Param(
        place="layer",
        hf={_HF + "post_attention_layernorm.weight": ("hidden",)},
        mcore=_MC + "pre_mlp_layernorm.weight",
        mcore_fused=_MC + "mlp.linear_fc1.layer_norm_weight",
        vllm=_HF + "post_attention_layernorm.weight",
        only_if="is_dense",
    ),
    # The norm before a router is joined with nothing.
    Param(
        place="layer",
        hf={_HF + "post_attention_layernorm.weight": ("hidden",)},
        mcore=_MC + "pre_mlp_layernorm.weight",
        vllm=_HF + "post_attention_layernorm.weight",
        only_if="has_experts",
    ),
    Param(
        place="layer",
        hf={_HF + "mlp.gate.weight": ("experts", "hidden")},
        mcore=_MC + "mlp.router.weight",
        vllm=_HF + "mlp.gate.weight",
        only_if="has_experts",
    ),
    Param(
        place="expert",
        hf={
            _HF + "mlp.experts.{e}.gate_proj.weight": ("expert_ffn", "hidden"),
            _HF + "mlp.experts.{e}.up_proj.weight": ("expert_ffn", "hidden"),
        },
        mcore=_MC + "mlp.experts.local_experts.{e}.linear_fc1.weight",
        vllm=_HF + "mlp.experts.routed_experts.w13_weight",
        only_if="has_experts",
    ),
    Param(
        place="expert",
        hf={_HF + "mlp.experts.{e}.down_proj.weight": ("hidden", "expert_ffn")},
        mcore=_MC + "mlp.experts.local_experts.{e}.linear_fc2.weight",
        vllm=_HF + "mlp.experts.routed_experts.w2_weight",
        only_if="has_experts",
    ),
    Param(
        place="layer",
        hf={_HF + "mlp.gate_proj.weight": ("ffn", "hidden"), _HF + "mlp.up_proj.weight": ("ffn", "hidden")},
        mcore=_MC + "mlp.linear_fc1.weight",
        vllm=_HF + "mlp.gate_up_proj.weight",
        only_if="is_dense",
    ),
    Param(
        place="layer",
        hf={_HF + "mlp.gate_proj.bias": ("ffn",), _HF + "mlp.up_proj.bias": ("ffn",)},
        mcore=_MC + "mlp.linear_fc1.bias",
        vllm=_HF + "mlp.gate_up_proj.bias",
        only_if="mlp_bias",
    ),
    Param(
        place="layer",
        hf={_HF + "mlp.down_proj.weight": ("hidden", "ffn")},
        mcore=_MC + "mlp.linear_fc2.weight",
        vllm=_HF + "mlp.down_proj.weight",
        only_if="is_dense",
    ),
    Param(
        place="layer",
        hf={_HF + "mlp.down_proj.bias": ("hidden",)},
        mcore=_MC + "mlp.linear_fc2.bias",
        vllm=_HF + "mlp.down_proj.bias",
        only_if="mlp_bias",
    ),
    Param(
        place="last",
        hf={"model.norm.weight": ("hidden",)},
        mcore="decoder.final_layernorm.weight",
        vllm="model.norm.weight",
    ),
    Param(
        place="last",
        hf={"lm_head.weight": ("vocab", "hidden")},
        mcore="output_layer.weight",
        vllm="lm_head.weight",
        only_if="has_lm_head",
    ),
    # Megatron keeps a second copy of a shared embedding on the last of several stages.
    Param(
        place="last of several",
        hf={"model.embed_tokens.weight": ("vocab", "hidden")},
        mcore="output_layer.weight",
        vllm=None,
        only_if="shares_embeddings",
    ),
    Param(
        place="last",
        hf={"score.weight": ("one", "hidden")},
        mcore="output_layer.weight",
        vllm=None,
        only_if="value_head",
    ),
)


def params_of(shape: ModelShape) -> tuple[Param, ...]:
    """The rows of the table that this model has."""
    return tuple(p for p in PARAMS if p.only_if is None or getattr(shape, p.only_if))
