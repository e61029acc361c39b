"""Checks of a gpt_oss model's config.json, beside those of hf_config.py: vLLM's model has no
setting for what is fixed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_mc.architectures.attention import Attention, attention_layers
from rlhf_mc.architectures.hf_config import flag, need, refused, size
from rlhf_mc.architectures.rope_config import rope_dict

DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def check_gpt_oss(config: Mapping[str, Any]) -> None:
    """Raise UserError for a value that vLLM's model does not follow, and for quantized weights."""
    if config.get("quantization_config") is not None:
        read = (
            "from_pretrained(DIR, dtype='bfloat16', "
            "quantization_config=Mxfp4Config(dequantize=True))"
        )
        write = f"GptOssForCausalLM.{read}.save_pretrained(OUT, save_original_format=False)"
        wanted = f"mxfp4 weights are not read; transformers writes bfloat16 ones: {write}"
        raise refused("quantization_config", config["quantization_config"], wanted)
    if not flag(config, "attention_bias"):
        raise refused(
            "attention_bias", config["attention_bias"], "vLLM's model has biases: expected true"
        )
    if flag(config, "tie_word_embeddings"):
        raise refused(
            "tie_word_embeddings", True, "vLLM's model has a head of its own: expected false"
        )
    size(config, "sliding_window")
    types = config.get("layer_types")
    if types is not None and types != [
        _TYPES[layer % 2] for layer in range(size(config, "num_hidden_layers"))
    ]:
        raise refused(
            "layer_types", types, f"vLLM alternates, one per layer: {', '.join(_TYPES)}, ..."
        )
    _check_rope(config)


_TYPES = ("sliding_attention", "full_attention")


def windowed_layers(config: Mapping[str, Any], traits: Mapping[str, Any]) -> list[Attention]:
    """Return the attention of each layer: every other one has a sliding window, beginning with the
    first."""
    full = attention_layers(config, traits)
    windowed = replace(full[0], sliding_window=size(config, "sliding_window"))
    return [full[layer] if layer % 2 else windowed for layer in range(len(full))]


def _check_rope(config: Mapping[str, Any]) -> None:
    key, given = rope_dict(config)
    kind = given.get("rope_type", given.get("type"))
    if kind != "yarn":
        raise refused(f"{key}.rope_type", kind, "vLLM's model has 'yarn'")
    for name in ("beta_fast", "beta_slow", "original_max_position_embeddings"):
        need(given, name, prefix=f"{key}.")
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if given.get(name) is not None:
            raise refused(f"{key}.{name}", given[name], "vLLM's model does not read it")
