"""From YAML and overrides to a Config: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_mc.config import model_schema, ranges, schema, unknown
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import _leaf_hints, dotted_keys, load_config, to_dict, validate
from rlhf_mc.config.schema import Config

REPO = Path(__file__).resolve().parents[2]
MINIMAL = """
data:
  train_files: train.parquet
model:
  path: some/model
trainer:
  default_local_dir: runs/x
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def error_of(path: Path, *overrides: str) -> str:
    """The one line that loading ends with."""
    with pytest.raises(UserError) as caught:
        load_config(str(path), overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def load(path: Path, *overrides: str) -> Config:
    return load_config(str(path), overrides)


# ---------------------------------------------------------------- accepted


def test_defaults_and_required_keys(config_file: Path) -> None:
    cfg = load(config_file)
    assert cfg.data.train_files == ["train.parquet"], "a single string is a list of one"
    assert cfg.actor == schema.ActorConfig()
    assert cfg.critic.optim.lr == 1e-5


def test_critic_keeps_its_own_lr_where_only_another_key_of_its_optimizer_is_set(config_file: Path) -> None:
    cfg = load(config_file, "critic.optim.clip_grad=0.5")
    assert (cfg.critic.optim.lr, cfg.critic.optim.clip_grad) == (1e-5, 0.5)
    assert cfg.actor.optim.lr == 1e-6


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("actor.optim.lr=1e-6", "actor.optim", "lr", 1e-6),  # a string to plain PyYAML
        ("actor.optim.lr=-3E+2", "actor.optim", "lr", -300.0),
        ("actor.optim.lr=2", "actor.optim", "lr", 2.0),
        ("actor.optim.betas=[0.9, 0.95]", "actor.optim", "betas", (0.9, 0.95)),
        ("rollout.n=4", "rollout", "n", 4),
        ("actor.shuffle=true", "actor", "shuffle", True),
        ("critic.ppo_epochs=null", "critic", "ppo_epochs", None),
        ("critic.ppo_epochs=2", "critic", "ppo_epochs", 2),
        ("data.val_files=[a.parquet,b.parquet]", "data", "val_files", ["a.parquet", "b.parquet"]),
        ("data.val_files=a=b.parquet", "data", "val_files", ["a=b.parquet"]),
        ("trainer.logger=console", "trainer", "logger", ["console"]),
        ("algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl", "type", "adaptive"),
        ("data.apply_chat_template_kwargs.enable_thinking=false", "data", "apply_chat_template_kwargs",
         {"enable_thinking": False}),
    ],
)  # fmt: skip
def test_override(config_file: Path, override: str, section: str, name: str, value: Any) -> None:
    found: Any = load(config_file, override)
    for part in [*section.split("."), name]:
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_the_last_override_wins(config_file: Path) -> None:
    assert load(config_file, "rollout.n=2", "rollout.n=3").rollout.n == 3


def test_a_section_header_with_nothing_under_it_is_an_empty_section(config_file: Path) -> None:
    config_file.write_text(MINIMAL + "actor:\n")
    assert load(config_file).actor == schema.ActorConfig()


def test_base_is_relative_to_its_file_and_merged_deeply(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common/base.yaml").write_text(MINIMAL + "  seed: 7\nactor: {ppo_epochs: 2, optim: {lr: 3e-6}}\n")
    (tmp_path / "common/other.yaml").write_text("actor: {ppo_epochs: 3}\ndata: {apply_chat_template_kwargs: {a: 1}}\n")
    (tmp_path / "run.yaml").write_text(
        "base: [common/base.yaml, common/other.yaml]\n"
        "actor: {optim: {min_lr: 1e-7}}\ndata: {apply_chat_template_kwargs: {b: 2}}\n"
    )
    cfg = load(tmp_path / "run.yaml", "trainer.total_epochs=1")
    assert cfg.actor.ppo_epochs == 3, "the later base wins"
    assert (cfg.actor.optim.lr, cfg.actor.optim.min_lr) == (3e-6, 1e-7)
    assert (cfg.trainer.seed, cfg.trainer.total_epochs) == (7, 1)
    assert cfg.data.apply_chat_template_kwargs == {"a": 1, "b": 2}


def test_two_files_may_share_a_base(tmp_path: Path) -> None:
    (tmp_path / "root.yaml").write_text(MINIMAL)
    (tmp_path / "a.yaml").write_text("base: root.yaml\nrollout: {n: 2}\n")
    (tmp_path / "b.yaml").write_text("base: root.yaml\nactor: {ppo_epochs: 2}\n")
    (tmp_path / "run.yaml").write_text("base: [a.yaml, b.yaml]\n")
    cfg = load(tmp_path / "run.yaml")
    assert (cfg.rollout.n, cfg.actor.ppo_epochs) == (2, 2)


def test_to_dict_can_be_loaded_again(config_file: Path, tmp_path: Path) -> None:
    cfg = load(config_file, "actor.optim.betas=[0.8,0.9]", "data.apply_chat_template_kwargs.a=[1,2]", "rollout.n=3")
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(to_dict(cfg)))
    assert load(again) == cfg


