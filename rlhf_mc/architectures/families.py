"""The model families: traits of each, and how its config.json and its checkpoints differ from
others.

A new family is an entry in FAMILIES. A new trait is a field of Traits; parameters.py or models/
then reads it from the ModelShape (spec.py). A new parameter is a row in parameters.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from rlhf_mc.architectures.delta_net import (
    DELTA_NET_DEFAULTS,
    check_gated_attention,
    check_qwen3_5_moe,
)
from rlhf_mc.architectures.gpt_oss_config import DEFAULT_ROPE, check_gpt_oss
from rlhf_mc.architectures.hf_config import flag

Activation = Literal["silu", "gelu_pytorch_tanh", "clamped_swiglu"]
"""Activation functions, by transformers' names, and gpt_oss': g sigmoid(1.702 g) (1 + clamp(up, -7,
7)), where g is min(gate, 7). models/gpt_model.py has the function of each."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Computations in which families differ."""

    qkv_bias: bool = False
    """The projections to queries, keys and values have biases."""
    o_bias: bool = False
    """The projection of the attention's output has a bias."""
    mlp_bias: bool = False
    """The projections of the feed-forward network have biases; of a mixture of experts also the
    router."""
    qk_norm: bool = False
    """Each head's query and key are normalised (RMSNorm)."""
    attention_gate: bool = False
    """The attention's output is multiplied by the sigmoid of gates. q_proj has for each head the
    rows of its query, then those of its gate."""
    sinks: bool = False
    """Each head has a sink: a trained logit beside those of the keys, whose probability goes to no
    value."""
    zero_centered_norms: bool = False
    """Norms multiply by 1 + weight."""
    scaled_embeddings: bool = False
    """Embeddings are multiplied by the square root of the hidden size."""
    shared_expert_gate: bool = False
    """The shared expert's output is multiplied by the sigmoid of a gate, one for each token."""
    split_delta_nets: bool = False
    """A delta net's projections are four tensors: to queries, keys and values together, to gates,
    and to the two numbers of each head."""
    sigmoid_router: bool = False
    """A token's experts have the largest sigmoids plus a correction bias without a gradient; their
    weights are the sigmoids."""


@dataclass(frozen=True)
class ExpertNames:
    """Names of a mixture of experts' modules in Hugging Face checkpoints."""

    block: str = "mlp"
    """The module in a layer that has the router and the experts, `experts`."""
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    """The module in the block with the expert that every token has."""
    in_one_tensor: Literal["columns", "halves"] | None = None
    """Files have all experts of a layer in one tensor (architectures/packed_experts.py), and gate
    and up in turn, or one after the other."""


