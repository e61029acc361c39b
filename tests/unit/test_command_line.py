"""The options of `python -m rlhf_mc` that print a text: --help, --version and --print-config."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rlhf_mc
from rlhf_mc import command_line
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import load_config
from rlhf_mc.config.model_schema import MegatronConfig
from rlhf_mc.config.printing import commented_yaml, field_docs
from rlhf_mc.config.schema import TrainerConfig
from rlhf_mc.runtime import exit_codes

REPO = Path(__file__).resolve().parents[2]
CONFIGS = sorted((REPO / "configs").glob("**/*.yaml"))


def run_program(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "rlhf_mc", *arguments]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_printed_config_loads_to_the_same_settings(path: Path, tmp_path: Path) -> None:
    config = load_config(str(path))
    printed = tmp_path / "printed.yaml"
    printed.write_text(commented_yaml(config))
    assert load_config(str(printed)) == config


@pytest.mark.parametrize(
    "value", ["1e-6", "020", "off", "", " a: #b ", "a\nb", "null", "2030-01-02", "\x85", "{a}", "🙂"]
)
def test_printed_strings_stay_strings(value: str, tmp_path: Path) -> None:
    config = load_config(str(CONFIGS[0]))
    config.data.prompt_key = value
    config.data.apply_chat_template_kwargs = {"a": [{"b": value}, 1.5, None]}
    printed = tmp_path / "printed.yaml"
    printed.write_text(commented_yaml(config))
    assert load_config(str(printed)) == config


@pytest.mark.parametrize("section", [TrainerConfig, MegatronConfig])
def test_every_setting_has_its_documentation(section: type) -> None:
    docs = field_docs(section)
    assert list(docs) == [field.name for field in dataclasses.fields(section)]
    assert all(docs.values())


def test_print_config_prints_overridden_settings_without_torch() -> None:
    done = run_program(str(CONFIGS[-1]), "--print-config", "actor.optim.clip_grad=0")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    at = lines.index("    clip_grad: 0.0")
    assert lines[at - 1] == "    # Maximum global gradient norm; 0: no clipping."
    modules = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert "yaml" in modules and "torch" not in modules


@pytest.mark.slow
def test_only_rank_0_prints() -> None:
    assert run_program("--version", RANK="0").stdout == f"rlhf_mc {rlhf_mc.__version__}\n"
    assert run_program("--version", RANK="1").stdout == ""


def test_help_lists_every_option_and_exit_code() -> None:
    text = command_line.parse(["configs/x.yaml", "-h"]).text()
    codes = [code for name, code in vars(exit_codes).items() if name.startswith("EXIT_")]
    assert all(option in text for option in command_line.OPTIONS)
    assert len(codes) == 4 and all(f"\n  {code:<3}  " in text for code in (0, *codes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config.yaml", "--print-confg"], r"unknown option --print-confg \(did you mean --print-config\?\)"),
        (
            ["config.yaml", "--trainer.seed=1"],
            r"unknown option --trainer.seed=1 \(.*no dashes before it: trainer.seed=1",
        ),
        (["-x"], "unknown option -x; --help lists the options"),
        ([], "usage: torchrun"),
        (["trainer.seed=1"], "usage: torchrun"),
        (["--print-config"], "usage: torchrun"),
        (["nowhere.yaml", "--print-config"], "nowhere.yaml: no such file"),
        (["--verl"], "--verl: expected a script or YAML file of verl's, or key=value settings"),
        (["run.sh"], "run.sh is a script, not a config or section.key=value; --verl reads one of verl's"),
        (["config.yaml", "run.sh"], "run.sh is a script"),
        (["--verl", "nowhere.sh"], "nowhere.sh: No such file"),
    ],
)
def test_wrong_command_line_is_a_user_error(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        command_line.parse(arguments).text()