ACTOR_SPLIT = (
    "actor.megatron.tensor_model_parallel_size=4",
    "actor.megatron.pipeline_model_parallel_size=2",
    "actor.megatron.sequence_parallel=true",
    "actor.megatron.num_layers_in_first_pipeline_stage=3",
    "actor.megatron.dtype=float32",
)


@pytest.mark.parametrize("role", ["critic", "ref"])
def test_a_roles_layout_is_the_actors_where_it_is_not_set(config_file: Path, role: str) -> None:
    config_file.write_text(MINIMAL + f"{role}:\n  megatron:\n")
    cfg = load(config_file, *ACTOR_SPLIT)
    assert getattr(cfg, role).megatron == cfg.actor.megatron
    assert getattr(cfg, role).megatron is not cfg.actor.megatron


@pytest.mark.parametrize("role", ["critic", "ref"])
def test_a_role_takes_over_what_belongs_to_its_own_split(config_file: Path, role: str) -> None:
    """TP 2: the actor's other settings. PP 1: no layers of a first stage. TP 1: no sequence parallelism."""
    cfg = load(config_file, *ACTOR_SPLIT, f"{role}.megatron.tensor_model_parallel_size=2")
    assert getattr(cfg, role).megatron == dataclasses.replace(cfg.actor.megatron, tensor_model_parallel_size=2)
    cfg = load(config_file, *ACTOR_SPLIT, f"{role}.megatron.pipeline_model_parallel_size=1")
    assert getattr(cfg, role).megatron == dataclasses.replace(
        cfg.actor.megatron, pipeline_model_parallel_size=1, num_layers_in_first_pipeline_stage=None
    )
    cfg = load(config_file, *ACTOR_SPLIT, f"{role}.megatron.tensor_model_parallel_size=1")
    assert not getattr(cfg, role).megatron.sequence_parallel
    assert cfg.actor.megatron.sequence_parallel
    # What is set is set, even where it cannot be: that is for `validate` to say.
    one = f"{role}.megatron.tensor_model_parallel_size=1"
    cfg = load(config_file, *ACTOR_SPLIT, one, f"{role}.megatron.sequence_parallel=true")
    assert getattr(cfg, role).megatron.sequence_parallel


