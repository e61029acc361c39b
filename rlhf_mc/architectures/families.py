"""The model families: traits of each, and how its config.json and its checkpoints differ from
others.

A new family is an entry in FAMILIES. A new trait is a field of the block that has it (attention.py,
latent_attention.py, delta_net.py, dense.py, experts.py), which models/ then reads, or of ModelShape
(spec.py). A new parameter is a row of its block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlhf_mc.architectures.attention import attention_layers
from rlhf_mc.architectures.delta_net import (
    DELTA_NET_DEFAULTS,
    check_gated_attention,
    check_qwen3_5_moe,
    hybrid_layers,
)
from rlhf_mc.architectures.dense import dense_layers
from rlhf_mc.architectures.experts import ExpertNames, expert_layers
from rlhf_mc.architectures.gpt_oss_config import DEFAULT_ROPE, check_gpt_oss, windowed_layers
from rlhf_mc.architectures.hf_config import activation, flag
from rlhf_mc.architectures.latent_attention import latent_layers
from rlhf_mc.architectures.layer import Layer, Mixer

Activation = Literal["silu", "gelu_pytorch_tanh", "clamped_swiglu"]
"""Activation functions, by transformers' names, and gpt_oss': g sigmoid(1.702 g) (1 + clamp(up, -7,
7)), where g is min(gate, 7). models/gpt_model.py has the function of each."""


@dataclass(frozen=True)
class Family:
    """The models of one `model_type`."""

    architecture: str
    """Class of the language model, by its name in transformers and vLLM."""
    traits: Mapping[str, bool] = field(default_factory=dict)
    """Traits of blocks (architectures/layer.py), and of ModelShape; those that are left out have
    their defaults."""
    config_traits: Mapping[str, str] = field(default_factory=dict)
    """Name of a trait -> key of config.json that sets it."""
    mixers: Callable[[Mapping[str, Any], Mapping[str, Any]], Sequence[Mixer]] = attention_layers
    """Returns the mixer of each layer, of config.json and the traits."""
    expert_names: ExpertNames | None = None
    """Names of the mixtures of experts that layers have; None: they are dense."""
    activations: Mapping[str, Activation] = field(default_factory=lambda: {"silu": "silu"})
    """Supported values of hidden_act -> the function that each selects."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of the keys that a config.json may leave out."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that this family does not read from config.json."""
    engine_modules: Mapping[str, str] = field(default_factory=dict)
    """Modules that vLLM names otherwise -> its names."""
    rope_theta: float = 10000.0
    """Value of rope_theta where config.json has none."""
    rope: Mapping[str, Any] | None = None
    """Value of rope_parameters where config.json has neither it nor rope_scaling."""
    rotary_fraction: float = 1.0
    """Value of partial_rotary_factor where config.json has none; 1: the family's heads are rotated
    whole."""
    check: Callable[[Mapping[str, Any]], None] = lambda config: None
    """Further checks of config.json, which raise UserError."""
    prefix: str = "model."
    """Begins the names in files that begin with "model." here: a model of images and text has its
    language model under another name, and its sizes in `text_config`."""

    @property
    def is_nested(self) -> bool:
        """The language model is a part of a model of images and text."""
        return self.prefix != "model."

    def traits_in(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the traits of the model that a config.json describes, by name."""
        read = {trait: flag(config, key) for trait, key in self.config_traits.items()}
        return {**self.traits, **read, "activation": activation(config, self.activations)}

    def layers(self, config: Mapping[str, Any]) -> tuple[Layer, ...]:
        """Return the layers of the model that a config.json describes. Raise UserError for an
        unsupported value."""
        traits = self.traits_in(config)
        names = self.expert_names
        feed_forwards = (
            dense_layers(config, traits) if names is None else expert_layers(config, traits, names)
        )
        return tuple(map(Layer, self.mixers(config, traits), feed_forwards))


_ATTENTION_BIAS = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_NO_WINDOW = {"use_sliding_window": False}
_SPARSE_STEP = {"mlp_only_layers": [], "decoder_sparse_step": 1}
_DENSE_FIRST = {
    "first_k_dense_replace": 0,
    "n_routed_experts": None,
    "n_shared_experts": 0,
    "routed_scaling_factor": 1.0,
}
_GELU: Activation = "gelu_pytorch_tanh"

