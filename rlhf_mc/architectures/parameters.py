"""The table of parameters: one row for each parameter that a model may have.

A row has the parameter's names in Megatron-Core and vLLM, the Hugging Face tensors that it concatenates, and the names
of their dimensions, which decide the tensor-parallel split. ModelShape.dims has the sizes of the dimensions;
reshard/layout.py computes the shards of each rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlhf_mc.architectures.spec import ModelShape

SPLIT_DIMS = frozenset({"q", "kv", "ffn", "expert_ffn", "vocab"})
"""Dimensions that tensor parallelism splits. A tensor has at most one of them; a tensor with none is replicated."""

StagePlacement = Literal["first", "layer", "expert", "last", "last_if_not_first"]
"""The pipeline stage that holds a parameter: the first, the last, or the stage of its layer; `expert`: the stage of its
layer, one parameter per expert."""


@dataclass(frozen=True)
class Param:
    """One parameter of an engine. In names, `{i}` is the layer and `{e}` the expert: global indices in Hugging Face
    names, indices local to the rank in the engines' names."""

    stage: StagePlacement
    hf: Mapping[str, tuple[str, ...]]
    """Hugging Face tensors that it concatenates along their split dimension, in order -> dimensions of each."""
    mcore: str
    """Name in Megatron-Core's local layer spec."""
    vllm: str | None
    """Name in vLLM; None: vLLM has no such parameter. vLLM stacks a layer's experts in one tensor [experts, ...]."""
    mcore_te: str | None = None
    """Name in the Transformer Engine layer spec, which fuses norms with the next linear layer and has one module for
    the experts of a layer; None: as `mcore`."""
    only_if: str | None = None
    """Attribute of ModelShape (a trait, mostly) without which the model lacks the parameter."""


_HF = "model.layers.{i}."
_MC = "decoder.layers.{i}."

