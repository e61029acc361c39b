"""The keys of config.json, older spellings included, for trainer, planner and converters. vLLM
reads the same file.

Of some keys only some values are supported (RESTRICTED). Those that change no computation here,
each with the reason, are in tests/unit/architectures/config_keys.py: a key that transformers or
vLLM reads for a supported family must be there, or be read here. Others may have any value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rlhf_mc.config.errors import UserError

_Name = TypeVar("_Name", bound=str)

LLAMA_LIKE = frozenset({"llama", "mistral"})
"""Families that vLLM builds from its llama layers."""
GLM = frozenset({"glm4_moe"})
WINDOWED = frozenset({"gpt_oss"})
"""Families in which every other layer has a sliding window."""
QWEN3_5 = frozenset({"qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"})
HYBRID = frozenset({"qwen3_next"}) | QWEN3_5
"""Families in which some layers have a gated delta net; delta_net.py checks which."""
LATENT = frozenset({"deepseek_v3"})
"""Families with multi-head latent attention, whose keys latent.py reads."""
QWEN = frozenset({"qwen2", "qwen3", "qwen3_moe"}) | HYBRID
"""Families whose sliding_window takes effect only if use_sliding_window is true."""


@dataclass(frozen=True)
class Restriction:
    """The supported values of a key, besides null."""

    values: tuple[Any, ...]
    reason: str
    families: frozenset[str] | None = None
    """Families for which the key is read; None: all."""


ROTATED = Restriction((1,), "partial rotary embeddings differ between transformers and vLLM")
_CAUSAL = "attention is causal"
_QUANTIZED = Restriction(
    (), "convert quantized weights to bfloat16, float16 or float32, and leave the key out"
)
_NOAUX = "experts are chosen by sigmoids and a correction bias"
_SPARSE = Restriction((), "attention is full", LATENT)
_NESTED = Restriction((), "the model must be a plain language model")
_OTHER_MODEL = Restriction((), "no supported family computes it")
_KV_HEADS = Restriction((), "vLLM reads it as the number of KV heads; use num_key_value_heads")

RESTRICTED: Mapping[str, Restriction] = {
    "attention_dropout": Restriction((0,), "training runs without dropout"),
    "bias": Restriction((False,), "biases are set by attention_bias and mlp_bias", LLAMA_LIKE),
    "is_causal": Restriction((True,), _CAUSAL),
    "use_bidirectional_attention": Restriction((False,), _CAUSAL),
    "is_mm_prefix_lm": Restriction((False,), _CAUSAL),
    "is_encoder_decoder": Restriction((False,), "the model must be a decoder"),
    "logit_scale": Restriction((1,), "logits are not scaled"),
    "head_dtype": Restriction(("model",), "the head has the dtype of the other weights"),
    "n_group": Restriction((1,), "experts are chosen among all", GLM),
    "topk_group": Restriction((1,), "experts are chosen among all", GLM),
    **{
        f"index_{x}": _SPARSE
        for x in ("head_dim", "n_heads", "skip_topk_offset", "topk", "topk_freq", "topk_pattern")
    },
    "indexer_rope_interleave": _SPARSE,
    "moe_layer_freq": Restriction(
        (1,), "all layers after the first dense ones have experts", LATENT
    ),
    "moe_router_dtype": Restriction(("float32",), "routers compute in float32", LATENT),
    "scoring_func": Restriction(("sigmoid",), _NOAUX, LATENT),
    "topk_method": Restriction(("noaux_tc",), _NOAUX, LATENT),
    "attn_output_gate": Restriction((True,), "attention has an output gate", HYBRID),
    "layer_scale": Restriction((False,), "the outputs of layers are not scaled", HYBRID),
    "output_gate_type": Restriction(
        ("silu", "swish"), "transformers gates a delta net's output by silu", HYBRID
    ),
    "qk_norm": Restriction(
        (False,), "the family has no norms of queries and keys", frozenset({"qwen2"})
    ),
    "rotary_pct": ROTATED,
    "router_jitter_noise": Restriction((0,), "vLLM does not add it to the router's inputs"),
    "rotary_emb_fraction": ROTATED,
    "rotary_emb_base": Restriction((), "use rope_theta"),
    "rope_dim": ROTATED,
    "mrope_section": Restriction((), "a token has one position"),
    "xdrope_section": Restriction((), "a token has one position"),
    "dual_chunk_attention_config": Restriction((), "attention is full"),
    "rswa_window": Restriction((), "attention is full"),
    "attn_type_list": Restriction((), "all layers have the same attention"),
    "block_configs": Restriction((), "all layers have the same configuration"),
    "per_layer_config": Restriction((), "all layers have the same configuration"),
    "swiglu_alpha": Restriction((1.702,), "vLLM and Megatron-Core compute no other"),
    "swiglu_limit": Restriction((7,), "vLLM computes no other"),
    "target_layer_count": Restriction((), "draft models are not supported"),
    "shared_expert_intermediate_size": Restriction(
        (0,), "shared experts are not supported", frozenset({"qwen3_moe"})
    ),
    "speculators_config": Restriction((), "draft models are not supported"),
    "quantization_config": _QUANTIZED,
    "compression_config": _QUANTIZED,
    "configuration_files": Restriction((), "only config.json is read"),
    "n_head_kv": _KV_HEADS,
    "num_kv_heads": _KV_HEADS,
    "multi_query_group_num": _KV_HEADS,
    "num_attention_groups": _KV_HEADS,
    "llm_config": _NESTED,
    "text_config": _NESTED,
    "vision_config": _NESTED,
    "encoder_config": _NESTED,
    "thinker_config": _NESTED,
    # Scales and caps in the layers of other models.
    "ada_rms_norm_t_cond": Restriction((False,), "no supported family computes it"),
    "attention_multiplier": _OTHER_MODEL,
    "attn_logit_softcapping": _OTHER_MODEL,
    "embedding_multiplier": _OTHER_MODEL,
    "final_logit_softcapping": _OTHER_MODEL,
    "llama_4_scaling": _OTHER_MODEL,
    "logits_scaling": _OTHER_MODEL,
    "logits_soft_cap": _OTHER_MODEL,
    "query_pre_attn_scalar": _OTHER_MODEL,
    "residual_multiplier": _OTHER_MODEL,
    "scale_depth": _OTHER_MODEL,
    "scale_emb": _OTHER_MODEL,
}
"""Keys of which only some values are supported."""


def language_config(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return the configuration of the language model in a model of images and text. Both libraries
    tie embeddings by the outer key."""
    text = need(config, "text_config")
    if (
        not isinstance(text, Mapping)
        or text.get("model_type", f"{family}_text") != f"{family}_text"
    ):
        raise refused("text_config", text, f"expected an object with model_type {family}_text")
    outer = {key: config[key] for key in ("tie_word_embeddings", *_OUTER) if key in config}
    return {**text, **outer, "model_type": family}