_QWEN3_5 = Family(
    "Qwen3_5ForCausalLM",
    {
        "qk_norm": True,
        "attention_gate": True,
        "zero_centered_norms": True,
        "split_delta_nets": True,
    },
    mixers=hybrid_layers,
    defaults={"head_dim": 256, "num_key_value_heads": 4, **DELTA_NET_DEFAULTS, **_NO_WINDOW},
    rotary_fraction=0.25,
    check=check_gated_attention,
)
_QWEN_EXPERTS = ExpertNames(shared="shared_expert")
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    traits={**_QWEN3_5.traits, "shared_expert_gate": True},
    expert_names=_QWEN_EXPERTS,
    defaults={
        **_QWEN3_5.defaults,
        "num_key_value_heads": 2,
        "norm_topk_prob": True,
        "intermediate_size": 512,  # no layer has it
        "shared_expert_intermediate_size": 512,
    },
    fixed={**_SPARSE_STEP, **_DENSE_FIRST},
    check=check_qwen3_5_moe,
)
_QWEN3_NEXT = replace(
    _QWEN3_5_MOE,
    architecture="Qwen3NextForCausalLM",
    traits={**_QWEN3_5_MOE.traits, "split_delta_nets": False},
    defaults={k: v for k, v in _QWEN3_5_MOE.defaults.items() if k != "intermediate_size"},
    fixed=_DENSE_FIRST,
    check=check_gated_attention,
)
_NESTED = "model.language_model."

FAMILIES = {
    "llama": Family("LlamaForCausalLM", config_traits={**_ATTENTION_BIAS, "mlp_bias": "mlp_bias"}),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"qkv_bias": True},
        defaults={"num_key_value_heads": 32, **_NO_WINDOW},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"qk_norm": True},
        config_traits=_ATTENTION_BIAS,
        defaults={"head_dim": 128, "num_key_value_heads": 32, **_NO_WINDOW},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"qk_norm": True},
        config_traits=_ATTENTION_BIAS,
        expert_names=ExpertNames(),
        defaults={"norm_topk_prob": False, "num_key_value_heads": 4, **_NO_WINDOW},
        fixed=_DENSE_FIRST,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        expert_names=ExpertNames(
            "block_sparse_moe", gate="w1", up="w3", down="w2", ffn_key="intermediate_size"
        ),
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        fixed={"norm_topk_prob": True, **_SPARSE_STEP, **_DENSE_FIRST},
        rope_theta=1e6,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        {"sigmoid_router": True},
        config_traits={"qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"},
        expert_names=ExpertNames(engine_float32=True),
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
        fixed=_SPARSE_STEP,
        rotary_fraction=0.5,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "sinks": True},
        mixers=windowed_layers,
        expert_names=ExpertNames(
            router="router", in_one_tensor="columns", ffn_key="intermediate_size"
        ),
        engine_modules={".self_attn.": ".attn.", "model.embed_tokens.": "model.embedding."},
        activations={"silu": "clamped_swiglu"},
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "num_experts_per_tok": 4,
        },
        fixed={"norm_topk_prob": True, **_SPARSE_STEP, **_DENSE_FIRST},
        rope_theta=150000.0,
        rope=DEFAULT_ROPE,
        check=check_gpt_oss,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {"sigmoid_router": True},
        expert_names=ExpertNames(),
        defaults={
            "num_key_value_heads": 128,
            "norm_topk_prob": True,
            "first_k_dense_replace": 3,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
        fixed=_SPARSE_STEP,
        mixers=latent_layers,
    ),
    "qwen3_next": _QWEN3_NEXT,
    "mistral": Family(
        "MistralForCausalLM", defaults={"sliding_window": 4096, "num_key_value_heads": 8}
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        {"zero_centered_norms": True, "scaled_embeddings": True},
        config_traits=_ATTENTION_BIAS,
        # The first published configurations say "gelu" and mean the tanh approximation, as vLLM
        # reads them.
        activations={_GELU: _GELU, "gelu": _GELU},
        defaults={
            "tie_word_embeddings": True,
            "head_dim": 256,
            "hidden_act": _GELU,
            "num_key_value_heads": 16,
        },
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen3_5": replace(_QWEN3_5, architecture="Qwen3_5ForConditionalGeneration", prefix=_NESTED),
    "qwen3_5_moe": replace(
        _QWEN3_5_MOE,
        architecture="Qwen3_5MoeForConditionalGeneration",
        expert_names=replace(_QWEN_EXPERTS, in_one_tensor="halves"),
        prefix=_NESTED,
    ),
}

SAME_FAMILY = {"kimi_k2": "deepseek_v3"}
"""Other values of model_type -> the family that computes the same, as vLLM reads them."""
