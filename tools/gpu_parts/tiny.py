"""Small models and prompts as files: a checkpoint of any family with random weights and a real
tokenizer, prompts in parquet. The parts of tools/gpu_check.py and the tests use them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rlhf_mc.data.source import write_prompts

CHAT_TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}{% if "
    "add_generation_prompt %}<|bot|>{% endif %}"
)


def make_tokenizer(
    directory: Path, texts: Sequence[str] = ("1+1=2", "12+34=46")
) -> PreTrainedTokenizerFast:
    """Write a byte-level tokenizer with an end token and a chat template. Its merges are from the
    texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|bot|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(directory)
    return fast


# vLLM's CPU kernel takes heads of 64 and 128 dimensions alone.
_DELTA_NETS = {
    "head_dim": 32,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
FAMILY_SIZES: dict[str, dict[str, Any]] = {
    # Heads that together are wider than the hidden size.
    "qwen3": {"head_dim": 64},
    "mistral": {"sliding_window": None},
    "gemma": {"head_dim": 64},
    "glm4_moe": {
        "head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "gpt_oss": {
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "sliding_window": 4,
        "rope_parameters": {
            "rope_theta": 150000.0,
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    # vLLM's CPU kernel takes kv_lora_rank + qk_rope_head_dim = 576 alone.
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 48,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "num_nextn_predict_layers": 0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 4,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    },
    "qwen3_next": {
        **_DELTA_NETS,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
    },
    "qwen3_5_text": {**_DELTA_NETS},
    "qwen3_5_moe_text": {
        **_DELTA_NETS,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}
"""Settings of single families, beside the sizes in _make_model."""
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 128,
    "patch_size": 4,
}
"""Sizes of the model of images around a nested language model."""


def make_checkpoint(
    directory: Path, family: str = "qwen2", tied: bool = True, num_kv_heads: int = 2, **extra: Any
) -> Path:
    """Write a model whose random weights are large enough that a wrong block changes its outputs.
    Its vocabulary is no multiple of 64, so it is padded."""
    return _make_model(directory, AutoModelForCausalLM, family, tied, num_kv_heads, **extra)


def make_reward_model(directory: Path, family: str = "qwen2", **extra: Any) -> Path:
    """Write a sequence classifier of one label, with the same tokenizer."""
    return _make_model(
        directory, AutoModelForSequenceClassification, family, num_labels=1, seed=1, **extra
    )


def _make_model(
    directory: Path,
    kind: Any,
    family: str,
    tied: bool = True,
    num_kv_heads: int = 2,
    seed: int = 0,
    **extra: Any,
) -> Path:
    tokenizer = make_tokenizer(directory)
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer) + 3,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.08,
        "dtype": "float32",
    }
    nested = family in ("qwen3_5", "qwen3_5_moe")
    text = f"{family}_text" if nested else family
    sizes |= {**FAMILY_SIZES.get(text, {}), **extra}
    if nested:
        kind = AutoModelForImageTextToText
        sizes = {"text_config": sizes, "vision_config": VISION, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(family, **sizes)
    model = kind.from_config(config).float()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() == 1 or name.endswith("proj_bias"):
                param.add_(0.1 * torch.randn_like(param))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
    # of nested models with the experts of a layer in one tensor, as they are published
    model.save_pretrained(directory, save_original_format=not nested)
    return directory


def make_prompts(path: Path, num_prompts: int, seed: int) -> Path:
    """Write additions of different lengths as prompts."""
    rng = random.Random(seed)
    rows = []
    for index in range(num_prompts):
        a = rng.randrange(10 ** rng.randrange(1, 4))
        b = rng.randrange(100)
        rows.append(
            {
                "data_source": "arithmetic",
                "prompt": [{"role": "user", "content": f"{a}+{b}="}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"split": "train", "index": index},
            }
        )
    write_prompts(path, rows)
    return path


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    # Random weights never answer right: reward something that they vary in.
    return {"score": len(solution_str) / 10 + solution_str.count("1"), "length": len(solution_str)}
"""
"""Reward function of a custom_reward_function.path: random weights score differently by it."""