_OUTER = ("quantization_config", "compression_config")
"""Keys beside tie_word_embeddings that a model of images and text has outside text_config."""


def check_keys(config: Mapping[str, Any], family: str) -> None:
    """Raise UserError for an unsupported value of a key in `RESTRICTED`, and for keys that
    contradict each other."""
    for key, rule in RESTRICTED.items():
        value = config.get(key)
        if value is None or (rule.families is not None and family not in rule.families):
            continue
        if value not in rule.values:
            supported = (
                f"only {rule.values[0]!r} is supported" if rule.values else "it is not supported"
            )
            raise refused(key, value, f"{supported}: {rule.reason}")
    if family in GLM | LATENT and not flag(config, "norm_topk_prob"):
        raise refused(
            "norm_topk_prob", False, "Megatron-Core normalises the weights of a sigmoid router"
        )
    _check_windows(config, family)
    _check_biases(config, family)


def _check_windows(config: Mapping[str, Any], family: str) -> None:
    """Raise UserError for a sliding window. qwen models have one if use_sliding_window is true,
    others if sliding_window is not null."""
    only_full = "only full attention is supported"
    if family in WINDOWED:
        return  # gpt_oss_config.py has checked them
    if family in QWEN:
        if flag(config, "use_sliding_window"):
            raise refused("use_sliding_window", True, only_full)
    elif config.get("sliding_window") is not None:
        missing = f"a {family} config without the key may have one"
        raise refused(
            "sliding_window",
            config["sliding_window"],
            f'{only_full}, "sliding_window": null ({missing})',
        )
    types = config.get("layer_types")
    layers = size(config, "num_hidden_layers")
    full = (
        isinstance(types, list)
        and len(types) == layers
        and all(kind == "full_attention" for kind in types)
    )
    if types is not None and not full and family not in HYBRID:
        raise refused("layer_types", types, f'{only_full}: {layers} times "full_attention"')


