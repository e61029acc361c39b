"""Megatron-Core models built from a ModelShape: the transformer's settings, its layer
specification, and the policy (vocabulary output layer) or the value model (value head). The caller
loads the weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import layers as mcore_layers
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlhf_mc import platform
from rlhf_mc.architectures.attention import Attention
from rlhf_mc.architectures.delta_net import DeltaNet
from rlhf_mc.architectures.dense import Dense
from rlhf_mc.architectures.experts import Experts
from rlhf_mc.architectures.latent_attention import LatentAttention
from rlhf_mc.architectures.layer import Layer
from rlhf_mc.architectures.spec import ModelShape, padded_vocab_size
from rlhf_mc.config.model_schema import fsdp_config
from rlhf_mc.config.schema import MegatronConfig
from rlhf_mc.models import layers
from rlhf_mc.models.adapted_layers import add_adapters
from rlhf_mc.models.context_parallel import rotate_in_context
from rlhf_mc.models.expert_parts import (
    add_correction_biases,
    divide_output_biases,
    expert_settings,
)
from rlhf_mc.models.gated_delta_net import delta_net_settings, use_delta_net
from rlhf_mc.models.heads import add_value_head
from rlhf_mc.models.megatron_patches import (
    add_random_states,
    gate_on_cpu,
    mark_tensor_parallel,
    megatron_calls,
    multiply_as_matrices,
)
from rlhf_mc.models.packed_latents import PackedLatents, latent_settings, use_latents
from rlhf_mc.models.shared_prompts import attend_over_rows
from rlhf_mc.models.steps import Assembly, AssemblyStep
from rlhf_mc.models.transformer_engine import (
    fp8_settings,
    has_packed_attention,
    uses_transformer_engine,
)
from rlhf_mc.reshard.model_checks import check_layout, cp_comm_type
from rlhf_mc.reshard.placement import chunk_prefix
from rlhf_mc.topology.groups import ProcessGroups

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_pytorch_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "clamped_swiglu": quick_gelu,
}
_CLAMPED = {"activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0}


def transformer_config(shape: ModelShape, megatron: MegatronConfig) -> TransformerConfig:
    """Return Megatron-Core's settings for this model in this layout."""
    dtype = DTYPES[megatron.dtype]
    fused = uses_transformer_engine()
    of_blocks = _block_settings(shape, megatron)
    # A gathered parameter has no main_grad.
    of_strategy = {"gradient_accumulation_fusion": False} if fsdp_config(megatron) else {}
    kind = MLATransformerConfig if "kv_lora_rank" in of_blocks else TransformerConfig
    config = kind(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        add_bias_linear=shape.kinds[0].feed_forward.mlp_bias,
        layernorm_zero_centered_gamma=shape.zero_centered_norms and fused,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        context_parallel_size=megatron.context_parallel_size,
        cp_comm_type=cp_comm_type(shape, megatron),
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=megatron.virtual_pipeline_model_parallel_size,
        # With virtual pipeline chunks, P2P messages are not batched: of two stages, the next and
        # the previous are the same rank, which could receive activations of the forward pass as
        # gradients of the backward pass.
        overlap_p2p_comm=megatron.virtual_pipeline_model_parallel_size is not None,
        batch_p2p_comm=megatron.virtual_pipeline_model_parallel_size is None,
        sequence_parallel=megatron.sequence_parallel,
        # Set for the whole process (trainer.deterministic). The gradient of an embedding then has
        # one order of sums.
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        **_recomputation(shape, megatron),
        num_layers_in_first_pipeline_stage=megatron.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=megatron.num_layers_in_last_pipeline_stage,
        pipeline_dtype=dtype,
        # A device-wide synchronisation after P2P messages avoids a race that torch 1.13 fixed
        # (pytorch PR 82450).
        batch_p2p_sync=False,
        # Micro-batches are ragged: PlannedShapes knows the shape of each tensor that a stage
        # receives.
        variable_seq_lengths=True,
        # the default refuses ragged lengths, even where there are no experts
        moe_token_dispatcher_type="alltoall",
        # Weights are always read from a checkpoint.
        perform_initialization=False,
        use_cpu_initialization=not platform.use_cuda(),
        **{**of_blocks, **fusions(shape), **of_strategy},
        **fp8_settings(megatron),
    )
    # Checked when a config is built: Megatron-Core refuses experts that have biases and are split
    # over tensor-parallel ranks. divide_output_biases lets them be.
    config.expert_tensor_parallel_size = megatron.tensor_model_parallel_size
    return config


