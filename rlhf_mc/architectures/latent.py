"""Multi-head latent attention (deepseek_v3): its keys of config.json. Keys and values of all heads
are projected from one latent vector, queries from another one or from the hidden states. No torch
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_mc.architectures import hf_config
from rlhf_mc.architectures.hf_config import flag, refused, size


def latent_sizes(
    config: Mapping[str, Any], rope_scaling: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the fields of ModelShape that describe multi-head latent attention. Raise UserError
    for values that transformers and vLLM read differently. rope_scaling: as rope_config.rope
    returns it."""
    if flag(config, "attention_bias"):
        raise refused("attention_bias", True, "vLLM's latent attention has no biases")
    if flag(config, "tie_word_embeddings"):
        raise refused(
            "tie_word_embeddings",
            True,
            "vLLM's models with latent attention have a head of their own",
        )
    if (kv_heads := config.get("num_key_value_heads")) not in (None, config["num_attention_heads"]):
        raise refused(
            "num_key_value_heads",
            kv_heads,
            "each head has keys of its own: expected num_attention_heads",
        )
    if config.get("rope_interleave", True) is not True:
        raise refused(
            "rope_interleave",
            config["rope_interleave"],
            "vLLM rotates neighbouring dimensions: expected true",
        )
    _check_rope(rope_scaling)
    rope_dim = size(config, "qk_rope_head_dim")
    if rope_dim % 2:
        raise refused(
            "qk_rope_head_dim", rope_dim, "pairs of dimensions are rotated: expected an even number"
        )
    return {
        "head_dim": size(config, "qk_nope_head_dim") + rope_dim,
        "rope_head_dim": rope_dim,
        "v_head_dim": size(config, "v_head_dim"),
        "q_lora_rank": hf_config.count(config, "q_lora_rank"),
        "kv_lora_rank": size(config, "kv_lora_rank"),
    }


def _check_rope(scaling: Mapping[str, Any] | None) -> None:
    """Raise UserError for rotary settings that vLLM computes otherwise: it has yarn alone, without
    some of its keys."""
    if scaling is None:
        return
    if scaling["rope_type"] != "yarn":
        raise refused(
            "rope_scaling.rope_type", scaling["rope_type"], "vLLM's latent attention has yarn alone"
        )
    if "attention_factor" in scaling:
        raise refused(
            "rope_scaling.attention_factor", scaling["attention_factor"], "vLLM does not read it"
        )
    if not scaling.get("truncate", True):
        raise refused("rope_scaling.truncate", False, "vLLM's latent attention has true")
    if ("mscale" in scaling) != ("mscale_all_dim" in scaling):
        given = "mscale" if "mscale" in scaling else "mscale_all_dim"
        raise refused(
            f"rope_scaling.{given}", scaling[given], "give both mscale and mscale_all_dim, or none"
        )


def router_groups(config: Mapping[str, Any], num_experts: int, per_token: int) -> dict[str, int]:
    """Return the fields of ModelShape for the groups of experts among which a router chooses; none
    where it chooses among all. A group is ranked by the sum of its two best scores (transformers,
    vLLM); Megatron-Core takes as many as a token has experts in each group."""
    groups = size(config, "n_group")
    chosen = size(config, "topk_group")
    if groups == 1 and chosen == 1:
        return {}
    if num_experts % groups or num_experts // groups < 2:
        raise refused(
            "n_group",
            groups,
            f"expected a divisor of {num_experts} experts, with two or more in a group",
        )
    if per_token != 2 * chosen or chosen > groups:
        raise refused(
            "topk_group",
            chosen,
            f"expected half of num_experts_per_tok {per_token}, and at most n_group",
        )
    return {"router_groups": groups, "groups_per_token": chosen}
