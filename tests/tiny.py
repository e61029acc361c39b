"""Inputs of real runs at the smallest size: model and prompts (of tools/gpu_parts/tiny.py) and a
config. Used by tests/dist and tests/system."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

# pytest has it; tests/soak.py is a program
sys.path.append(str(Path(__file__).parents[1] / "tools"))
from gpu_parts.tiny import REWARD, make_checkpoint, make_prompts, make_reward_model, make_tokenizer

__all__ = ["make_checkpoint", "make_prompts", "make_reward_model", "make_tokenizer"]


def config_tree(directory: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a whole config over directory/{model, train.parquet, val.parquet}. `sections` override
    it, key by key."""
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
            # A large eps keeps Adam smooth where a gradient is all but zero: layouts then agree to
            # rounding.
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
        "algorithm": {
            "use_kl_in_reward": True,
            "kl_ctrl": {"type": "adaptive", "kl_coef": 0.05, "horizon": 100},
        },
        "custom_reward_function": {"path": str(directory / "reward.py")},
        "trainer": {
            "default_local_dir": str(directory / "run"),
            "total_training_steps": 2,
            "test_freq": 1,
            "dist_timeout_seconds": 120,
            "planner": "warn",  # tests share a machine's memory
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
