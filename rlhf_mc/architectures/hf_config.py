"""The keys of config.json, older spellings included, for trainer, planner and converters. vLLM
reads the same file.

A key that transformers or vLLM reads for a supported family is in exactly one of three tables:
SUPPORTED (ModelShape follows it), RESTRICTED (some values are supported, any other is an error),
IGNORED (it changes no computation here). Keys that neither library reads may have any value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rlhf_mc.config.errors import UserError

_Name = TypeVar("_Name", bound=str)

SUPPORTED = frozenset(
    {
        "architectures",
        "attention_bias",
        "decoder_sparse_step",
        "first_k_dense_replace",
        "full_attention_interval",
        "head_dim",
        "kv_lora_rank",
        "hidden_act",
        "hidden_activation",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "max_position_embeddings",
        "mlp_bias",
        "mlp_only_layers",
        "model_type",
        "moe_intermediate_size",
        "norm_topk_prob",
        "n_routed_experts",
        "n_shared_experts",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "num_hidden_layers",
        "num_key_value_heads",
        "num_local_experts",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "qkv_bias",
        "rms_norm_eps",
        "rope_interleave",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "routed_scaling_factor",
        "sliding_window",
        "tie_word_embeddings",
        "use_qk_norm",
        "use_sliding_window",
        "v_head_dim",
        "vocab_size",
    }
)
"""Keys that ModelShape.from_hf_config or a check of this module reads."""

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

_LENGTH = "vLLM reads it as the maximum sequence length, and refuses longer sequences"
_OUTPUT = "it selects outputs of transformers' forward besides the logits"
_LABELS = "labels of a classifier; score.weight has their number"
_TOKENS = "stop tokens come from the tokenizer and generation_config.json"
_HOW = "it selects an implementation in transformers, with the same result"
_LIBRARY = "metadata of transformers"
_MTP = (
    "layers of multi-token prediction, which no pass here uses; an export has those of its initial "
    "checkpoint"
)
_EXPERT_NAMES = "vLLM reads it for models without num_experts"

IGNORED: Mapping[str, str] = {
    "ada_rms_norm_t_cond_dim": "read only with ada_rms_norm_t_cond, which is refused",
    "attn_implementation": _HOW,
    "bos_token_id": "the tokenizer tokenises the prompts",
    "chunk_size_feed_forward": _HOW,
    "dtype": "{role}.megatron.dtype is the dtype of the model",
    "torch_dtype": "{role}.megatron.dtype is the dtype of the model",
    "eos_token_id": _TOKENS,
    "experts_implementation": _HOW,
    "hidden_size_per_head": "vLLM reads it in place of head_dim; no supported model has it",
    "id2label": _LABELS,
    "initializer_range": "weights are read from a checkpoint",
    "label2id": _LABELS,
    "mamba_ssm_dtype": "the states of delta nets are float32 in trainer and engine",
    "max_seq_len": _LENGTH,
    "max_seq_length": _LENGTH,
    "max_sequence_length": _LENGTH,
    "max_target_positions": _LENGTH,
    "max_window_layers": "it selects the layers with a sliding window, and there are none",
    "model_max_length": _LENGTH,
    "moe_num_experts": _EXPERT_NAMES,
    "moe_top_k": _EXPERT_NAMES,
    "moe_topk": _EXPERT_NAMES,
    "n_positions": _LENGTH,
    "name_or_path": _LIBRARY,
    "num_experts_per_token": _EXPERT_NAMES,
    "num_labels": _LABELS,
    "mtp_num_hidden_layers": _MTP,
    "mtp_use_dedicated_embeddings": _MTP,
    "num_mtp_layers": _MTP,
    "num_nextn_predict_layers": _MTP,
    "output_attentions": _OUTPUT,
    "output_hidden_states": _OUTPUT,
    "output_router_logits": _OUTPUT,
    "pad_token_id": (
        "sequences are packed, so no token has this id; transformers drops the gradient of its row"
    ),
    "pretraining_tp": (
        "transformers no longer reads it; earlier versions split matrix products, with the same "
        "result"
    ),
    "problem_type": _LABELS,
    "return_dict": _OUTPUT,
    "qk_head_dim": "it is qk_nope_head_dim + qk_rope_head_dim",
    "router_aux_loss_coef": "actor.moe_aux_loss_coeff is the run's",
    "seq_len": _LENGTH,
    "seq_length": _LENGTH,
    "top_k_experts": _EXPERT_NAMES,
    "transformers_version": _LIBRARY,
    "use_cache": _HOW,
}
"""Key -> the reason why it changes no computation here. tests/unit/architectures/test_hf_config.py
fails for a key of transformers' configurations or vLLM's models that is in none of the tables."""


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


def count(config: Mapping[str, Any], key: str) -> int:
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
