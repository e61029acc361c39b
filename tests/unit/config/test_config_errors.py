"""Files, YAML texts and overrides that are refused, and the words of the messages."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml
from config_files import MINIMAL, error_of, load


@pytest.mark.parametrize(
    ("override", "found", "expected"),
    [
        ("rollout.n=two", "the string 'two'", "an integer"),
        ("rollout.n=2.0", "2.0", "an integer"),
        ("rollout.n=true", "true", "an integer"),
        ("rollout.n=null", "null", "an integer"),
        ("actor.optim.lr=fast", "the string 'fast'", "a finite number"),
        ("actor.optim.lr=.nan", "nan", "a finite number"),
        ("actor.optim.lr=false", "false", "a finite number"),
        ("actor.shuffle=1", "1", "true or false"),
        ("model.path=3", "3", "a string"),
        ("model.tokenizer_path=3", "3", "a string or null"),
        ("trainer.resume_mode=last", "the string 'last'", "one of auto, disable, resume_path"),
        ("trainer.logger=[console,comet]", "the list ['console', 'comet']",
         "a list, each entry one of console, jsonl, tensorboard, wandb, mlflow, swanlab"),
        ("data.val_files=[1]", "the list [1]", "a list, each entry a string"),
        ("actor.optim.betas=[0.9]", "the list [0.9]", "a list of 2, each entry a finite number"),
        ("data.apply_chat_template_kwargs=x", "the string 'x'", ("a mapping with string keys and "
                                                                "JSON values")),
        ("data.apply_chat_template_kwargs={1: 2}", "the mapping {1: 2}", ("a mapping with string "
                                                                         "keys and JSON values")),
    ],
)  # fmt: skip
def test_wrong_type_names_value_and_expected_type(
    config_file: Path, override: str, found: str, expected: str
) -> None:
    key = override.split("=")[0]
    assert (
        error_of(config_file, override)
        == f"override {override!r}: {key}: found {found}, expected {expected}"
    )


def test_wrong_type_in_a_base_names_that_file(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(MINIMAL + "rollout: {n: many}\n")
    (tmp_path / "run.yaml").write_text("base: base.yaml\n")
    assert error_of(tmp_path / "run.yaml").startswith(f"{tmp_path / 'base.yaml'}: rollout.n: ")


@pytest.mark.parametrize("key", ["data.train_files", "model.path", "trainer.default_local_dir"])
def test_missing_required_key_is_named(config_file: Path, key: str) -> None:
    tree = yaml.safe_load(MINIMAL)
    del tree[key.split(".")[0]]
    config_file.write_text(yaml.safe_dump(tree))
    assert f"required key {key!r} is missing" in error_of(config_file)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    assert error_of(path) == f"config file {path}: no such file"
    path.write_text("base: nowhere.yaml\n")
    assert (
        error_of(path) == f"config file {tmp_path / 'nowhere.yaml'}: no such file (base of {path})"
    )
    path.write_text("base: {a: 1}\n")
    assert "base: expected a file name or a list of them" in error_of(path)
    path.write_text("- 1\n")
    assert "expected sections" in error_of(path)
    path.write_text("")
    assert "is missing" in error_of(path)


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("actor:\n  optim: [1, 2\n", "line 3", "expected ',' or ']'"),
        (
            "actor:\n  ppo_epochs: 1\n  shuffle: true\n  ppo_epochs: 2\n",
            "line 4",
            "key 'ppo_epochs' given twice",
        ),
        ("actor:\n\tppo_epochs: 1\n", "line 2", "cannot start any token"),
        ("actor: !!python/object:os.system {}\n", "line 1", "could not determine a constructor"),
    ],
)
def test_broken_yaml_names_the_line(config_file: Path, text: str, line: str, reason: str) -> None:
    config_file.write_text(text)
    message = error_of(config_file)
    assert message.startswith(f"{config_file}: not valid YAML: {line}: ")
    assert reason in message


def test_binary_file_is_refused(config_file: Path) -> None:
    config_file.write_bytes(b"PAR1\x15\x04\xff\x00")
    assert error_of(config_file).startswith(f"{config_file}: not valid YAML: ")


ALIAS_BOMB = "a0: &a0 [x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: &a {train_files: *a}\n", "aliases written out"),
        ("actor: &a\n  <<: *a\n", "aliases written out"),
        ("data: {train_files: &a [*a, *a]}\n", "aliases written out"),
        (ALIAS_BOMB, "more than 20000 values"),
        ("[" * 5000, "nested too deeply"),
        ("data: " + "[" * 100 + "]" * 100, "or 32 levels"),
        ("actor: !!int x\n", "not valid YAML"),
        ("actor: !!timestamp x\n", "not valid YAML"),
        ("# " + "x" * (1 << 19), "more than 256 KiB"),
    ],
)
def test_hostile_yaml_is_refused_at_once(config_file: Path, text: str, words: str) -> None:
    config_file.write_text(text)
    start = time.process_time()
    assert words in error_of(config_file)
    assert time.process_time() - start < 20, "without bounds it takes minutes, or all memory"


def test_anchors_are_accepted(config_file: Path) -> None:
    config_file.write_text(
        MINIMAL + "actor: {optim: &o {lr: 1e-4}}\ncritic: {optim: {<<: *o, clip_grad: 2}}\n"
    )
    assert (load(config_file).critic.optim.lr, load(config_file).critic.optim.clip_grad) == (
        1e-4,
        2.0,
    )


def test_shared_bases_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "b0.yaml").write_text(MINIMAL)
    for i in range(1, 20):
        (tmp_path / f"b{i}.yaml").write_text(f"base: [b{i - 1}.yaml, b{i - 1}.yaml]\n")
    assert load(tmp_path / "b19.yaml").rollout.n == 1
    for i in range(20, 30):
        (tmp_path / f"b{i}.yaml").write_text(f"base: b{i - 1}.yaml\n")
    assert "more than 20 files deep" in error_of(tmp_path / "b29.yaml")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "rollout.n=020",
            "found the string '020', expected an integer; a number does not begin with 0",
        ),
        ("rollout.n=1:30", "found the string '1:30', expected an integer"),
        ("trainer.seed=" + "9" * 400, "trainer.seed: found the string '999"),
        ("actor.optim.lr=" + "9" * 400, "actor.optim.lr: found the string '999"),
        (
            "actor.optim.lr=" + "9" * 400 + ".0",
            "actor.optim.lr: found inf, expected a finite number",
        ),
        ("actor.optim.lr=" + "9" * 5000, "actor.optim.lr: found the string '999"),
        ("data.prompt_key=on", "in quotes"),
        ("data.val_files=[no]", "in quotes"),
        (
            "rollout.n=${data.max_prompt_length}",
            "references ($NAME, ${...}) are not replaced: write the value",
        ),
        ("data.apply_chat_template_kwargs={a: !!set {b}}", "expected a mapping"),
        (
            "data.apply_chat_template_kwargs.a.b.c.d.e.f.g.h.i.j.k.l.m.n.o.p.q=1",
            "no setting has more than 16",
        ),
    ],
)
def test_unexpected_yaml_values_are_refused(config_file: Path, override: str, words: str) -> None:
    message = error_of(config_file, override)
    assert words in message and len(message) < 400


def test_circular_bases_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: ./a.yaml\n")
    assert "base: is circular" in error_of(tmp_path / "a.yaml")


@pytest.mark.parametrize("override", ["rollout.n", "=3", "rollout.n=[1"])
def test_malformed_override_is_refused(config_file: Path, override: str) -> None:
    assert error_of(config_file, override).startswith(f"override {override!r}: ")


@pytest.mark.parametrize("override", ["actor=3", "actor.optim=[1]"])
def test_value_in_place_of_a_section_is_refused(config_file: Path, override: str) -> None:
    assert "a section of settings, found" in error_of(config_file, override)


def test_section_in_place_of_a_value_is_refused(config_file: Path) -> None:
    assert "rollout.n: found the mapping {'x': 1}, expected an integer" in error_of(
        config_file, "rollout.n.x=1"
    )