@dataclass(frozen=True)
class Family:
    """The models of one `model_type`."""

    architecture: str
    """Class of the language model, by its name in transformers and vLLM."""
    traits: Traits = field(default_factory=Traits)
    config_traits: Mapping[str, str] = field(default_factory=dict)
    """Name of a trait -> key of config.json that sets it."""
    is_moe: bool = False
    """The layers are mixtures of experts."""
    expert_names: ExpertNames = field(default_factory=ExpertNames)
    expert_ffn_key: str = "moe_intermediate_size"
    """Key of config.json with the intermediate size of an expert."""
    activations: Mapping[str, Activation] = field(default_factory=lambda: {"silu": "silu"})
    """Supported values of hidden_act -> the function that each selects."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of the keys that a config.json may leave out."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that this family does not read from config.json."""
    rope_theta: float = 10000.0
    """Value of rope_theta where config.json has none."""
    rope: Mapping[str, Any] | None = None
    """Value of rope_parameters where config.json has neither it nor rope_scaling."""
    rotary_fraction: float = 1.0
    """Value of partial_rotary_factor where config.json has none; 1: the family's heads are rotated
    whole."""
    check: Callable[[Mapping[str, Any]], None] = lambda config: None
    """Further checks of config.json, which raise UserError."""
    has_latents: bool = False
    """Attention is multi-head latent attention."""
    has_delta_nets: bool = False
    """Some layers have a gated delta net in place of attention."""
    prefix: str = "model."
    """Begins the names in files that begin with "model." here: a model of images and text has its
    language model under another name, and its sizes in `text_config`."""

    @property
    def is_nested(self) -> bool:
        """The language model is a part of a model of images and text."""
        return self.prefix != "model."

    def traits_in(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return every trait of the model that a config.json describes, by name."""
        return asdict(self.traits) | {
            trait: flag(config, key) for trait, key in self.config_traits.items()
        }


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

FAMILIES = {
    "llama": Family("LlamaForCausalLM", config_traits={**_ATTENTION_BIAS, "mlp_bias": "mlp_bias"}),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        Traits(qkv_bias=True),
        defaults={"num_key_value_heads": 32, **_NO_WINDOW},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        Traits(qk_norm=True),
        config_traits=_ATTENTION_BIAS,
        defaults={"head_dim": 128, "num_key_value_heads": 32, **_NO_WINDOW},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        Traits(qk_norm=True),
        config_traits=_ATTENTION_BIAS,
        is_moe=True,
        defaults={"norm_topk_prob": False, "num_key_value_heads": 4, **_NO_WINDOW},
        fixed=_DENSE_FIRST,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        is_moe=True,
        expert_names=ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
        expert_ffn_key="intermediate_size",
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        fixed={"norm_topk_prob": True, **_SPARSE_STEP, **_DENSE_FIRST},
        rope_theta=1e6,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        Traits(sigmoid_router=True),
        config_traits={"qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"},
        is_moe=True,
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
        Traits(qkv_bias=True, o_bias=True, mlp_bias=True, sinks=True),
        is_moe=True,
        expert_names=ExpertNames(router="router", in_one_tensor="columns"),
        expert_ffn_key="intermediate_size",
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
        Traits(sigmoid_router=True),
        is_moe=True,
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
        has_latents=True,
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        Traits(
            qk_norm=True, attention_gate=True, zero_centered_norms=True, shared_expert_gate=True
        ),
        is_moe=True,
        expert_names=ExpertNames(shared="shared_expert"),
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 2,
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 512,
            **DELTA_NET_DEFAULTS,
            **_NO_WINDOW,
        },
        fixed=_DENSE_FIRST,
        rotary_fraction=0.25,
        check=check_gated_attention,
        has_delta_nets=True,
    ),
    "mistral": Family(
        "MistralForCausalLM", defaults={"sliding_window": 4096, "num_key_value_heads": 8}
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        Traits(zero_centered_norms=True, scaled_embeddings=True),
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
}

_QWEN3_5 = Family(
    "Qwen3_5ForCausalLM",
    Traits(qk_norm=True, attention_gate=True, zero_centered_norms=True, split_delta_nets=True),
    defaults={"head_dim": 256, "num_key_value_heads": 4, **DELTA_NET_DEFAULTS, **_NO_WINDOW},
    rotary_fraction=0.25,
    check=check_gated_attention,
    has_delta_nets=True,
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    traits=replace(_QWEN3_5.traits, shared_expert_gate=True),
    is_moe=True,
    expert_names=ExpertNames(shared="shared_expert"),
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
_NESTED = "model.language_model."
FAMILIES |= {
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen3_5": replace(_QWEN3_5, architecture="Qwen3_5ForConditionalGeneration", prefix=_NESTED),
    "qwen3_5_moe": replace(
        _QWEN3_5_MOE,
        architecture="Qwen3_5MoeForConditionalGeneration",
        expert_names=replace(_QWEN3_5_MOE.expert_names, in_one_tensor="halves"),
        prefix=_NESTED,
    ),
}
SAME_FAMILY = {"kimi_k2": "deepseek_v3"}
"""Other values of model_type -> the family that computes the same, as vLLM reads them."""