def test_a_roles_layout_in_a_file_and_saved_again(config_file: Path, tmp_path: Path) -> None:
    config_file.write_text(MINIMAL + "critic: {megatron: {tensor_model_parallel_size: 1, dtype: bfloat16}}\n")
    cfg = load(config_file, *ACTOR_SPLIT)
    assert (cfg.critic.megatron.tensor_model_parallel_size, cfg.critic.megatron.dtype) == (1, "bfloat16")
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(to_dict(cfg)))
    assert load(again) == cfg


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("actor.ppo_epoch", "actor.ppo_epochs"),
        ("actr.ppo_epochs", "actor.ppo_epochs"),
        ("actor.optm.lr", "actor.optim.lr"),
        ("actor_rollout_ref.actor.ppo_epochs", "actor.ppo_epochs"),
        ("actor_rollout_ref.rollout.n", "rollout.n"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "rollout.tensor_model_parallel_size"),
        ("reward.custom_reward_function.path", "custom_reward_function.path"),
        ("data.seed", "trainer.seed"),
        ("+trainer.test_frq", "trainer.test_freq"),
    ],
)
def test_unknown_key_names_the_nearest(config_file: Path, key: str, nearest: str) -> None:
    message = error_of(config_file, f"{key}=1")
    assert repr(key) in message
    assert message.endswith(f"the nearest known key is {nearest!r}")
    assert message.startswith(f"override '{key}=1'")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("critic.use_dynamic_bsz", "use actor.use_dynamic_bsz (one switch"),
        ("reward_model.enable", "use reward_model.model_path (null: no reward model)"),
        ("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", "use actor.use_dynamic_bsz (one switch"),
        ("actor.megatron.context_parallel_size", "context parallelism is not supported"),
        ("actor_rollout_ref.actor.megatron.context_parallel_size", "tensor_model_parallel_size with sequence_parallel"),
    ],
)
def test_unknown_key_says_what_there_is_instead(config_file: Path, key: str, words: str) -> None:
    message = error_of(config_file, f"{key}=2")
    assert f"unknown key {key!r}; " in message and words in message and "\n" not in message


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        # Where nothing is near, nothing is suggested.
        ("rollout.frobnicate", "no known key is similar (rlhf_mc/config/schema.py lists them)"),
        ("trainer.name", "no known key is similar (rlhf_mc/config/schema.py lists them)"),
        ("quux", "no known key is similar (rlhf_mc/config/schema.py lists them)"),
        ("actor.megatron.tp", "no known key is similar (rlhf_mc/config/schema.py lists them)"),
        ("rollout.val_kwargs.m", "no known key is similar (rlhf_mc/config/schema.py lists them)"),
        # The same section goes before others.
        ("critic.lr", "the nearest known key is 'critic.optim.lr'"),
        ("critic.tensor_model_parallel_size", "the nearest known key is 'critic.megatron.tensor_model_parallel_size'"),
        ("ref.megatron.tensor_paralel_size", "the nearest known key is 'ref.megatron.tensor_model_parallel_size'"),
        ("critic.modelpath", "the nearest known key is 'critic.model_path'"),
        # verl's.
        ("actor_rollout_ref.rollout.name", "vLLM generates: leave it out"),
        ("rollout.name", "vLLM generates: leave it out"),
        ("critic.model.path", "use critic.model_path"),
        ("actor_rollout_ref.model.path", "the nearest known key is 'model.path'"),
        ("trainer.nnodes", "torchrun or srun says how many processes there are: leave it out"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", "use optim.lr_warmup_steps, a number of PPO steps"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload",
         "models are trained by Megatron-Core, not FSDP: see the megatron section"),
        ("ray_init.num_cpus", "there is no Ray: leave it out"),
        ("+actor.ppo_epochs", "write it without '+': actor.ppo_epochs"),
    ],
)  # fmt: skip
def test_what_is_said_of_an_unknown_key(config_file: Path, key: str, answer: str) -> None:
    assert error_of(config_file, f"{key}=1") == f"override '{key}=1': unknown key '{key}'; {answer}"


def test_keys_that_are_named_in_answers_exist() -> None:
    """Each section.key in what takes the place of verl's keys."""
    answers = [*unknown._INSTEAD.values(), *unknown._LAST_NAMES.values(), *unknown._SECTIONS.values()]
    known = dotted_keys()
    for answer in answers:
        for word in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", answer):
            assert any(key == word or key.endswith(f".{word}") for key in known), answer
    for key in [*unknown._INSTEAD, *unknown._LAST_NAMES]:
        assert key not in known


def test_all_unknown_keys_are_told_at_once(config_file: Path) -> None:
    config_file.write_text(MINIMAL + "actor: {ppo_epoch: 1, ppo_epochs: 2}\nactor.shuffle: true\n")
    message = error_of(config_file, "rollout.m=1", "rollout.n=2", "trainer.nnodes=1")
    assert message.startswith("4 unknown keys: ")
    for words in (
        f"'actor.ppo_epoch' ({config_file}): the nearest known key is 'actor.ppo_epochs'",
        f"'actor.shuffle' ({config_file}): a key with dots is for the command line; in a file sections are nested",
        "'rollout.m' (override 'rollout.m=1'): no known key is similar",
        "'trainer.nnodes' (override 'trainer.nnodes=1'): torchrun",
    ):
        assert words in message
    config_file.write_text(MINIMAL + "other: {" + ", ".join(f"k{i}: 1" for i in range(300)) + "}\n")
    message = error_of(config_file)
    assert (
        message.startswith(f"{config_file}: 300 unknown keys: 'other.k0': no known key is similar")
        and message.endswith("; and 290 more")
        and len(message) < 3000
    )


@pytest.mark.parametrize("prefix", ["", "actor_rollout_ref."])
def test_clip_ratio_names_both_of_its_successors(config_file: Path, prefix: str) -> None:
    message = error_of(config_file, f"{prefix}actor.clip_ratio=0.2")
    assert "actor.clip_ratio_low" in message
    assert "actor.clip_ratio_high" in message


