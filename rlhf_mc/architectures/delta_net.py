"""Gated delta nets (qwen3_next, qwen3_5): their keys of config.json. No torch here.

A layer has key heads and, for each, equally many value heads, each with a state [key dimensions,
value dimensions].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_mc.architectures.hf_config import flag, refused, size

DELTA_NET_DEFAULTS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_TYPES = ("linear_attention", "full_attention")


def delta_net_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ModelShape that describe gated delta nets, and which layers have one."""
    layers = range(size(config, "num_hidden_layers"))
    interval = size(config, "full_attention_interval")
    types = config.get("layer_types") or [_TYPES[(layer + 1) % interval == 0] for layer in layers]
    if (
        not isinstance(types, list)
        or len(types) != len(layers)
        or any(kind not in _TYPES for kind in types)
    ):
        raise refused(
            "layer_types", types, f"expected {len(layers)} times {' or '.join(map(repr, _TYPES))}"
        )
    key_heads = size(config, "linear_num_key_heads")
    value_heads = size(config, "linear_num_value_heads")
    if value_heads % key_heads:
        raise refused(
            "linear_num_value_heads", value_heads, f"expected a multiple of {key_heads} key heads"
        )
    return {
        "linear_layers": tuple(layer for layer in layers if types[layer] == _TYPES[0]),
        "linear_key_heads": key_heads,
        "linear_value_heads": value_heads,
        "linear_key_dim": size(config, "linear_key_head_dim"),
        "linear_value_dim": size(config, "linear_value_head_dim"),
        "linear_kernel": size(config, "linear_conv_kernel_dim"),
    }


def check_gated_attention(config: Mapping[str, Any]) -> None:
    """Raise UserError for a value that vLLM's model does not follow."""
    for key in ("attention_bias", "qkv_bias"):
        if flag(config, key):
            raise refused(
                key, True, "transformers and vLLM add it to different projections: expected false"
            )
    if flag(config, "tie_word_embeddings") and config["model_type"] == "qwen3_next":
        raise refused("tie_word_embeddings", True, "vLLM's model has a head of its own")
    if "shared_expert_intermediate_size" in config:
        size(config, "shared_expert_intermediate_size")


def check_qwen3_5_moe(config: Mapping[str, Any]) -> None:
    """Raise UserError for a value that vLLM's model does not follow."""
    check_gated_attention(config)
    if not flag(config, "norm_topk_prob"):
        raise refused("norm_topk_prob", False, "transformers always normalises: expected true")
