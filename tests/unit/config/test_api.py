"""Objects that api.Trainer takes: written so that the run reads them as files.

Whole runs: tests/system/test_python_runs.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_mc.api import Trainer
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.reward_schema import CustomRewardFunctionConfig
from rlhf_mc.rewards.scoring import load_reward_function

FACTOR = 3


def times_three(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    return FACTOR * float(solution_str)


def config(tmp_path: Path) -> dict[str, Any]:
    return {
        "model": {"path": "m"},
        "data": {"train_files": "t.parquet"},
        "trainer": {"default_local_dir": str(tmp_path / "run")},
    }


def test_prompts_become_rows_of_a_file(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    row = {"prompt": "a", "data_source": "s", "reward_model": {"ground_truth": "b"}}
    sections = config(tmp_path)
    del sections["data"]
    trainer = Trainer(sections, prompts=["x", messages, row], val_prompts=["y"])
    [train] = trainer.config.data.train_files
    [val] = trainer.config.data.val_files
    assert [json.loads(line) for line in Path(train).read_text().splitlines()] == [
        {"prompt": "x"},
        {"prompt": messages},
        row,
    ]
    assert json.loads(Path(val).read_text()) == {"prompt": "y"}
    again = Trainer(sections, prompts=["x", messages, row])
    assert again.config.data.train_files == [train]
    assert Trainer(sections, prompts=["z"]).config.data.train_files != [train]


def test_reward_functions_of_any_module_are_copied(tmp_path: Path) -> None:
    offset = 1.0

    def local(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
    ) -> float:
        return float(solution_str) + offset

    for reward, wanted in ((times_three, 6.0), (local, 3.0)):
        custom = Trainer(config(tmp_path), reward=reward).config.custom_reward_function
        loaded = load_reward_function(
            CustomRewardFunctionConfig(path=custom.path, name=custom.name)
        )
        assert loaded.function("s", "2", None) == wanted


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": []}, "prompts is empty"),
        (
            {"val_prompts": ["a", {1, 2}]},
            "val_prompts: prompt 1 is not text, messages or a row of plain values",
        ),
        ({"reward": 3}, "reward is 3; it must be a function or a class"),
        ({"overrides": ["trainer.seeds=1"]}, "unknown key 'trainer.seeds'"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        Trainer(config(tmp_path), **arguments)
    assert words in str(caught.value) and "\n" not in str(caught.value)
