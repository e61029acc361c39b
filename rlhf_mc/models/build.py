"""Builds Megatron-Core models from a ModelShape: the transformer's settings, its layer specification, and the
policy (vocabulary output layer) or the value model (value head). Weights are filled in by the caller.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlhf_mc import platform
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import MegatronConfig
from rlhf_mc.models.attention import PackedAttention, PackedRotaryEmbedding
from rlhf_mc.models.heads import ValueHead
from rlhf_mc.reshard.families import ModelShape, padded_vocab_size
from rlhf_mc.reshard.layout import check_mcore
from rlhf_mc.topology.groups import Groups

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SUPPORTED_ROPE = ("default", "linear", "llama3")


def uses_transformer_engine() -> bool:
    """Whether layers come from Transformer Engine (on GPUs that have it) or from Megatron-Core's local modules."""
    return platform.use_cuda() and importlib.util.find_spec("transformer_engine") is not None


def check_layout(shape: ModelShape, megatron: MegatronConfig) -> None:
    """Refuses, before anything is built, a layout that the model cannot be cut into."""
    check_mcore(shape, megatron.tensor_model_parallel_size)
    pp = megatron.pipeline_model_parallel_size
    if shape.num_layers % pp:
        fit = [n for n in range(1, shape.num_layers + 1) if shape.num_layers % n == 0]
        raise UserError(
            f"actor.megatron.pipeline_model_parallel_size: {pp} does not divide the model's {shape.num_layers} "
            f"layers; what divides them: {', '.join(map(str, fit))}"
        )
    if shape.o_bias != shape.mlp_bias:
        raise UserError(
            f"config.json: attention_bias is {shape.o_bias} and mlp_bias is {shape.mlp_bias}; "
            "Megatron-Core has both or none"
        )
    rope_type = (shape.rope_scaling or {}).get("rope_type", "default")
    if rope_type not in SUPPORTED_ROPE:
        raise UserError(f"model.path: rope_type {rope_type!r} is not supported; supported: {', '.join(SUPPORTED_ROPE)}")


def transformer_config(shape: ModelShape, megatron: MegatronConfig) -> TransformerConfig:
    """Megatron-Core's settings for this model in this layout."""
    dtype = DTYPES[megatron.dtype]
    fused = uses_transformer_engine()
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=shape.o_bias,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        pipeline_dtype=dtype,
        # Micro-batches are ragged: stages tell each other the shape before they send.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # no experts here, but the default refuses ragged lengths
        # Weights are always read from a checkpoint: nothing to initialise, no random state to keep.
        perform_initialization=False,
        use_cpu_initialization=not platform.use_cuda(),
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=fused,
    )


class PackedGPT(GPTModel):
    """GPTModel on packed sequences that ends with the final norm: the last stage returns hidden states
    [T, 1, hidden], and heads.py applies the output layer to the positions it needs."""

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states

    def output_weight(self) -> torch.Tensor | None:
        """The embedding where it serves as output layer too; None where the output layer has its own weight."""
        return self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None


def _layer_spec() -> Any:
    if uses_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec()
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return spec


def _set_rope(model: PackedGPT, shape: ModelShape) -> None:
    """Takes the rotary frequencies from transformers, whose scaling rules Megatron-Core has only in part."""
    scaling = shape.rope_scaling or {}
    rope_type = scaling.get("rope_type", "default")
    if not uses_transformer_engine():
        model.rotary_pos_emb.__class__ = PackedRotaryEmbedding
    if rope_type == "default":
        return
    config = _RopeParameters(shape)
    inv_freq, attention_scaling = ROPE_INIT_FUNCTIONS[rope_type](config, model.rotary_pos_emb.inv_freq.device)
    assert attention_scaling == 1.0
    model.rotary_pos_emb.inv_freq = inv_freq


class _RopeParameters:
    """What transformers' rotary functions read of a model's configuration."""

    def __init__(self, shape: ModelShape) -> None:
        self.rope_parameters = {"rope_theta": shape.rope_theta, **(shape.rope_scaling or {})}
        self.hidden_size = shape.hidden_size
        self.num_attention_heads = shape.num_heads
        self.head_dim = shape.head_dim
        self.max_position_embeddings = shape.max_position_embeddings

    def standardize_rope_params(self) -> None:
        """transformers calls this; the parameters are standard already."""


def _mark_tensor_parallel(model: PackedGPT) -> None:
    """Marks which parameters are spread over tensor-parallel ranks. Megatron-Core does so only while it initialises
    weights, and counts an unmarked parameter once in the gradient norm, as if every rank held the same."""
    for module in model.modules():
        dim = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}.get(type(module))
        if dim is None:
            continue
        for name, param in module.named_parameters(recurse=False):
            if name == "weight" or (name == "bias" and dim == 0):
                for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
                    if hasattr(param, attribute):
                        delattr(param, attribute)
                set_tensor_model_parallel_attributes(param, True, dim, 1)


def build_model(shape: ModelShape, megatron: MegatronConfig, groups: Groups) -> PackedGPT:
    """This rank's part of the model, on its device, weights not yet set. Every rank must call it."""
    check_layout(shape, megatron)
    with platform.megatron():
        model = PackedGPT(
            transformer_config(shape, megatron),
            _layer_spec(),
            vocab_size=padded_vocab_size(shape.vocab_size, groups.mesh.tp),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=groups.mesh.is_first_stage(groups.rank),
            post_process=groups.is_last_stage,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tie_embeddings and not shape.value_head,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            pg_collection=groups.collection,
        )
        if shape.value_head and groups.is_last_stage:
            model.output_layer = ValueHead(shape.hidden_size)
        _mark_tensor_parallel(model)
        _set_rope(model, shape)
        model.to(platform.device(), DTYPES[megatron.dtype])
        with torch.no_grad():
            for param in model.parameters():
                # Memory as it comes may hold NaN, and the vocabulary's padding rows are never filled: 0 * NaN is NaN.
                param.zero_()
    return model