PARAMS: tuple[Param, ...] = (
    Param(
        stage="first",
        hf={"model.embed_tokens.weight": ("vocab", "hidden")},
        mcore="embedding.word_embeddings.weight",
        vllm="model.embed_tokens.weight",
    ),
    Param(
        stage="layer",
        hf={_HF + "input_layernorm.weight": ("hidden",)},
        mcore=_MC + "input_layernorm.weight",
        mcore_te=_MC + "self_attention.linear_qkv.layer_norm_weight",
        vllm=_HF + "input_layernorm.weight",
    ),
    Param(
        stage="layer",
        hf={
            _HF + "self_attn.q_proj.weight": ("q", "hidden"),
            _HF + "self_attn.k_proj.weight": ("kv", "hidden"),
            _HF + "self_attn.v_proj.weight": ("kv", "hidden"),
        },
        mcore=_MC + "self_attention.linear_qkv.weight",
        vllm=_HF + "self_attn.qkv_proj.weight",
    ),
    Param(
        stage="layer",
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
        stage="layer",
        hf={_HF + "self_attn.o_proj.weight": ("hidden", "q")},
        mcore=_MC + "self_attention.linear_proj.weight",
        vllm=_HF + "self_attn.o_proj.weight",
    ),
    Param(
        stage="layer",
        hf={_HF + "self_attn.o_proj.bias": ("hidden",)},
        mcore=_MC + "self_attention.linear_proj.bias",
        vllm=_HF + "self_attn.o_proj.bias",
        only_if="o_bias",
    ),
    Param(
        stage="layer",
        hf={_HF + "self_attn.q_norm.weight": ("head",)},
        mcore=_MC + "self_attention.q_layernorm.weight",
        vllm=_HF + "self_attn.q_norm.weight",
        only_if="qk_norm",
    ),
    Param(
        stage="layer",
        hf={_HF + "self_attn.k_norm.weight": ("head",)},
        mcore=_MC + "self_attention.k_layernorm.weight",
        vllm=_HF + "self_attn.k_norm.weight",
        only_if="qk_norm",
    ),
    Param(
        stage="layer",
        hf={_HF + "post_attention_layernorm.weight": ("hidden",)},
        mcore=_MC + "pre_mlp_layernorm.weight",
        mcore_te=_MC + "mlp.linear_fc1.layer_norm_weight",
        vllm=_HF + "post_attention_layernorm.weight",
        only_if="is_dense",
    ),
    # The norm before a router is not fused.
    Param(
        stage="layer",
        hf={_HF + "post_attention_layernorm.weight": ("hidden",)},
        mcore=_MC + "pre_mlp_layernorm.weight",
        vllm=_HF + "post_attention_layernorm.weight",
        only_if="has_experts",
    ),
    Param(
        stage="layer",
        hf={_HF + "mlp.gate.weight": ("experts", "hidden")},
        mcore=_MC + "mlp.router.weight",
        vllm=_HF + "mlp.gate.weight",
        only_if="has_experts",
    ),
    Param(
        stage="expert",
        hf={
            _HF + "mlp.experts.{e}.gate_proj.weight": ("expert_ffn", "hidden"),
            _HF + "mlp.experts.{e}.up_proj.weight": ("expert_ffn", "hidden"),
        },
        mcore=_MC + "mlp.experts.local_experts.{e}.linear_fc1.weight",
        mcore_te=_MC + "mlp.experts.linear_fc1.weight{e}",
        vllm=_HF + "mlp.experts.routed_experts.w13_weight",
        only_if="has_experts",
    ),
    Param(
        stage="expert",
        hf={_HF + "mlp.experts.{e}.down_proj.weight": ("hidden", "expert_ffn")},
        mcore=_MC + "mlp.experts.local_experts.{e}.linear_fc2.weight",
        mcore_te=_MC + "mlp.experts.linear_fc2.weight{e}",
        vllm=_HF + "mlp.experts.routed_experts.w2_weight",
        only_if="has_experts",
    ),
    Param(
        stage="layer",
        hf={_HF + "mlp.gate_proj.weight": ("ffn", "hidden"), _HF + "mlp.up_proj.weight": ("ffn", "hidden")},
        mcore=_MC + "mlp.linear_fc1.weight",
        vllm=_HF + "mlp.gate_up_proj.weight",
        only_if="is_dense",
    ),
    Param(
        stage="layer",
        hf={_HF + "mlp.gate_proj.bias": ("ffn",), _HF + "mlp.up_proj.bias": ("ffn",)},
        mcore=_MC + "mlp.linear_fc1.bias",
        vllm=_HF + "mlp.gate_up_proj.bias",
        only_if="mlp_bias",
    ),
    Param(
        stage="layer",
        hf={_HF + "mlp.down_proj.weight": ("hidden", "ffn")},
        mcore=_MC + "mlp.linear_fc2.weight",
        vllm=_HF + "mlp.down_proj.weight",
        only_if="is_dense",
    ),
    Param(
        stage="layer",
        hf={_HF + "mlp.down_proj.bias": ("hidden",)},
        mcore=_MC + "mlp.linear_fc2.bias",
        vllm=_HF + "mlp.down_proj.bias",
        only_if="mlp_bias",
    ),
    Param(
        stage="last",
        hf={"model.norm.weight": ("hidden",)},
        mcore="decoder.final_layernorm.weight",
        vllm="model.norm.weight",
    ),
    Param(
        stage="last",
        hf={"lm_head.weight": ("vocab", "hidden")},
        mcore="output_layer.weight",
        vllm="lm_head.weight",
        only_if="has_lm_head",
    ),
    # Megatron-Core replicates a tied embedding on the last stage.
    Param(
        stage="last_if_not_first",
        hf={"model.embed_tokens.weight": ("vocab", "hidden")},
        mcore="output_layer.weight",
        vllm=None,
        only_if="shares_embeddings",
    ),
    Param(
        stage="last",
        hf={"score.weight": ("one", "hidden")},
        mcore="output_layer.weight",
        vllm=None,
        only_if="value_head",
    ),
)


def model_params(shape: ModelShape) -> tuple[Param, ...]:
    """Return the rows of the parameters that this model has."""
    return tuple(p for p in PARAMS if p.only_if is None or getattr(shape, p.only_if))