def _block_settings(shape: ModelShape, megatron: MegatronConfig) -> dict[str, Any]:
    """Return the settings of the layers' blocks."""
    activation = shape.kinds[0].feed_forward.activation
    settings: dict[str, Any] = {
        "activation_func": ACTIVATIONS[activation],
        **(_CLAMPED if activation == "clamped_swiglu" else {}),
    }
    for block in shape.blocks:
        match block:
            case Attention():
                settings |= layers.attention_settings(block)
            case LatentAttention():
                settings |= latent_settings(block, shape)
            case DeltaNet():
                settings |= delta_net_settings(block, shape)
            case Dense():
                settings["ffn_hidden_size"] = block.ffn_hidden_size
            case Experts():
                settings |= expert_settings(block, shape, megatron)
    return settings


def _recomputation(shape: ModelShape, megatron: MegatronConfig) -> dict[str, Any]:
    if megatron.recompute_granularity == "full":
        # One layer per recomputed block: the activations of a single layer exist at a time.
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return {
        "recompute_granularity": megatron.recompute_granularity,
        "recompute_modules": recompute_modules(shape),
    }


def recompute_modules(shape: ModelShape) -> list[str]:
    """Return the modules that selective recomputation recomputes: those that store most for their
    computation. Local attention stores its scores. Transformer Engine's stores nothing that its
    projections do not need anyway."""
    if not uses_transformer_engine():
        return ["core_attn"]
    # Megatron-Core has no module for the activation of a dense layer alone.
    modules = ["mlp"] if len(shape.expert_layers) < shape.num_layers else []
    if shape.expert_layers:
        # A dense layer's norms are part of its linear layers; the one before a router is a module.
        # Transformer Engine's experts are in one call.
        modules += ["layernorm", "moe_act"]
    return modules


class PackedGPT(GPTModel):
    """GPTModel on packed sequences, up to the final norm: the last stage returns hidden states [T,
    1, hidden], and heads.py applies the output layer at the logit positions."""

    qkv_format = "packed"
    """The format that its attention takes (PackedSequences)."""

    def forward(
        self, *args: Any, packed_seq_params: layers.PackedSequences, **kwargs: Any
    ) -> torch.Tensor:
        packed = packed_seq_params.for_format(
            "packed" if packed_seq_params.shared else self.qkv_format
        )
        out: torch.Tensor = super().forward(*args, packed_seq_params=packed, **kwargs)
        return out

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states

    def tie_embeddings_and_output_weights_state_dict(
        self,
        sharded: dict[str, Any],
        output_name: str,
        embedding_key: str,
        metadata: dict[str, Any],
    ) -> None:
        """Declare the last stage's copy of the embedding a replica of the first stage's, in
        checkpoints. The original takes the data-parallel rank from the global parallel_state, which
        is not initialised."""
        if self.pre_process or not self.post_process:
            return
        replicas = metadata["dp_cp_group"]
        sharded[output_name] = make_tp_sharded_tensor_for_checkpoint(
            self.shared_embedding_or_output_weight(),
            embedding_key,
            replica_id=(1, 0, replicas.rank()),
            allow_shape_mismatch=True,
            tp_group=self.tp_group,
            dp_cp_group=replicas,
        )

    def output_weight(self) -> torch.Tensor | None:
        """Return the embedding where it is also the output layer; None where the output layer has
        its own weight."""
        return (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else None
        )


def _attention(shape: ModelShape) -> Attention | LatentAttention:
    """Return the attention that some layers of the model have."""
    return next(block for block in shape.mixers if isinstance(block, Attention | LatentAttention))