def test_unknown_key_in_a_file_names_the_file(config_file: Path) -> None:
    config_file.write_text(MINIMAL + "actor_rollout_ref: {actor: {ppo_epochs: 1}}\n")
    message = error_of(config_file)
    assert message.startswith(f"{config_file}: ")
    assert "'actor_rollout_ref.actor.ppo_epochs'" in message
    assert message.endswith("'actor.ppo_epochs'")


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
        ("actor.kl_loss_type=k4", "the string 'k4'", "one of k1, k2, k3, low_var_kl"),
        ("trainer.logger=[console,wandb]", "the list ['console', 'wandb']",
         "a list, each entry one of console, jsonl, tensorboard"),
        ("data.val_files=[1]", "the list [1]", "a list, each entry a string"),
        ("actor.optim.betas=[0.9]", "the list [0.9]", "a list of 2, each entry a finite number"),
        ("data.apply_chat_template_kwargs=x", "the string 'x'", "a mapping"),
    ],
)  # fmt: skip
def test_wrong_type(config_file: Path, override: str, found: str, expected: str) -> None:
    key = override.split("=")[0]
    assert error_of(config_file, override) == f"override {override!r}: {key}: found {found}, expected {expected}"


def test_wrong_type_in_a_base_names_that_file(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(MINIMAL + "rollout: {n: many}\n")
    (tmp_path / "run.yaml").write_text("base: base.yaml\n")
    assert error_of(tmp_path / "run.yaml").startswith(f"{tmp_path / 'base.yaml'}: rollout.n: ")


@pytest.mark.parametrize("key", ["data.train_files", "model.path", "trainer.default_local_dir"])
def test_missing_required_key(config_file: Path, key: str) -> None:
    tree = yaml.safe_load(MINIMAL)
    del tree[key.split(".")[0]]
    config_file.write_text(yaml.safe_dump(tree))
    assert f"required key {key!r} is missing" in error_of(config_file)


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    assert error_of(path) == f"config file {path}: no such file"
    path.write_text("base: nowhere.yaml\n")
    assert error_of(path) == f"config file {tmp_path / 'nowhere.yaml'}: no such file (base of {path})"
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
        ("actor:\n  ppo_epochs: 1\n  shuffle: true\n  ppo_epochs: 2\n", "line 4", "key 'ppo_epochs' given twice"),
        ("actor:\n\tppo_epochs: 1\n", "line 2", "cannot start any token"),
        ("actor: !!python/object:os.system {}\n", "line 1", "could not determine a constructor"),
    ],
)
def test_broken_yaml_names_the_line(config_file: Path, text: str, line: str, reason: str) -> None:
    config_file.write_text(text)
    message = error_of(config_file)
    assert message.startswith(f"{config_file}: not valid YAML: {line}: ")
    assert reason in message


def test_a_file_that_is_not_text_is_refused(config_file: Path) -> None:
    config_file.write_bytes(b"PAR1\x15\x04\xff\x00")
    assert error_of(config_file).startswith(f"{config_file}: not valid YAML: ")


ALIAS_BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: &a {train_files: *a}\n", "an anchor contains itself"),
        ("actor: &a\n  <<: *a\n", "an anchor contains itself"),
        ("data: {train_files: &a [*a, *a]}\n", "an anchor contains itself"),
        (ALIAS_BOMB, "more than 20000 values"),
        ("[" * 5000, "nested too deeply"),
        ("data: " + "[" * 100 + "]" * 100, "nested too deeply"),
        ("actor: !!int x\n", "not valid YAML"),
        ("actor: !!timestamp x\n", "not valid YAML"),
        ("# " + "x" * (1 << 19), "more than 256 KiB"),
    ],
)
def test_hostile_yaml_is_refused_at_once(config_file: Path, text: str, words: str) -> None:
    config_file.write_text(text)
    start = time.monotonic()
    assert words in error_of(config_file)
    assert time.monotonic() - start < 20, "without bounds it takes minutes, or all memory"


def test_anchors_may_be_used(config_file: Path) -> None:
    config_file.write_text(MINIMAL + "actor: {optim: &o {lr: 1e-4}}\ncritic: {optim: {<<: *o, clip_grad: 2}}\n")
    assert (load(config_file).critic.optim.lr, load(config_file).critic.optim.clip_grad) == (1e-4, 2.0)