def _check_biases(config: Mapping[str, Any], family: str) -> None:
    """Raise UserError for biases that vLLM's llama layers would have and transformers' layers do
    not."""
    attention = flag(config, "attention_bias")
    if family in LLAMA_LIKE and "qkv_bias" in config and flag(config, "qkv_bias") != attention:
        raise refused(
            "qkv_bias",
            config["qkv_bias"],
            f"attention_bias is {attention}, and vLLM prefers qkv_bias",
        )
    for key in ("attention_bias", "mlp_bias"):
        if family == "mistral" and flag(config, key):
            raise refused(key, True, "a mistral model has no biases, and vLLM would add them")


def check_architecture(config: Mapping[str, Any], family: str, class_name: str) -> None:
    """Raise UserError if `architectures`, which vLLM builds the model by, contradicts
    model_type."""
    names = config.get("architectures") or [class_name]
    if names != [class_name]:
        raise refused(
            "architectures",
            names,
            f"vLLM selects the model by it; model_type {family} means [{class_name!r}]",
        )


def head_dim(config: Mapping[str, Any], family: str) -> int:
    """Return the width of a head: head_dim, or hidden_size / num_attention_heads. Raise UserError
    if vLLM would use another width."""
    hidden = size(config, "hidden_size")
    heads = size(config, "num_attention_heads")
    # transformers refuses such a llama
    if hidden % heads and (config.get("head_dim") is None or family == "llama"):
        raise UserError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
        )
    if family in GLM:
        need(config, "head_dim")  # vLLM has no default
    dim = hidden // heads if config.get("head_dim") is None else size(config, "head_dim")
    if family == "qwen2" and dim * heads != hidden:
        wanted = f"hidden_size / num_attention_heads, {hidden // heads}"
        raise refused("head_dim", dim, f"vLLM gives a qwen2 model heads of {wanted}")
    return dim


def activation(config: Mapping[str, Any], known: Mapping[str, _Name]) -> _Name:
    """Return the activation that hidden_act selects. `known`: supported values -> transformers'
    names."""
    name = config.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in known:
        raise refused("hidden_act", name, f"only {' or '.join(map(repr, known))} is supported")
    # Gemma's second key: vLLM prefers it, transformers no longer reads it.
    second = config.get("hidden_activation")
    if second is not None and second != known[name]:
        raise refused("hidden_activation", second, f"only {known[name]!r} is supported")
    return known[name]


LIMIT = 1 << 31
"""Upper bound for sizes; no model comes near it."""


def need(config: Mapping[str, Any], key: str, prefix: str = "") -> Any:
    """Return the value of a key. Raise UserError if it is missing or null."""
    if config.get(key) is None:
        raise UserError(f"config.json: {prefix}{key} is missing")
    return config[key]


def size(config: Mapping[str, Any], key: str, prefix: str = "") -> int:
    """Return the value of a key. Raise UserError unless it is a positive whole number."""
    value = need(config, key, prefix)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < LIMIT:
        raise refused(prefix + key, value, f"expected a positive whole number below {LIMIT}")
    return value


def flag(config: Mapping[str, Any], key: str, prefix: str = "") -> bool:
    """Return the value of a key, False if it is missing or null. Raise UserError unless it is a
    boolean."""
    value = config.get(key)
    if value not in (True, False, None) or isinstance(value, float):
        raise refused(prefix + key, value, "expected true or false")
    return bool(value)


def size_or_zero(config: Mapping[str, Any], key: str) -> int:
    """Return the value of a key, 0 if it is missing or null. Raise UserError unless it is a whole
    number of at least
    0."""
    return 0 if config.get(key) in (None, 0) and config.get(key) is not False else size(config, key)


def positive(config: Mapping[str, Any], key: str, default: float) -> float:
    """Return the value of a key as a float. Raise UserError unless it is a positive number."""
    value = config.get(key, default)
    if not is_number(value) or value <= 0:
        raise refused(key, value, "expected a positive number")
    return float(value)


def is_number(value: Any) -> bool:
    """Return whether a value is a number of a reasonable size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def refused(key: str, value: Any, expected: str) -> UserError:
    """Return an error that names a key of config.json, its value and the expected one."""
    shown = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return UserError(
        f"config.json: {key} is {shown if len(shown) <= 80 else shown[:77] + '...'}; {expected}"
    )
