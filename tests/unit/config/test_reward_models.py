"""Settings of several reward models: loading, inheritance, checks, files, phases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_files import MINIMAL

from rlhf_mc.checkpoint.input_fingerprints import paths
from rlhf_mc.config.checks import check_config
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import load_config
from rlhf_mc.config.paths import input_paths
from rlhf_mc.config.printing import commented_yaml
from rlhf_mc.config.roles import absent_roles, parts_on_device, token_budgets
from rlhf_mc.config.schema import Config, layouts, reward_models, score_part
from rlhf_mc.data.source import scored_by_rule
from rlhf_mc.verl.table import key_hint

SECTIONS = """
actor: {megatron: {tensor_model_parallel_size: 2, recompute_granularity: full}}
reward_models:
  helpful: {model_path: models/helpful, tokenizer_path: models/helpful,
   forward_max_token_len_per_gpu: 9}
  harmless: {model_path: models/harmless, megatron: {tensor_model_parallel_size: 1}}
  none: {megatron: {dtype: float32}}
"""


def load(directory: Path, text: str = SECTIONS, *overrides: str) -> Config:
    path = directory / "config.yaml"
    path.write_text(MINIMAL + text)
    return load_config(path, overrides, key_hint)


def test_named_models_are_roles_of_their_own(tmp_path: Path) -> None:
    cfg = load(tmp_path)
    check_config(cfg, 2)
    assert list(reward_models(cfg)) == ["reward_models.helpful", "reward_models.harmless"]
    assert [score_part(role) for role in ("reward_model", *reward_models(cfg))] == [
        "reward_model",
        "helpful",
        "harmless",
    ]
    found = layouts(cfg)
    assert found["reward_models.helpful"].tensor_model_parallel_size == 2
    assert found["reward_models.harmless"].tensor_model_parallel_size == 1
    assert all(found[role].recompute_granularity is None for role in reward_models(cfg))
    assert absent_roles(cfg) == ["ref", "reward_model", "reward_models.none"]
    assert token_budgets(cfg)["reward_models.helpful"] == 9
    assert not scored_by_rule(cfg, "data.train_files") and scored_by_rule(cfg, "data.val_files")
    named = dict(input_paths(cfg))
    assert (
        named["reward_models.helpful.tokenizer_path"] == named["reward_models.helpful.model_path"]
    )
    assert ("reward_models.harmless.model_path", Path("models/harmless/config.json")) not in paths(
        cfg
    ), "no such file"
    assert (
        "reward_models.harmless.model_path",
        Path("models/harmless/model.safetensors"),
    ) in paths(cfg)


def test_config_can_be_printed_and_overridden(tmp_path: Path) -> None:
    cfg = load(tmp_path)
    (tmp_path / "again.yaml").write_text(commented_yaml(cfg))
    assert load_config(tmp_path / "again.yaml") == cfg
    (tmp_path / "base.yaml").write_text(
        "base: config.yaml\nreward_models: {harmless: {model_path: null}}\n"
    )
    merged = load_config(
        tmp_path / "base.yaml", ["reward_models.more.model_path=m", "reward_models.helpful=null"]
    )
    assert list(reward_models(merged)) == ["reward_models.helpful", "reward_models.more"]
    assert load(tmp_path, "reward_models:\n").reward_models == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reward_models: {a: {model_pth: m}}", "unknown key 'reward_models.a.model_pth'; the "
                                               "nearest known key is"
         " 'reward_models.NAME.model_path'"),
        ("reward_models: {a: {model_path: 1}}", ("reward_models.a.model_path: found 1, expected a "
                                                "string or null")),
        ("reward_models: {a-b: {model_path: m}}", ("reward_models: the name 'a-b' is not of "
                                                  "letters, digits and _")),
        ("reward_models: {1: {model_path: m}}", "reward_models: the name 1 is not of letters"),
        ("reward_models: [m]", "reward_models: expected sections by name, found the list ['m']"),
        ("reward_models: {a: m}", ("reward_models.a: expected a section of settings, found the "
                                  "string 'm'")),
        ("reward_models: {a: {model_path: m}, a: {model_path: n}}", "key 'a' given twice"),
        ("reward_models: {reward_model: {model_path: m}}", ("the name 'reward_model' is that of "
                                                            "the "
                                                           "part of")),
        ("reward_models: {a: {tokenizer_path: m}}", "reward_models.a.tokenizer_path is m; that "
                                                    "needs"
         " reward_models.a.model_path, which is null"),
        ("reward_model: {model_path: m, chat_template_path: t}", "reward_model.chat_template_path "
                                                                 "is t; that needs"
         " reward_model.tokenizer_path, which is null"),
        ("reward_models: {a: {model_path: ' '}}", ("reward_models.a.model_path is empty; give a "
                                                  "path, or leave it out")),
        ("reward_models: {a: {forward_max_token_len_per_gpu: 0}}",
         "reward_models.a.forward_max_token_len_per_gpu is 0; it must be at least 1"),
        ("reward_models: {a: {model_path: m, forward_max_token_len_per_gpu: 1}}",
         ("reward_models.a.forward_max_token_len_per_gpu is 1; it must be at least the longest "
         "sequence")),
        ("reward_models: {a: {model_path: m, forward_micro_batch_size_per_gpu: 1}}",
         ("unknown key 'reward_models.a.forward_micro_batch_size_per_gpu'; use "
         "..._max_token_len_per_gpu")),
        ("reward_models: {a: {megatron: {grad_offload: true}}}", "unknown key "
                                                                 "'reward_models.a.megatron.grad_offload';"
         " the nearest known key is 'reward_models.NAME.megatron.param_offload'"),
        ("reward_models: {a: {megatron: {tensor_model_parallel_size: 3}}}",
         "reward_models.a.megatron.tensor_model_parallel_size 3 x "
         "reward_models.a.megatron.pipeline_model_parallel_size"
         " 1 = 3 does not divide the 2 processes"),
    ],
)  # fmt: skip
def test_mistake_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_config(load(tmp_path, text), 2)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_each_model_has_a_phase_of_its_own() -> None:
    expected: dict[str, Any] = dict.fromkeys(("actor", "critic", "ref", "rollout"), frozenset())
    for role in ("reward_model", "reward_models.helpful"):
        assert parts_on_device(role) == {**expected, role: frozenset({"params"})}
