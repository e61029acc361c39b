"""Specifications of architectures: the traits of each supported model family, and the sizes and traits of one model.

A new family is an entry in FAMILIES. A new trait is a field of Traits; parameters.py or models/ then reads it from the
ModelShape. A new parameter is a row in parameters.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rlhf_mc.architectures import hf_config
from rlhf_mc.architectures.hf_config import flag, need, size
from rlhf_mc.config.errors import UserError

VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this. Megatron's padding follows it, so that vocabulary shards agree."""

LayerKind = Literal["dense", "moe"]
"""Kinds of layers: attention and a feed-forward network, or attention and a mixture of experts. parameters.py has the
parameters of each."""

Activation = Literal["silu", "gelu_pytorch_tanh"]
"""Activation functions, by transformers' names. models/gpt_model.py has the function of each."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Computations in which families differ."""

    qkv_bias: bool = False
    """The projections to queries, keys and values have biases."""
    o_bias: bool = False
    """The projection of the attention's output has a bias."""
    mlp_bias: bool = False
    """The projections of the dense feed-forward network have biases."""
    qk_norm: bool = False
    """Each head's query and key are normalised (RMSNorm)."""
    zero_centered_norms: bool = False
    """Norms multiply by 1 + weight."""
    scaled_embeddings: bool = False
    """Embeddings are multiplied by the square root of the hidden size."""


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
    activations: Mapping[str, Activation] = field(default_factory=lambda: {"silu": "silu"})
    """Supported values of hidden_act -> the function that each selects."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of the keys that a config.json may leave out."""

    def traits_in(self, config: Mapping[str, Any]) -> dict[str, bool]:
        """Return every trait of the model that a config.json describes, by name."""
        return asdict(self.traits) | {trait: flag(config, key) for trait, key in self.config_traits.items()}


_ATTENTION_BIAS = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_NO_WINDOW = {"use_sliding_window": False}
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
    ),
    "mistral": Family("MistralForCausalLM", defaults={"sliding_window": 4096, "num_key_value_heads": 8}),
    "gemma": Family(
        "GemmaForCausalLM",
        Traits(zero_centered_norms=True, scaled_embeddings=True),
        config_traits=_ATTENTION_BIAS,
        # The first published configurations say "gelu" and mean the tanh approximation, as vLLM reads them.
        activations={_GELU: _GELU, "gelu": _GELU},
        defaults={"tie_word_embeddings": True, "head_dim": 256, "hidden_act": _GELU, "num_key_value_heads": 16},
    ),
}


@dataclass(frozen=True, kw_only=True)
class ModelShape(Traits):
    """Sizes and traits of one model: everything that its parameters and its computation follow from.

    Checkpoints store the fields by name (checkpoint/training_state.py)."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_embeddings: bool
    norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    activation: Activation = "silu"
    num_experts: int = 0
    """Experts of each layer; 0: the layers are dense."""
    experts_per_token: int = 0
    expert_ffn_hidden_size: int = 0
    """Intermediate size of one expert; a dense layer has ffn_hidden_size."""
    norm_topk_prob: bool = False
    """The router's weights of a token's experts are normalised to sum to 1."""
    value_head: bool = False
    """A critic: `score.weight` [1, hidden] replaces the language-model head."""

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], value_head: bool = False) -> ModelShape:
        """Return the shape that a parsed config.json describes. Raise UserError for an unsupported value."""
        family_name = need(config, "model_type")
        if not isinstance(family_name, str) or family_name not in FAMILIES:
            raise hf_config.refused("model_type", family_name, f"known are {', '.join(FAMILIES)}")
        family = FAMILIES[family_name]
        config = {**family.defaults, **config}
        hf_config.check_keys(config, family_name)
        num_heads = size(config, "num_attention_heads")
        num_kv_heads = num_heads if config.get("num_key_value_heads") is None else size(config, "num_key_value_heads")
        if num_heads % num_kv_heads:
            raise UserError(
                f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        rope_theta, rope_scaling = hf_config.rope(config)
        return cls(
            family=family_name,
            num_layers=size(config, "num_hidden_layers"),
            hidden_size=size(config, "hidden_size"),
            ffn_hidden_size=size(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=hf_config.head_dim(config, family_name),
            vocab_size=size(config, "vocab_size"),
            tie_embeddings=flag(config, "tie_word_embeddings"),
            norm_eps=hf_config.positive(config, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=size(config, "max_position_embeddings"),
            activation=hf_config.activation(config, family.activations),
            value_head=value_head,
            **family.traits_in(config),
            **(_moe_sizes(config) if family.is_moe else {}),
        )

    def sequence_cost(self, num_tokens: int) -> float:
        """Return the compute of a sequence of n tokens, in units of one token of a short sequence.

        It is n + n^2 x (dimensions of all queries) / (weights of a layer that one token uses): a product with a weight
        takes 2 FLOPs per token, causal attention 2 n^2 FLOPs per query dimension."""
        q = self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        weights = self.hidden_size * (2 * q + 2 * kv + 3 * self.active_ffn_size)
        return num_tokens + num_tokens**2 * q / weights

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return ("moe" if self.has_experts else "dense",) * self.num_layers

    @property
    def has_experts(self) -> bool:
        """The layers are mixtures of experts."""
        return self.num_experts > 0

    @property
    def active_ffn_size(self) -> int:
        """The intermediate size that one token uses: of a dense layer, or of the token's experts together."""
        return self.experts_per_token * self.expert_ffn_hidden_size if self.has_experts else self.ffn_hidden_size

    @property
    def shares_embeddings(self) -> bool:
        """The language-model head is the embedding."""
        return self.tie_embeddings and not self.value_head

    def dims(self) -> dict[str, int]:
        """Return the sizes of the dimensions that parameters.py names."""
        return {
            "hidden": self.hidden_size,
            "q": self.num_heads * self.head_dim,
            "kv": self.num_kv_heads * self.head_dim,
            "head": self.head_dim,
            "ffn": self.ffn_hidden_size,
            "experts": self.num_experts,
            "expert_ffn": self.expert_ffn_hidden_size,
            "vocab": self.vocab_size,
            "one": 1,
        }


def _moe_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ModelShape that describe a mixture of experts. Raise UserError unless all layers have
    experts."""
    everywhere: dict[str, Any] = {"mlp_only_layers": [], "decoder_sparse_step": 1}
    for key, supported in everywhere.items():
        if config.get(key, supported) not in (supported, None):
            raise hf_config.refused(key, config[key], f"only {supported} is supported: experts in all layers")
    # transformers 5 writes num_local_experts, earlier versions num_experts.
    key = "num_experts" if config.get("num_experts") else "num_local_experts"
    if config.get("num_local_experts") not in (None, config.get(key)):
        other = f"num_experts is {config[key]}, and they are two names of one number"
        raise hf_config.refused("num_local_experts", config["num_local_experts"], other)
    num_experts = size(config, key)
    per_token = size(config, "num_experts_per_tok")
    if per_token > num_experts:
        raise UserError(f"config.json: num_experts_per_tok is {per_token}, more than {key}, which is {num_experts}")
    return {
        "num_experts": num_experts,
        "experts_per_token": per_token,
        "expert_ffn_hidden_size": size(config, "moe_intermediate_size"),
        "norm_topk_prob": flag(config, "norm_topk_prob"),
    }


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Return the rows of Megatron's embedding over all tensor-parallel ranks: the next multiple of lcm(64, tp_size)."""
    multiple = math.lcm(VOCAB_MULTIPLE, tp_size)
    return -(-vocab_size // multiple) * multiple
