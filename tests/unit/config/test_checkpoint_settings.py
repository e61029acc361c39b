"""Checks of the checkpoint settings against each other."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_mc.config.checks import check_config
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import Config, DataConfig, ModelConfig, TrainerConfig


def config(**trainer: Any) -> Config:
    data = DataConfig(train_files=["train.parquet"], val_files=["val.parquet"])
    return Config(data, ModelConfig("model"), TrainerConfig(default_local_dir="run", **trainer))


@pytest.mark.parametrize(
    "trainer",
    [
        {},
        {"resume_mode": "disable"},
        {"resume_mode": "resume_path", "resume_from_path": "other/global_step_5"},
        {"save_minutes": 0.5, "max_ckpt_to_keep": 2},
        {"save_freq": 4, "max_ckpt_to_keep": 1, "keep_best": True, "test_freq": 2},
    ],
)
def test_consistent_settings_are_accepted(trainer: dict[str, Any]) -> None:
    check_config(config(**trainer), 1)


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({"resume_mode": "resume_path"}, "trainer.resume_from_path is null"),
        ({"resume_from_path": "other/global_step_5"}, "trainer.resume_mode is auto"),
        ({"max_ckpt_to_keep": 2}, "trainer.max_ckpt_to_keep is 2; that needs trainer.save_freq"),
        ({"max_ckpt_to_keep": 0, "save_freq": 1}, "trainer.max_ckpt_to_keep is 0"),
        ({"keep_best": True}, "trainer.keep_best is true; that needs trainer.save_freq"),
        ({"keep_best": True, "save_freq": 3, "test_freq": 2}, "must divide trainer.save_freq, 3"),
        ({"keep_best": True, "save_freq": 3}, "a validation at every save"),
        ({"save_minutes": 0}, "trainer.save_minutes is 0; it must be above 0"),
        ({"export_freq": 0}, "trainer.export_freq is 0"),
    ],
)
def test_inconsistent_settings_are_rejected(trainer: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        check_config(config(**trainer), 1)
    assert words in str(error.value) and "\n" not in str(error.value)
