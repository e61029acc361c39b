"""Sizes of the parts' inputs: small ones for a CPU, or sizes of real models for a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
QWEN3_MOE: dict[str, Any] = {
    **QWEN3_8B,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
"""The shapes of Qwen3-30B-A3B, with 4 of its 48 layers."""
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}
"""Positions of models whose config.json has max_position_embeddings 2048."""
DEEPSEEK: dict[str, Any] = {
    "tied": False,
    "num_key_value_heads": 16,
    "n_routed_experts": 16,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
QWEN3_NEXT: dict[str, Any] = {
    "tied": False,
    "num_kv_heads": 2,
    "head_dim": 256,
    "num_experts": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""Keys of config.json of two families, whose heads have the dimensions of the published models."""
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
"""Sizes that replace these models' own on a CPU. Their vocabularies are multiples of 64, so that
none is
padded: padding is in no checkpoint."""


class Sizes(NamedTuple):
    """Sizes of all parts. The defaults are for a GPU of 80 GB or more."""

    checksum_elements: tuple[int, ...] = (1, 1_000_003, 300_000_000)
    """Numbers of elements of the tensors whose checksums are compared."""
    model: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.03,
    }
    """Keys of config.json, beside the keys of tiny.py, of the models that are compared with
    transformers."""
    families: dict[str, dict[str, Any]] = {
        "qwen2": {"num_kv_heads": 2},
        "llama": {"num_kv_heads": 4, "tied": False},
        "qwen3": {"num_kv_heads": 4, "head_dim": 128},
        "gemma": {"num_kv_heads": 1, "head_dim": 256},
        "qwen3_moe": {
            "num_kv_heads": 4,
            "head_dim": 128,
            "num_experts": 16,
            "moe_intermediate_size": 512,
        },
        "mixtral": {"num_kv_heads": 4, "tied": False, "num_local_experts": 8},
        "glm4_moe": {"num_kv_heads": 4, "tied": False, "head_dim": 128, "n_routed_experts": 16},
        "gpt_oss": {
            "num_kv_heads": 4,
            "tied": False,
            "head_dim": 64,
            "num_local_experts": 16,
            "sliding_window": 128,
        }
        | {
            "rope_parameters": {
                **YARN,
                "rope_theta": 150_000.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            }
        },
        "deepseek_v3": {**DEEPSEEK, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
        "qwen3_next": QWEN3_NEXT,
    }
    """Model family -> further keys."""
    prompt_lens: tuple[int, ...] = (31, 190, 57, 44, 44, 300, 2)
    response_lens: tuple[int, ...] = (260, 1, 411, 57, 57, 616, 80)
    vocabulary: int = 151_936
    head_tokens: int = 16_384
    """Response tokens of one call of the output layer."""
    head_hidden: int = 3584
    copy_bytes: int = 4 << 30
    """Size of the copies with which rates are compared."""
    matmul: int = 8192
    """Rows and columns of the matrix product with which rates are compared."""
    timeout_seconds: int = 15
    """Timeout of the collective that a rank misses."""

    trained: dict[str, Any] = {
        **QWEN2,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 6,
    }
    """config.json of the model that is trained, saved and loaded: 0.13 B parameters, 1.8 GB of
    training state."""
    half_billion: dict[str, Any] = {
        **QWEN2,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "vocab_size": 151_936,
    }
    """config.json of Qwen2.5-0.5B, whose speed is measured."""
    planned_lens: tuple[int, int, int] = (8, 512, 512)
    """Sequences of the micro-batch whose memory is planned, and tokens of each prompt and
    response."""
    speed_lens: tuple[int, ...] = (2048,) * 8
    """Tokens of each sequence in the measurement of speed; a quarter of them is the prompt."""
    least_share: float = 0.1
    """Share of the rate of a matrix product below which the speed of training is a failure."""
    most_share: float = 1.0
    """Share of the rate of a matrix product above which the work has not been done or waited
    for."""
    offloaded: dict[str, Any] = {
        **QWEN2,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
    }
    """config.json of the model that is offloaded: 1.3 B parameters, 24 GB with gradients and
    optimizer."""
    updated: dict[str, dict[str, Any]] = {"qwen3_8b": QWEN3_8B, "qwen3_30b_a3b_4_layers": QWEN3_MOE}
    """Name -> config.json of the models whose weights are updated."""

    quickstart_steps: int | None = None
    """Steps of the quickstart; None: until its target accuracy."""
    runs: dict[str, dict[str, Any]] = {
        "tiny": {
            "model": {"hidden_size": 256, "intermediate_size": 512},
            "prompts": 32,
            "response": 64,
        },
        "half_billion": {
            "model": {
                "hidden_size": 896,
                "intermediate_size": 4864,
                "num_hidden_layers": 24,
                "num_attention_heads": 14,
                "vocab_size": 151_936,
                "max_position_embeddings": 2048,
                "initializer_range": 0.02,
            },
            "prompts": 128,
            "response": 1024,
        },
    }
    """Whole runs: keys of config.json, prompts of a step, tokens of a response."""
    layouts: dict[str, Any] = {
        "family": "qwen3_moe",
        "model": {"hidden_size": 256, "num_experts": 8},
        "prompts": 16,
        "response": 64,
    }
    """Keys as in `runs`: the PPO steps in every kind of layout."""
    layout_names: tuple[str, ...] | None = None
    """The kinds of layout that several ranks take; None: all."""
    experts: dict[str, dict[str, Any]] = {
        "qwen3_moe": {"head_dim": 128, "num_experts": 16, "moe_intermediate_size": 256},
        "gpt_oss": {"tied": False, "head_dim": 64, "num_local_experts": 16},
        "deepseek_v3": {**DEEPSEEK, "num_attention_heads": 16},
        "qwen3_next": QWEN3_NEXT,
    }
    """Model family -> keys of config.json of the models whose routers' choices are replayed."""


SMALL = Sizes(
    checksum_elements=(1, 100_003),
    model={"num_hidden_layers": 2},
    families={
        "qwen2": {},
        "llama": {"tied": False},
        "qwen3": {},
        "gemma": {"num_kv_heads": 1},
        "qwen3_moe": {},
    },
    experts={"qwen3_moe": {}},
    layouts={"family": "qwen3_moe", "model": {}, "prompts": 4, "response": 8},
    layout_names=("tp2", "roles"),
    prompt_lens=(3, 9, 5, 4, 4, 14, 2),
    response_lens=(6, 1, 11, 5, 5, 16, 8),
    head_tokens=48,
    head_hidden=32,
    copy_bytes=16 << 20,
    matmul=256,
    timeout_seconds=3,
    trained={**QWEN2, **TINY},
    half_billion={**QWEN2, **TINY},
    planned_lens=(4, 40, 60),
    speed_lens=(120, 200, 160, 160),
    least_share=0.0,
    # such short products are slower than the model when other work takes the processor meanwhile
    most_share=100.0,
    offloaded={**QWEN2, **TINY},
    quickstart_steps=2,
    runs={
        "tiny": {"model": {"num_hidden_layers": 2}, "prompts": 4, "response": 8},
        "half_billion": {"model": {"num_hidden_layers": 2}, "prompts": 4, "response": 16},
    },
    updated={
        "qwen3": {**QWEN3_8B, **TINY},
        "qwen3_moe": {**QWEN3_MOE, **TINY, "moe_intermediate_size": 64},
    },
)
"""Sizes for a CPU, where each part takes seconds."""
FULL = Sizes()