def test_bases_that_double_at_each_level(tmp_path: Path) -> None:
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
        ("rollout.n=020", "found the string '020', expected an integer; a number does not begin with 0"),
        ("rollout.n=1:30", "found the string '1:30', expected an integer"),
        ("trainer.seed=" + "9" * 400, "trainer.seed: found the string '999"),
        ("actor.optim.lr=" + "9" * 400, "actor.optim.lr: found the string '999"),
        ("actor.optim.lr=" + "9" * 400 + ".0", "actor.optim.lr: found inf, expected a finite number"),
        ("actor.optim.lr=" + "9" * 5000, "actor.optim.lr: found the string '999"),
        ("data.prompt_key=on", "in quotes"),
        ("data.val_files=[no]", "in quotes"),
        ("rollout.n=${data.max_prompt_length}", "references ($NAME, ${...}) are not replaced: write the value"),
        ("data.apply_chat_template_kwargs={a: !!set {b}}", "expected a mapping"),
        ("data.apply_chat_template_kwargs.a.b.c.d.e.f.g.h.i.j.k.l.m.n.o.p.q=1", "no setting has more than 16"),
    ],
)
def test_values_that_yaml_would_read_as_something_else(config_file: Path, override: str, words: str) -> None:
    message = error_of(config_file, override)
    assert words in message and len(message) < 400


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("data.prompt_key=020", "data", "prompt_key", "020"),
        ("data.prompt_key=2024-01-01", "data", "prompt_key", "2024-01-01"),
        ("data.prompt_key='on'", "data", "prompt_key", "on"),
        ("data.prompt_key==", "data", "prompt_key", "="),
        ("rollout.n=1_000", "rollout", "n", 1000),
        ("rollout.n=0x10", "rollout", "n", 16),
        ("actor.shuffle=yes", "actor", "shuffle", True),
        ("actor.optim.lr=1.5e-6", "actor.optim", "lr", 1.5e-6),
        ("actor.optim.lr=1E-6", "actor.optim", "lr", 1e-6),
        ("actor.optim.lr=.5", "actor.optim", "lr", 0.5),
        ("critic.model_path=~", "critic", "model_path", None),
        ("critic.model_path=", "critic", "model_path", None),
        ("data.apply_chat_template_kwargs={think: no}", "data", "apply_chat_template_kwargs", {"think": False}),
    ],
)
def test_values_are_read_as_they_are_meant(
    config_file: Path, override: str, section: str, name: str, value: Any
) -> None:
    test_override(config_file, override, section, name, value)


def test_bases_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: ./a.yaml\n")
    assert "base: goes in a circle" in error_of(tmp_path / "a.yaml")


@pytest.mark.parametrize("override", ["rollout.n", "=3", "rollout.n=[1"])
def test_malformed_override(config_file: Path, override: str) -> None:
    assert error_of(config_file, override).startswith(f"override {override!r}: ")


@pytest.mark.parametrize("override", ["actor=3", "actor.optim=[1]"])
def test_a_section_is_not_a_value(config_file: Path, override: str) -> None:
    assert "a section of settings, found" in error_of(config_file, override)


def test_a_value_is_not_a_section(config_file: Path) -> None:
    assert "rollout.n: found the mapping {'x': 1}, expected an integer" in error_of(config_file, "rollout.n.x=1")


# ---------------------------------------------------------------- checks across fields


