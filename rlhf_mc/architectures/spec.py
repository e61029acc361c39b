"""What a model of a known family is made of: its sizes, and what it computes otherwise than others.

Adding a family adds an entry to FAMILIES, and to parameters.py the rows of the parameters that no family has yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_mc.architectures import hf_config
from rlhf_mc.architectures.hf_config import flag, need, size
from rlhf_mc.config.errors import UserError

VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this; Megatron's padding follows it so that shards agree."""


@dataclass(frozen=True)
class Family:
    """What one `model_type` leaves open. Flags are True, False, or the key of config.json that decides."""

    architecture: str
    """The class of its language models, by which vLLM goes."""
    qkv_bias: bool | str
    o_bias: bool | str
    mlp_bias: bool | str
    qk_norm: bool = False
    """Each head's query and key pass through a norm of their own."""
    zero_centered_norms: bool = False
    """Norms multiply by 1 + weight."""
    scaled_embeddings: bool = False
    """Embeddings are multiplied by the square root of the hidden size."""
    experts: bool = False
    """The layers are mixtures of experts."""
    activations: Mapping[str, str] = field(default_factory=lambda: {"silu": "silu"})
    """What hidden_act may be -> the function that it means, by the name that transformers gives it."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a config.json means that leaves the key out."""


_GELU = "gelu_pytorch_tanh"
_NO_WINDOW = {"use_sliding_window": False}

FAMILIES = {
    "llama": Family("LlamaForCausalLM", qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        defaults={"num_key_value_heads": 32, **_NO_WINDOW},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias=False,
        qk_norm=True,
        defaults={"head_dim": 128, "num_key_value_heads": 32, **_NO_WINDOW},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias=False,
        qk_norm=True,
        experts=True,
        defaults={"norm_topk_prob": False, "num_key_value_heads": 4, **_NO_WINDOW},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias=False,
        zero_centered_norms=True,
        scaled_embeddings=True,
        # The first published configurations say "gelu" and mean the approximation, as vLLM takes it.
        activations={_GELU: _GELU, "gelu": _GELU},
        defaults={"tie_word_embeddings": True, "head_dim": 256, "hidden_act": _GELU, "num_key_value_heads": 16},
    ),
}


@dataclass(frozen=True)
class ModelShape:
    """All that decides which tensors a model has, and what the builder of the model needs beside them."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_embeddings: bool
    qkv_bias: bool
    norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    zero_centered_norms: bool = False
    scaled_embeddings: bool = False
    activation: str = "silu"
    num_experts: int = 0
    """Of each layer; 0: the layers are dense."""
    experts_per_token: int = 0
    expert_ffn_hidden_size: int = 0
    """Of one expert; ffn_hidden_size is that of a dense layer."""
    norm_topk_prob: bool = False
    """A token's weights of its experts are made to sum to 1."""
    value_head: bool = False
    """A critic: `score.weight` [1, hidden] in place of the language-model head."""

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], value_head: bool = False) -> ModelShape:
        """Return the shape that a parsed config.json describes. UserError for what is not supported."""
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
            qkv_bias=_flag(config, family.qkv_bias),
            o_bias=_flag(config, family.o_bias),
            mlp_bias=_flag(config, family.mlp_bias),
            norm_eps=hf_config.positive(config, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=size(config, "max_position_embeddings"),
            qk_norm=family.qk_norm,
            zero_centered_norms=family.zero_centered_norms,
            scaled_embeddings=family.scaled_embeddings,
            activation=hf_config.activation(config, family.activations),
            value_head=value_head,
            **(_experts(config) if family.experts else {}),
        )

    def sequence_cost(self, num_tokens: int) -> float:
        """What a sequence costs to compute, in tokens of a short one: n + n^2 x (width of the queries) / (a layer's
        weights that a token meets). The products with the weights take 2 FLOPs for each of them and token, causal
        attention 2 n^2 for each query dimension."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        ffn = self.experts_per_token * self.expert_ffn_hidden_size if self.has_experts else self.ffn_hidden_size
        weights = self.hidden_size * (2 * q + 2 * kv + 3 * ffn)
        return num_tokens + num_tokens**2 * q / weights

    @property
    def is_dense(self) -> bool:
        """The layers have one feed-forward network each."""
        return self.num_experts == 0

    @property
    def has_experts(self) -> bool:
        """The layers are mixtures of experts."""
        return self.num_experts > 0

    @property
    def has_lm_head(self) -> bool:
        """There is an `lm_head.weight` of its own."""
        return not self.tie_embeddings and not self.value_head

    @property
    def shares_embeddings(self) -> bool:
        """The language-model head is the embedding."""
        return self.tie_embeddings and not self.value_head

    def dims(self) -> dict[str, int]:
        """Sizes of the dimensions that the table names."""
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


def _flag(config: Mapping[str, Any], rule: bool | str) -> bool:
    return rule if isinstance(rule, bool) else flag(config, rule)


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelShape that describe a mixture of experts."""
    everywhere: dict[str, Any] = {"mlp_only_layers": [], "decoder_sparse_step": 1}
    for key, supported in everywhere.items():
        if config.get(key, supported) not in (supported, None):
            raise hf_config.refused(key, config[key], f"only {supported} is supported: experts in all layers")
    # transformers 5 writes num_local_experts, earlier ones num_experts.
    key = "num_experts" if config.get("num_experts") else "num_local_experts"
    if config.get("num_local_experts") not in (None, config.get(key)):
        other = f"num_experts is {config[key]}, and they are two names of one number"
        raise hf_config.refused("num_local_experts", config["num_local_experts"], other)
    num_experts, per_token = size(config, key), size(config, "num_experts_per_tok")
    if per_token > num_experts:
        raise UserError(f"config.json: num_experts_per_tok is {per_token}, more than {key}, which is {num_experts}")
    return {
        "num_experts": num_experts,
        "experts_per_token": per_token,
        "expert_ffn_hidden_size": size(config, "moe_intermediate_size"),
        "norm_topk_prob": flag(config, "norm_topk_prob"),
    }


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Rows of Megatron's embedding over all its tensor-parallel ranks: the next multiple of lcm(64, tp_size)."""
    multiple = math.lcm(VOCAB_MULTIPLE, tp_size)
    return -(-vocab_size // multiple) * multiple
