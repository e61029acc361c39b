"""What a model of a known family is made of: its sizes, and one table row per parameter.

A row says how the parameter is named in Megatron-Core and in vLLM and which Hugging Face tensors it
joins; the names of the dimensions say how it is split. Adding a family adds rows, not branches.
Where each block lies on which rank is computed in layout.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_mc.config.errors import UserError

VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this; Megatron's padding follows it so that shards agree."""


@dataclass(frozen=True)
class Family:
    """What one `model_type` leaves open: True or False, or the key of config.json that decides it."""

    qkv_bias: bool | str
    o_bias: bool | str
    mlp_bias: bool | str


FAMILIES = {
    "qwen2": Family(qkv_bias=True, o_bias=False, mlp_bias=False),
    "llama": Family(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
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
    value_head: bool = False
    """A critic: `score.weight` [1, hidden] in place of the language-model head."""

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], value_head: bool = False) -> ModelShape:
        """The shape that a parsed config.json describes. UserError for what is not supported."""
        family_name = _need(config, "model_type")
        if family_name not in FAMILIES:
            raise UserError(f"config.json: model_type is {family_name!r}; known are {', '.join(sorted(FAMILIES))}")
        if config.get("use_sliding_window"):
            raise UserError("config.json: use_sliding_window is true; only full attention is supported")
        if config.get("hidden_act", "silu") != "silu":
            raise UserError(f"config.json: hidden_act is {config['hidden_act']!r}; only 'silu' is supported")
        family = FAMILIES[family_name]
        num_heads, hidden_size = _size(config, "num_attention_heads"), _size(config, "hidden_size")
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            raise UserError(
                f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        rope_theta, rope_scaling = _rope(config)
        return cls(
            family=family_name,
            num_layers=_size(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            ffn_hidden_size=_size(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=config.get("head_dim") or hidden_size // num_heads,
            vocab_size=_size(config, "vocab_size"),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=_flag(config, family.qkv_bias),
            o_bias=_flag(config, family.o_bias),
            mlp_bias=_flag(config, family.mlp_bias),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=_size(config, "max_position_embeddings"),
            value_head=value_head,
        )

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
            "ffn": self.ffn_hidden_size,
            "vocab": self.vocab_size,
            "one": 1,
        }


def _need(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise UserError(f"config.json: {key} is missing")
    return config[key]


def _size(config: Mapping[str, Any], key: str) -> int:
    value = _need(config, key)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"config.json: {key} is {value!r}; expected a positive whole number")
    return value


def _flag(config: Mapping[str, Any], rule: bool | str) -> bool:
    return rule if isinstance(rule, bool) else bool(config.get(rule, False))


def _rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling or None): transformers 5 keeps both in `rope_parameters`, earlier ones in two keys."""
    merged = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    theta = merged.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = merged.get("rope_type", merged.get("type", "default"))
    return float(theta), None if kind == "default" else merged


SPLIT_DIMS = frozenset({"q", "kv", "ffn", "vocab"})
"""Dimensions that tensor parallelism splits; a tensor has at most one of them, others are replicated."""

Place = Literal["first", "layer", "last", "last of several"]
"""Which pipeline stages hold a parameter; `last of several`: the last, unless it is also the first."""


@dataclass(frozen=True)
class Param:
    """One parameter as the engines hold it. `{i}` stands for the layer."""

    place: Place
    hf: Mapping[str, tuple[str, ...]]
    """The Hugging Face tensors that it joins along their split dimension, in order, each with its dimensions."""
    mcore: str
    """Name in Megatron-Core's local layer spec."""
    vllm: str | None
    """Name in vLLM; None: vLLM has no such parameter."""
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
        hf={_HF + "post_attention_layernorm.weight": ("hidden",)},
        mcore=_MC + "pre_mlp_layernorm.weight",
        mcore_fused=_MC + "mlp.linear_fc1.layer_norm_weight",
        vllm=_HF + "post_attention_layernorm.weight",
    ),
    Param(
        place="layer",
        hf={_HF + "mlp.gate_proj.weight": ("ffn", "hidden"), _HF + "mlp.up_proj.weight": ("ffn", "hidden")},
        mcore=_MC + "mlp.linear_fc1.weight",
        vllm=_HF + "mlp.gate_up_proj.weight",
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


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Rows of Megatron's embedding over all its tensor-parallel ranks: the next multiple of lcm(64, tp_size)."""
    multiple = math.lcm(VOCAB_MULTIPLE, tp_size)
    return -(-vocab_size // multiple) * multiple
