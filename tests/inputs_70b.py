"""Inputs for configs/ppo_70b.yaml without its weights: the config.json of a small model that its
layout can shard, and a row of data."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def write_inputs(folder: Path) -> None:
    """Write model and data to the folder."""
    for name in ("model", "data"):
        (folder / name).mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    row = {"prompt": "?", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "1"}}
    pq.write_table(pa.Table.from_pylist([row]), folder / "data" / "train.parquet")


def overrides(folder: Path) -> list[str]:
    """Return the overrides with which the config reads them, and writes to run/ beside them."""
    return [
        f"model.path={folder}/model",
        f"data.train_files={folder}/data/train.parquet",
        f"data.val_files={folder}/data/train.parquet",
        f"trainer.default_local_dir={folder}/run",
    ]