def _qkv_format(config: TransformerConfig, shape: ModelShape) -> str:
    """Return the qkv_format of PackedSequences for the attention of this model's layers."""
    tp = config.tensor_model_parallel_size
    heads = config.num_attention_heads // tp
    kv_heads = max(1, config.num_query_groups // tp)
    attention = _attention(shape)
    value_dim = (
        attention.v_head_dim if isinstance(attention, LatentAttention) else attention.head_dim
    )
    sizes = (heads, kv_heads, (attention.head_dim, value_dim))
    context = config.cp_comm_type if config.context_parallel_size > 1 else None
    is_te = uses_transformer_engine() and has_packed_attention(
        config.params_dtype, *sizes, context, config.softmax_type
    )
    return "thd" if is_te else "packed"


def _block_spec(
    shape: ModelShape, config: TransformerConfig, layer_numbers: range, qkv_format: str
) -> TransformerBlockSubmodules:
    """Return the specification of these layers, each of its kind, and of the norm after the last
    one."""
    specs = {layer: _layer_spec(layer, shape, config, qkv_format) for layer in shape.kinds}
    norm = LayerNormImpl if uses_transformer_engine() else _local_norm(shape)
    return TransformerBlockSubmodules(
        layer_specs=[specs[shape.layers[i]] for i in layer_numbers], layer_norm=norm
    )


def _layer_spec(layer: Layer, shape: ModelShape, config: TransformerConfig, qkv_format: str) -> Any:
    """Return the specification of a layer."""
    mixer, feed_forward = layer
    is_latent = isinstance(mixer, LatentAttention)
    is_linear = isinstance(mixer, DeltaNet)
    parts = {
        "num_experts": feed_forward.num_experts or None,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm or is_latent,
        "multi_latent_attention": is_latent,
    }
    fused = uses_transformer_engine()
    spec = (
        get_gpt_layer_with_transformer_engine_spec(**parts)
        if fused
        else get_gpt_layer_local_spec(normalization="RMSNorm", **parts)
    )
    if is_linear:
        use_delta_net(spec)
    elif config.num_query_groups < config.tensor_model_parallel_size:
        spec.submodules.self_attention.module = layers.ReplicatedKVAttention
    if is_latent:
        use_latents(spec, _local_norm(shape), is_local=not fused)
    if qkv_format == "packed" and not is_linear:
        spec.submodules.self_attention.submodules.core_attention = layers.PackedAttention
    if fused:
        return spec
    if feed_forward.num_experts:
        # In checkpoints this norm is named after the linear layer that Transformer Engine fuses it
        # with. It fuses none before a router.
        spec.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")
    norm = _local_norm(shape)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    if config.qk_layernorm and not is_linear:
        attention = spec.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = norm
    return spec


def _local_norm(shape: ModelShape) -> type[torch.nn.Module]:
    return layers.ZeroCenteredRMSNorm if shape.zero_centered_norms else layers.RMSNorm


def scale_embeddings(assembly: Assembly) -> None:
    """Multiply the embeddings by sqrt(hidden_size), rounded to the model's type as in
    transformers.

    Reason: Megatron-Core's embedding has no factor."""
    if not (assembly.shape.scaled_embeddings and assembly.is_first):
        return
    # stays on the CPU: a kernel takes it by value, and no copy is waited for
    factor = torch.tensor(assembly.shape.hidden_size**0.5)
    assembly.model.embedding.register_forward_hook(
        lambda module, inputs, out: out * factor.to(out.dtype)
    )


def enable_input_gradients(frozen: torch.nn.Module) -> None:
    """Let a frozen module return a tensor that requires a gradient. A recomputed layer or MLP has
    gradients for its parameters only where its input requires one."""

    def require(module: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        return out.requires_grad_() if torch.is_grad_enabled() else out

    frozen.register_forward_hook(require)


def set_rope(assembly: Assembly) -> None:
    """Take the rotary frequencies from transformers.

    Reason: Megatron-Core has only some of transformers' scaling rules."""
    model = assembly.model
    shape = assembly.shape
    attention = _attention(shape)
    is_latent = isinstance(attention, LatentAttention)
    head_dim = getattr(attention, "rope_head_dim", attention.head_dim)
    rotary = layers.PackedRotaryEmbedding(
        head_dim,
        rotary_percent=shape.rotary_fraction,
        rotary_base=shape.rope_theta,
        use_cpu_initialization=model.config.use_cpu_initialization,
        cp_group=model.pg_collection.cp,
    )
    if not is_latent:
        model.rotary_pos_emb = rotary
    for module in model.modules():
        if isinstance(module, PackedLatents):
            module.rotary_pos_emb = rotary
    if shape.rope_scaling is None:
        return
    rule = ROPE_INIT_FUNCTIONS[shape.rope_scaling["rope_type"]]
    # The attributes of a model's configuration that transformers' rotary functions read.
    parameters = SimpleNamespace(
        rope_parameters={
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.rotary_fraction,
            **shape.rope_scaling,
        },
        hidden_size=shape.hidden_size,
        num_attention_heads=attention.num_heads,
        head_dim=head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        standardize_rope_params=lambda: None,  # they are in the standard form
    )
    # not torch's default, on which the layout check builds a model
    with torch.device(rotary.inv_freq.device):
        rotary.inv_freq, attention_scaling = rule(parameters, rotary.inv_freq.device)
    rotary.mscale = attention_scaling
    if attention_scaling != 1.0 and not is_latent:
        # Of sines and cosines. Megatron-Core's attention computes it from these settings, as 0.1 x
        # mscale x log(scaling factor) + 1; its fused kernel ignores it.
        model.config.yarn_rotary_scaling_factor = math.e
        model.config.yarn_mscale = 10.0 * (attention_scaling - 1.0)
        model.config.yarn_mscale_all_dim = 0.0
        model.config.apply_rope_fusion = False


def set_dtype(assembly: Assembly) -> None:
    """Convert the parameters to the model's type.

    Reason: modules of our own are float32."""
    assembly.model.to(DTYPES[assembly.megatron.dtype])


STEPS: tuple[AssemblyStep, ...] = (
    add_value_head,
    scale_embeddings,
    mark_tensor_parallel,
    add_adapters,
    multiply_as_matrices,
    gate_on_cpu,
    divide_output_biases,
    rotate_in_context,
    attend_over_rows,
    set_rope,
    set_dtype,
    add_correction_biases,  # after the conversion
)


def build_model(
    shape: ModelShape, megatron: MegatronConfig, groups: ProcessGroups, chunk: int = 0
) -> PackedGPT:
    """Return this rank's part of the model, or the virtual pipeline chunk `chunk` of it, on its
    device, with zero weights. Every rank must call it."""
    model = assemble_model(shape, megatron, groups, chunk)
    model.to(platform.device())
    with torch.no_grad():
        for param in model.parameters():
            # Uninitialised memory may hold NaN, and 0 * NaN is NaN: the vocabulary's padding rows
            # are never loaded.
            param.zero_()
    return model


def assemble_model(
    shape: ModelShape, megatron: MegatronConfig, groups: ProcessGroups, chunk: int = 0
) -> PackedGPT:
    """Return the modules of build_model, in their types, with arbitrary weights, on torch's default
    device. On "meta" they take no memory, and the process groups may be torch's "fake" ones."""
    check_layout(shape, megatron)
    first = groups.mesh.is_first_stage(groups.rank) and chunk == 0
    last = groups.is_last_stage and chunk == groups.mesh.vpp - 1
    vp_stage = chunk if groups.mesh.vpp > 1 else None
    with megatron_calls():
        if megatron.sequence_parallel or uses_transformer_engine():
            add_random_states()
        config = transformer_config(shape, megatron)
        qkv_format = _qkv_format(config, shape)
        layer_numbers = groups.mesh.chunk_layers(shape.num_layers, groups.coordinate.pp)[chunk]
        model = PackedGPT(
            config,
            _block_spec(shape, config, layer_numbers, qkv_format),
            vocab_size=padded_vocab_size(shape.vocab_size, groups.mesh.tp),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tie_embeddings and not shape.value_head,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            pg_collection=groups.collection,
            vp_stage=vp_stage,
        )
        model.qkv_format = qkv_format
        assembly = Assembly(model, shape, megatron, groups, layer_numbers, first, last)
        for step in STEPS:
            step(assembly)
    return model


def named_parameters(chunks: Sequence[PackedGPT]) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a rank's virtual pipeline chunks, by the names of reshard's
    Megatron-Core layout."""
    return {
        chunk_prefix(number, len(chunks)) + name: param
        for number, chunk in enumerate(chunks)
        for name, param in chunk.named_parameters()
    }


def fusions(shape: ModelShape) -> dict[str, Any]:
    """Return the settings of TransformerConfig for the fusions of this process's device."""
    transformer_engine = uses_transformer_engine()
    return {
        **(_fused_activation(shape) if platform.use_cuda() else {}),
        # Megatron-Core's fused rotary embedding is a kernel of Transformer Engine.
        "apply_rope_fusion": transformer_engine and isinstance(_attention(shape), Attention),
        # The matrix product that computes a weight's gradient adds it to main_grad. Local layers
        # need Apex's kernel.
        "gradient_accumulation_fusion": transformer_engine
        or (platform.use_cuda() and mcore_layers._grad_accum_fusion_available),
        # Otherwise Transformer Engine overwrites main_grad in the first micro-batch of a step,
        # instead of adding to it, and keeps an fp8 copy of every weight, which no offload would
        # free.
        "disable_parameter_transpose_cache": transformer_engine,
        # Without biases and dropout, the residual addition is one kernel as it is.
        "bias_dropout_fusion": False,
        # Of an attention, and of a norm (LayerNorm), that no model here uses.
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }


def _fused_activation(shape: ModelShape) -> dict[str, Any]:
    """Return the settings that fuse the activation with its gate, the bias, and an expert's
    weight."""
    if shape.kinds[0].feed_forward.activation in ("silu", "clamped_swiglu"):
        return {"bias_activation_fusion": True}
    if shape.expert_layers:
        return {}  # Megatron-Core has no fused function for F.gelu in experts
    # Megatron-Core's fused function for F.gelu is the tanh approximation.
    return {"bias_activation_fusion": True, "activation_func": torch.nn.functional.gelu}
