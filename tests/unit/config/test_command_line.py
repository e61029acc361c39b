"""The options of `python -m rlhf_mc` that print a text: --help, --version and --print-config."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT

import rlhf_mc
from rlhf_mc import command_line
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.fields import choices, leaf_hints
from rlhf_mc.config.load import load_config
from rlhf_mc.config.model_schema import MegatronConfig
from rlhf_mc.config.printing import commented_yaml, field_docs
from rlhf_mc.config.schema import TrainerConfig
from rlhf_mc.config.yaml_reader import parse_yaml
from rlhf_mc.runtime import exit_codes

CONFIGS = sorted((ROOT / "configs").glob("**/*.yaml"))
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def run_program(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "rlhf_mc", *arguments]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=500
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_printed_config_loads_to_the_same_settings(path: Path, tmp_path: Path) -> None:
    config = load_config(str(path))
    printed = tmp_path / "printed.yaml"
    printed.write_text(commented_yaml(config))
    assert load_config(str(printed)) == config


@pytest.mark.parametrize(
    "value",
    ["1e-6", "020", "off", "", " a: #b ", "a\nb", "null", "2030-01-02", "\x85", "{a}", "🙂"],
)
def test_printed_strings_stay_strings(value: str, tmp_path: Path) -> None:
    config = load_config(str(CONFIGS[0]))
    config.data.prompt_key = value
    config.data.apply_chat_template_kwargs = {"a": [{"b": value}, 1.5, None]}
    printed = tmp_path / "printed.yaml"
    printed.write_text(commented_yaml(config))
    assert load_config(str(printed)) == config


def test_printed_config_repeats_no_inherited_setting(tmp_path: Path) -> None:
    config = load_config(str(ROOT / "configs" / "ppo_70b.yaml"))
    printed = commented_yaml(config)
    assert printed.count("tensor_model_parallel_size: 8\n") == 2, "the actor's and the engine's"
    sections = parse_yaml(printed, "printed")
    assert all(sections[role]["megatron"] == {} for role in ("critic", "ref", "reward_model"))
    own = [
        f"critic.megatron.{setting}"
        for setting in ("tensor_model_parallel_size=4", "dtype=float32")
    ]
    own += ["ref.megatron.pipeline_model_parallel_size=1", "reward_models.judge.model_path=m"]
    config = load_config(str(ROOT / "configs" / "ppo_70b.yaml"), own)
    sections = parse_yaml(commented_yaml(config), "printed")
    assert sections["critic"]["megatron"] == {"tensor_model_parallel_size": 4, "dtype": "float32"}
    assert sections["ref"]["megatron"] == {"pipeline_model_parallel_size": 1}
    assert sections["reward_models"]["judge"]["megatron"] == {}
    (tmp_path / "printed.yaml").write_text(commented_yaml(config))
    assert load_config(str(tmp_path / "printed.yaml")) == config


def test_printed_config_has_the_values_of_each_choice() -> None:
    """Compare the comment above each setting whose values are a choice."""
    config = load_config(str(CONFIGS[0]))
    printed = commented_yaml(config)
    keys = [key for key, hint in leaf_hints().items() if choices(hint) and "NAME" not in key]
    assert len(keys) > 30
    for name in {key.rpartition(".")[2] for key in keys}:
        for comment in re.findall(rf"((?:^ *# .*\n)+) *{name}: ", printed, re.MULTILINE):
            words = set(re.split(r"[^\w+-]+", comment))
            known = [
                choices(hint) for key, hint in leaf_hints().items() if key.endswith(f".{name}")
            ]
            assert any(words >= set(values) for values in known), name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.save_freq=0"], "trainer.save_freq is 0; it must be -1 or at least 1"),
        (
            ["algorithm.adv_estimator=grpo", "rollout.n=1"],
            "compares the responses of a prompt; rollout.n is 1",
        ),
        (["critic.enable=false"], "unknown key 'critic.enable'; "),
    ],
)
def test_config_that_no_run_can_have_is_not_printed(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        command_line.parse([str(QUICKSTART), *overrides, "--print-config"]).text()


def test_config_of_many_ranks_is_printed_on_one() -> None:
    overrides = [
        "actor.megatron.tensor_model_parallel_size=6",
        "critic.megatron.tensor_model_parallel_size=4",
    ]
    assert command_line.parse(
        [str(QUICKSTART), *overrides, "profile.ranks=[99]", "--print-config"]
    ).text()


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
    of_tools = "EXIT_UNREAD"
    codes = [
        code
        for name, code in vars(exit_codes).items()
        if name.startswith("EXIT_") and name != of_tools
    ]
    assert all(option in text for option in command_line.OPTIONS)
    assert len(codes) == 4 and all(f"\n  {code:<3}  " in text for code in (0, *codes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["config.yaml", "--print-confg"],
            r"unknown option --print-confg \(did you mean --print-config\?\)",
        ),
        (
            ["config.yaml", "--trainer.seed=1"],
            r"unknown option --trainer.seed=1 \(.*no dashes before it: trainer.seed=1",
        ),
        (["--check", "config.yaml"], "--check looks at this machine alone, not at config.yaml"),
        (["-x"], "unknown option -x; --help lists the options"),
        ([], "usage: torchrun"),
        (["trainer.seed=1"], "usage: torchrun"),
        (["--print-config"], "usage: torchrun"),
        (["nowhere.yaml", "--print-config"], "nowhere.yaml: no such file"),
        (
            ["run.sh"],
            "run.sh is a script, not a config or section.key=value; tools/from_verl.py",
        ),
        (["config.yaml", "run.sh"], "run.sh is a script"),
    ],
)
def test_wrong_command_line_is_a_user_error(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        command_line.parse(arguments).text()
