"""A minimal config, and functions that load and check it with overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_mc.config.checks import check_config
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import load_config
from rlhf_mc.config.schema import Config
from rlhf_mc.verl.table import key_hint

REPO = Path(__file__).resolve().parents[1]
MINIMAL = """
data:
  train_files: train.parquet
model:
  path: some/model
trainer:
  default_local_dir: runs/x
"""


def error_of(path: Path, *overrides: str) -> str:
    """Return the message of the UserError that loading raises, which is one line."""
    with pytest.raises(UserError) as caught:
        load_config(str(path), overrides, key_hint)
    message = str(caught.value)
    assert "\n" not in message
    return message


def load(path: Path, *overrides: str) -> Config:
    return load_config(str(path), overrides, key_hint)


def validated(path: Path, *overrides: str, world_size: int = 4) -> Config:
    sizes = ("data.train_batch_size=32", "actor.ppo_mini_batch_size=16")
    cfg = load_config(str(path), [*sizes, *overrides])
    check_config(cfg, world_size)
    return cfg