def validated(path: Path, *overrides: str, world_size: int = 4) -> Config:
    sizes = ("data.train_batch_size=32", "actor.ppo_mini_batch_size=16")
    cfg = load_config(str(path), [*sizes, *overrides])
    validate(cfg, world_size)
    return cfg


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("actor.megatron.tensor_model_parallel_size=2", "actor.megatron.pipeline_model_parallel_size=2"),
        ("rollout.tensor_model_parallel_size=4",),
        (
            "actor.megatron.tensor_model_parallel_size=4",
            "critic.megatron.tensor_model_parallel_size=1",
            "ref.megatron.tensor_model_parallel_size=2",
            "ref.megatron.pipeline_model_parallel_size=2",
        ),
        (
            "model.dist_checkpointing_path=/somewhere",
            "critic.model_path=/its/own",
            "critic.megatron.virtual_pipeline_model_parallel_size=2",
            "critic.megatron.pipeline_model_parallel_size=2",
        ),
        ("actor.clip_ratio_high=1.5",),
        ("critic.ppo_mini_batch_size=32",),
        ("data.max_prompt_length=8192", "data.max_response_length=8192"),  # exactly the smallest budget
        ("ref.log_prob_max_token_len_per_gpu=1",),  # no KL term: no reference pass
        ("reward_model.forward_max_token_len_per_gpu=1",),  # no reward model
        (
            "actor.use_dynamic_bsz=false",
            "actor.ppo_micro_batch_size_per_gpu=2",
            "critic.forward_micro_batch_size_per_gpu=4",
            "actor.ppo_max_token_len_per_gpu=1",  # not used then
        ),
        ("rollout.val_kwargs.n=4", "rollout.val_kwargs.temperature=1.0"),
        ("trainer.test_freq=5", "data.val_files=v.parquet", "trainer.target_val_acc=0.9"),
        ("algorithm.kl_ctrl.type=adaptive", "algorithm.use_kl_in_reward=true"),
        ("algorithm.kl_ctrl.target_kl=0",),  # not used by the fixed controller
    ],
)
def test_valid(config_file: Path, overrides: tuple[str, ...]) -> None:
    validated(config_file, *overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        *(
            ((f"{key}=3",), (f"{key} is 3; that needs actor.use_dynamic_bsz: false",))
            for key in (
                "actor.ppo_micro_batch_size_per_gpu",
                "critic.ppo_micro_batch_size_per_gpu",
                "critic.forward_micro_batch_size_per_gpu",
                "ref.log_prob_micro_batch_size_per_gpu",
                "rollout.log_prob_micro_batch_size_per_gpu",
            )
        ),
        (
            ("actor.use_dynamic_bsz=false", "critic.ppo_micro_batch_size_per_gpu=2"),
            ("needs actor.ppo_micro_batch_size_per_gpu, which is null",),
        ),
        (
            ("actor.use_dynamic_bsz=false", "actor.ppo_micro_batch_size_per_gpu=0"),
            ("actor.ppo_micro_batch_size_per_gpu is 0; it must be at least 1",),
        ),
        *(
            ((f"{key}=1023", *kl), (f"{key} is 1023", "longest sequence", "data.max_prompt_length 512", "= 1024"))
            for key, kl in (
                ("actor.ppo_max_token_len_per_gpu", ()),
                ("critic.ppo_max_token_len_per_gpu", ()),
                ("critic.forward_max_token_len_per_gpu", ()),
                ("rollout.log_prob_max_token_len_per_gpu", ()),
                ("ref.log_prob_max_token_len_per_gpu", ("actor.use_kl_loss=true",)),
                ("reward_model.forward_max_token_len_per_gpu", ("reward_model.model_path=rm",)),
            )
        ),
        (("reward.num_workers=0",), ("reward.num_workers is 0; it must be at least 1",)),
        (("reward.num_workers=-2",), ("reward.num_workers is -2; it must be at least 1",)),
        (("reward.timeout_seconds=0",), ("reward.timeout_seconds is 0.0; it must be above 0",)),
        (
            ("actor.megatron.tensor_model_parallel_size=3",),
            ("3 x actor.megatron.pipeline_model_parallel_size 1 = 3", "1, 2, 4"),
        ),
        (("actor.megatron.tensor_model_parallel_size=4", "actor.megatron.pipeline_model_parallel_size=2"), ("= 8",)),
        (
            ("actor.megatron.tensor_model_parallel_size=2", "actor.megatron.expert_model_parallel_size=4"),
            ("expert_model_parallel_size 4 does not divide the 2 data-parallel replicas", "what would: 1, 2"),
        ),
        (
            ("actor.megatron.virtual_pipeline_model_parallel_size=2",),
            ("virtual_pipeline_model_parallel_size is 2", "pipeline_model_parallel_size of at least 2"),
        ),
        (
            (
                "actor.megatron.virtual_pipeline_model_parallel_size=1",
                "actor.megatron.pipeline_model_parallel_size=2",
            ),
            ("virtual_pipeline_model_parallel_size is 1", "at least 2, or null"),
        ),
        (
            (
                "actor.megatron.virtual_pipeline_model_parallel_size=2",
                "actor.megatron.pipeline_model_parallel_size=2",
                "actor.megatron.num_layers_in_first_pipeline_stage=3",
            ),
            ("num_layers_in_first_pipeline_stage to null",),
        ),
        (
            (
                "actor.megatron.virtual_pipeline_model_parallel_size=2",
                "actor.megatron.pipeline_model_parallel_size=2",
                "model.dist_checkpointing_path=/somewhere",
            ),
            ("virtual_pipeline_model_parallel_size is 2", "model.dist_checkpointing_path to null"),
        ),
        (
            (
                "critic.megatron.virtual_pipeline_model_parallel_size=2",
                "critic.megatron.pipeline_model_parallel_size=2",
                "model.dist_checkpointing_path=/somewhere",
            ),
            ("critic.megatron.virtual_pipeline_model_parallel_size is 2", "model.dist_checkpointing_path to null"),
        ),
        (("trainer.max_consecutive_skipped_updates=0",), ("max_consecutive_skipped_updates is 0", "at least 1")),
        (("trainer.preemption_grace_seconds=59",), ("preemption_grace_seconds is 59", "at least 60")),
        (
            ("critic.model_path=''",),
            ("critic.model_path is empty", "leave it out"),
        ),
        (
            ("custom_reward_function.path=a.py", "reward_model.model_path=rm", "data.val_files=[]"),
            ("custom_reward_function.path", "reward_model.model_path", "never be called"),
        ),
        (
            ("actor.megatron.param_offload=true",),
            ("actor.megatron.param_offload is true", "reshard.share_weights is true", "set one of them to false"),
        ),
        (
            ("actor.megatron.sequence_parallel=true",),
            ("actor.megatron.sequence_parallel is true", "tensor_model_parallel_size of at least 2"),
        ),
        (
            ("critic.megatron.pipeline_model_parallel_size=3",),
            ("critic.megatron.tensor_model_parallel_size 1 x critic.megatron.pipeline_model_parallel_size 3 = 3",),
        ),
        (("ref.megatron.tensor_model_parallel_size=8",), ("ref.megatron.tensor_model_parallel_size 8", "1, 2, 4")),
        (("critic.megatron.tensor_model_parallel_size=0",), ("critic.megatron.tensor_model_parallel_size is 0",)),
        (
            ("actor.megatron.tensor_model_parallel_size=4", "critic.megatron.expert_model_parallel_size=4",
             "critic.megatron.tensor_model_parallel_size=2"),
            ("critic.megatron.expert_model_parallel_size 4 does not divide the 2 data-parallel replicas",),
        ),
        (
            ("ref.megatron.sequence_parallel=true",),
            ("ref.megatron.sequence_parallel is true", "ref.megatron.tensor_model_parallel_size of at least 2"),
        ),
        (
            ("critic.megatron.virtual_pipeline_model_parallel_size=2",),
            ("critic.megatron.virtual_pipeline_model_parallel_size is 2", "critic.megatron.pipeline_model"),
        ),
        (
            ("critic.megatron.num_layers_in_last_pipeline_stage=2",),
            ("critic.megatron.num_layers_in_last_pipeline_stage is 2", "critic.megatron.pipeline_model"),
        ),
        (
            ("actor.megatron.tensor_model_parallel_size=4", "critic.megatron.tensor_model_parallel_size=1",
             "actor.ppo_mini_batch_size=2"),
            ("critic.ppo_mini_batch_size 2", "fewer sequences than the 4 data-parallel ranks of critic.megatron"),
        ),
        (("rollout.tensor_model_parallel_size=3",), ("rollout.tensor_model_parallel_size 3", "1, 2, 4")),
        (("data.train_batch_size=0",), ("data.train_batch_size is 0", "at least 1")),
        (("actor.ppo_mini_batch_size=64",), ("actor.ppo_mini_batch_size is 64", "data.train_batch_size, 32")),
        (("actor.ppo_mini_batch_size=5",), ("actor.ppo_mini_batch_size is 5", "divide")),
        (("critic.ppo_mini_batch_size=5",), ("critic.ppo_mini_batch_size is 5", "divide")),
        (("actor.ppo_mini_batch_size=2",), ("fewer sequences than the 4 data-parallel ranks",)),
        (("actor.ppo_max_token_len_per_gpu=1000",), ("actor.ppo_max_token_len_per_gpu is 1000", "512 + ", "= 1024")),
        (("critic.ppo_max_token_len_per_gpu=1023",), ("critic.ppo_max_token_len_per_gpu is 1023",)),
        (("critic.forward_max_token_len_per_gpu=1023",), ("critic.forward_max_token_len_per_gpu is 1023",)),
        (("rollout.log_prob_max_token_len_per_gpu=1",), ("rollout.log_prob_max_token_len_per_gpu is 1",)),
        (("ref.log_prob_max_token_len_per_gpu=1", "actor.use_kl_loss=true"), ("ref.log_prob_max_token_len",)),
        (("data.max_response_length=0",), ("data.max_response_length is 0",)),
        (("data.train_max_samples=0",), ("data.train_max_samples is 0", "-1 or at least 1")),
        (("rollout.n=0",), ("rollout.n is 0",)),
        (("rollout.max_num_batched_tokens=100",), ("rollout.max_num_seqs, 256",)),
        (("actor.clip_ratio_low=1",), ("actor.clip_ratio_low is 1.0",)),
        (("actor.clip_ratio_high=0",), ("actor.clip_ratio_high is 0.0",)),
        (("actor.clip_ratio_c=1",), ("actor.clip_ratio_c is 1.0", "above 1")),
        (("algorithm.gamma=1.01",), ("algorithm.gamma is 1.01",)),
        (("algorithm.lam=-0.1",), ("algorithm.lam is -0.1",)),
        (("rollout.temperature=0",), ("rollout.temperature is 0.0", "at least 0.01")),
        (("rollout.gpu_memory_utilization=1.5",), ("rollout.gpu_memory_utilization is 1.5",)),
        (("rollout.val_kwargs.n=4",), ("rollout.val_kwargs.n is 4", "temperature")),
        (("actor.optim.lr=-1e-6",), ("actor.optim.lr is -1e-06",)),
        (("critic.optim.min_lr=1",), ("critic.optim.min_lr is 1.0", "critic.optim.lr, 1e-05")),
        (("actor.optim.betas=[0.9,1.0]",), ("actor.optim.betas has 1.0",)),
        (("actor.optim.lr_warmup_steps=9", "trainer.total_training_steps=8"), ("actor.optim.lr_warmup_steps is 9",)),
        (("trainer.test_freq=5",), ("trainer.test_freq is 5", "data.val_files")),
        (("trainer.test_freq=0",), ("trainer.test_freq is 0",)),
        (("trainer.target_val_acc=0.9",), ("trainer.target_val_acc is 0.9", "trainer.test_freq")),
        (("algorithm.kl_ctrl.horizon=0",), ("algorithm.kl_ctrl.horizon is 0",)),
        (("algorithm.kl_ctrl.type=adaptive",), ("algorithm.use_kl_in_reward",)),
        (("algorithm.kl_ctrl.type=adaptive", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.target_kl=0"),
         ("algorithm.kl_ctrl.target_kl is 0.0",)),
        (("trainer.seed=-1",), ("trainer.seed is -1",)),
        (("data.train_files=[]",), ("data.train_files is empty",)),
    ],
)  # fmt: skip
def test_invalid(config_file: Path, overrides: tuple[str, ...], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        validated(config_file, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def numeric_keys() -> list[str]:
    return [
        key
        for key, hint in _leaf_hints().items()
        if re.search(r"\b(int|float)\b", str(hint)) and "Literal" not in str(hint)
    ]


@pytest.mark.parametrize("key", numeric_keys())
def test_every_number_has_a_range(config_file: Path, key: str) -> None:
    bounds = ranges.range_of(key)
    assert bounds is not ranges._ANY, f"{key} needs an entry in config/ranges.py"
    for value in (10**40, -(10**40), 1e308, -1e308, bounds.high * 1.01 + 1, bounds.low * 1.01 - 2):
        with pytest.raises(UserError):
            list_or_number = f"[{value}, {value}]" if key.endswith("betas") else value
            validated(config_file, f"{key}={list_or_number}")
    assert bounds.complaint(bounds.high if not bounds.open else bounds.high / 2) is None


# ---------------------------------------------------------------- the schema and the shipped files


def section_classes() -> list[type]:
    modules = (schema.__name__, model_schema.__name__)
    return [cls for _, cls in inspect.getmembers(schema, dataclasses.is_dataclass) if cls.__module__ in modules]


def test_dotted_keys_cover_every_field() -> None:
    keys = dotted_keys()
    assert len(keys) == len(set(keys))
    leaves = {key.rsplit(".", 1)[-1] for key in keys}
    sections = {key.split(".")[0] for key in keys} | {"optim", "megatron", "val_kwargs", "kl_ctrl"}
    for cls in section_classes():
        for field in dataclasses.fields(cls):
            assert field.name in leaves | sections, f"{cls.__name__}.{field.name}"


def test_every_setting_is_documented() -> None:
    """Each field of each section is followed by a string that says what it is."""
    trees = [ast.parse(inspect.getsource(module)) for module in (schema, model_schema)]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    assert {node.name for node in classes} == {cls.__name__ for cls in section_classes()}
    for node in classes:
        assert ast.get_docstring(node), node.name
        for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign):
                documented = (
                    isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                    and isinstance(after.value.value, str)
                )
                assert documented, f"{node.name}.{ast.unparse(statement.target)} has no docstring under it"


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("**/*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_loads(path: Path) -> None:
    """With the smallest world that its own layout fits in."""
    cfg = load_config(str(path), [])
    layout = cfg.actor.megatron
    world = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size
    validate(cfg, world * cfg.rollout.tensor_model_parallel_size)
