"""Inputs of real runs at the smallest size: a checkpoint of any family with random weights and a real tokenizer,
prompts in parquet, and a config. Used by tests/dist and tests/system."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from rlhf_mc.data.parquet import write_prompts

CHAT_TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)


def make_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Write a byte-level tokenizer with an end token and a chat template."""
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
    tokenizer.train_from_iterator(["1+1=2", "12+34=46"], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(directory)
    return fast


FAMILY_SIZES: dict[str, dict[str, Any]] = {
    # Heads that together are wider than the hidden size.
    "qwen3": {"head_dim": 64},
    "mistral": {"sliding_window": None},
    "gemma": {"head_dim": 64},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}
"""Settings of single families, beside the sizes in _make_model."""


def make_checkpoint(
    directory: Path, family: str = "qwen2", tied: bool = True, num_kv_heads: int = 2, **extra: Any
) -> Path:
    """Write a model whose random weights are large enough that a wrong block changes its outputs. Its vocabulary is no
    multiple of 64, so it is padded."""
    return _make_model(directory, AutoModelForCausalLM, family, tied, num_kv_heads, **extra)


def make_reward_model(directory: Path, family: str = "qwen2", **extra: Any) -> Path:
    """Write a sequence classifier of one label, with the same tokenizer."""
    return _make_model(directory, AutoModelForSequenceClassification, family, num_labels=1, seed=1, **extra)


def _make_model(
    directory: Path, kind: Any, family: str, tied: bool = True, num_kv_heads: int = 2, seed: int = 0, **extra: Any
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
    config = AutoConfig.for_model(family, **{**sizes, **FAMILY_SIZES.get(family, {}), **extra})
    model = kind.from_config(config).float()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(0.1 * torch.randn_like(param))
    model.save_pretrained(directory)
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


def config_tree(directory: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a whole config over directory/{model, train.parquet, val.parquet}. `sections` override it, key by key."""
    tree: dict[str, Any] = {
        "data": {
            "train_files": str(directory / "train.parquet"),
            "val_files": str(directory / "val.parquet"),
            "train_batch_size": 8,
            "max_prompt_length": 24,
            "max_response_length": 12,
        },
        "model": {"path": str(directory / "model")},
        "actor": {
            "ppo_mini_batch_size": 4,
            "ppo_epochs": 2,
            "ppo_max_token_len_per_gpu": 96,
            "entropy_coeff": 0.01,
            # A large eps keeps Adam smooth where a gradient is all but zero: layouts then agree to rounding.
            "optim": {"lr": 5e-3, "eps": 1e-3, "lr_warmup_steps": 1},
            "megatron": {"dtype": "float32"},
        },
        "critic": {
            "ppo_max_token_len_per_gpu": 96,
            "forward_max_token_len_per_gpu": 96,
            "optim": {"lr": 5e-3, "eps": 1e-3},
        },
        "ref": {"log_prob_max_token_len_per_gpu": 96},
        "rollout": {"n": 2, "log_prob_max_token_len_per_gpu": 96, "max_num_seqs": 64},
        "algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "kl_coef": 0.05, "horizon": 100}},
        "custom_reward_function": {"path": str(directory / "reward.py")},
        "trainer": {
            "default_local_dir": str(directory / "run"),
            "total_training_steps": 2,
            "test_freq": 1,
            "dist_timeout_seconds": 120,
        },
    }
    for name, section in sections.items():
        _merge(tree.setdefault(name, {}), section)
    return tree


def _merge(tree: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    # Random weights never answer right: reward something that they vary in.
    return {"score": len(solution_str) / 10 + solution_str.count("1"), "length": len(solution_str)}
"""


def make_workspace(directory: Path, **model: Any) -> Path:
    """Write everything that a run needs to one directory."""
    make_checkpoint(directory / "model", **model)
    make_prompts(directory / "train.parquet", 24, seed=1)
    make_prompts(directory / "val.parquet", 5, seed=2)
    (directory / "reward.py").write_text(REWARD)
    return directory


def write_config(directory: Path, name: str = "config.yaml", **sections: dict[str, Any]) -> Path:
    """Write the config as a YAML file."""
    path = directory / name
    path.write_text(yaml.safe_dump(config_tree(directory, **sections)))
    return path
