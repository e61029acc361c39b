"""The choice of a rollout engine by rollout.name. A run with an engine of the user:
tests/system/test_examples.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_mc.config.checks import check_config
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import load_config
from rlhf_mc.config.schema import CustomEngineConfig, RolloutConfig
from rlhf_mc.rollout.engines import ENGINES, engine_factory

QUICKSTART = Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml"
COMPLETE = """
class Engine:
    title = "own"
    layout = check_layout = check_installation = check_model = build = None
"""


def choose(path: Path, source: str) -> str:
    path.write_text(source)
    return engine_factory(RolloutConfig("custom", CustomEngineConfig(str(path)))).title


def test_engine_is_chosen_by_name(tmp_path: Path) -> None:
    assert engine_factory(RolloutConfig()) is ENGINES["vllm"]
    assert choose(tmp_path / "own.py", COMPLETE) == "own"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_of_this_name", r"importing it raised ModuleNotFoundError"),
        ("", r"own.py: has no function 'Engine'$"),
        (
            "class Engine:\n    def __init__(self): raise KeyError('a')",
            r"Engine\(\) raised KeyError: 'a' \(own.py:2\)",
        ),
        (
            "class Engine: title = 'own'",
            r"Engine lacks layout, check_layout, check_installation, check_model",
        ),
    ],
)
def test_mistake_in_a_custom_engine_is_one_line(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        choose(tmp_path / "own.py", source)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("override", ["rollout.name=custom", "rollout.custom_engine.path=own.py"])
def test_name_and_path_go_together(override: str) -> None:
    with pytest.raises(UserError, match=r"set both \(custom, and a path\) or neither"):
        check_config(load_config(str(QUICKSTART), [override]), 1)
