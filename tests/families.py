"""A small config.json of every model family."""

from __future__ import annotations

from typing import Any

from rlhf_mc.architectures.families import FAMILIES
from rlhf_mc.architectures.spec import ModelShape

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 6,
    "intermediate_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "vocab_size": 70,
    "max_position_embeddings": 64,
}


YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
"""Rotary settings of gpt_oss."""


EXTRA: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 12},
    "qwen2": {"hidden_size": 12},
    "mistral": {"sliding_window": None},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 4,
        "use_qk_norm": True,
        "attention_bias": True,
        "routed_scaling_factor": 2.5,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 4,
        "rope_scaling": YARN,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 4,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 10,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 2,
        "v_head_dim": 5,
    },
    "qwen3_next": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 4,
        "shared_expert_intermediate_size": 6,
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 5,
    },
    "qwen3_5_text": {
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 5,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 4,
        "norm_topk_prob": True,
    },
}
EXTRA["qwen3_5_moe_text"] = EXTRA["qwen3_next"]
EXTRA |= {f"qwen3_5{kind}": EXTRA[f"qwen3_5{kind}_text"] for kind in ("", "_moe")}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return nested(family, {**SIZES, **EXTRA.get(family, {}), **changes})


def nested(family: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json of these sizes, which are its text_config where the family is a part of
    a model of images and text."""
    if not FAMILIES[family].is_nested:
        return {"model_type": family, **sizes}
    outer = {key: sizes[key] for key in ("tie_word_embeddings",) if key in sizes}
    return {"model_type": family, "text_config": sizes, "vision_config": {"depth": 1}, **outer}


def shape_of(family: str, **changes: Any) -> ModelShape:
    return ModelShape.from_hf_config(config_of(family, **changes))
