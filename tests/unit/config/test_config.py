"""From YAML and overrides to a Config: values, bases, inherited layouts; the schema and the shipped
files."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_files import MINIMAL, load
from documents import ROOT

from rlhf_mc.config import algorithm_schema, model_schema, reward_schema, schema, trainer_schema
from rlhf_mc.config.checks import check_config
from rlhf_mc.config.fields import field_types, is_free_on_resume
from rlhf_mc.config.health_schema import HealthConfig
from rlhf_mc.config.load import dotted_keys, load_config, to_dict
from rlhf_mc.config.model_schema import TRAINING_ONLY, MegatronConfig
from rlhf_mc.config.printing import commented_yaml
from rlhf_mc.config.schema import Config, TrainerConfig, layouts


def test_minimal_config_has_the_defaults(config_file: Path) -> None:
    cfg = load(config_file)
    assert cfg.data.train_files == ["train.parquet"], "a single string is a list of one"
    assert cfg.actor == schema.ActorConfig()
    assert cfg.critic.optim.lr == 1e-5


def test_critic_lr_keeps_its_own_default(config_file: Path) -> None:
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
        ("reshard.verify=off", "reshard", "verify", "off"),  # false to YAML
        ("actor.shuffle=true", "actor", "shuffle", True),
        ("critic.ppo_epochs=null", "critic", "ppo_epochs", None),
        ("critic.ppo_epochs=2", "critic", "ppo_epochs", 2),
        ("data.val_files=[a.parquet,b.parquet]", "data", "val_files", ["a.parquet", "b.parquet"]),
        ("data.val_files=a=b.parquet", "data", "val_files", ["a=b.parquet"]),
        ("trainer.logger=console", "trainer", "logger", ["console"]),
        ("algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl", "type", "adaptive"),
        ("data.apply_chat_template_kwargs.enable_thinking=false", "data",
         "apply_chat_template_kwargs",
         {"enable_thinking": False}),
    ],
)  # fmt: skip
def test_override_sets_the_value(
    config_file: Path, override: str, section: str, name: str, value: Any
) -> None:
    found: Any = load(config_file, override)
    for part in [*section.split("."), name]:
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


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
        (
            "data.apply_chat_template_kwargs={think: no}",
            "data",
            "apply_chat_template_kwargs",
            {"think": False},
        ),
    ],
)
def test_yaml_values_get_the_type_of_the_setting(
    config_file: Path, override: str, section: str, name: str, value: Any
) -> None:
    test_override_sets_the_value(config_file, override, section, name, value)


def test_last_override_takes_precedence(config_file: Path) -> None:
    assert load(config_file, "rollout.n=2", "rollout.n=3").rollout.n == 3


def test_section_header_alone_is_an_empty_section(config_file: Path) -> None:
    config_file.write_text(MINIMAL + "actor:\n")
    assert load(config_file).actor == schema.ActorConfig()


def test_base_is_relative_to_its_file_and_merged_deeply(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common/base.yaml").write_text(
        MINIMAL + "  seed: 7\nactor: {ppo_epochs: 2, optim: {lr: 3e-6}}\n"
    )
    (tmp_path / "common/other.yaml").write_text(
        "actor: {ppo_epochs: 3}\ndata: {apply_chat_template_kwargs: {a: 1}}\n"
    )
    (tmp_path / "run.yaml").write_text(
        "base: [common/base.yaml, common/other.yaml]\n"
        "actor: {optim: {min_lr: 1e-7}}\ndata: {apply_chat_template_kwargs: {b: 2}}\n"
    )
    cfg = load(tmp_path / "run.yaml", "trainer.total_epochs=1")
    assert cfg.actor.ppo_epochs == 3, "the later base wins"
    assert (cfg.actor.optim.lr, cfg.actor.optim.min_lr) == (3e-6, 1e-7)
    assert (cfg.trainer.seed, cfg.trainer.total_epochs) == (7, 1)
    assert cfg.data.apply_chat_template_kwargs == {"a": 1, "b": 2}


def test_two_files_can_share_a_base(tmp_path: Path) -> None:
    (tmp_path / "root.yaml").write_text(MINIMAL)
    (tmp_path / "a.yaml").write_text("base: root.yaml\nrollout: {n: 2}\n")
    (tmp_path / "b.yaml").write_text("base: root.yaml\nactor: {ppo_epochs: 2}\n")
    (tmp_path / "run.yaml").write_text("base: [a.yaml, b.yaml]\n")
    cfg = load(tmp_path / "run.yaml")
    assert (cfg.rollout.n, cfg.actor.ppo_epochs) == (2, 2)


def test_to_dict_can_be_loaded_again(config_file: Path, tmp_path: Path) -> None:
    cfg = load(
        config_file,
        "actor.optim.betas=[0.8,0.9]",
        "data.apply_chat_template_kwargs.a=[1,2]",
        "rollout.n=3",
    )
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
def test_role_inherits_the_layout_of_the_actor(config_file: Path, role: str) -> None:
    config_file.write_text(MINIMAL + f"{role}:\n  megatron:\n")
    cfg = load(config_file, *ACTOR_SPLIT)
    assert layouts(cfg)[role] == layouts(cfg)["actor"]
    assert getattr(cfg, role).megatron is not cfg.actor.megatron


def test_frozen_role_does_not_inherit_settings_of_training(
    config_file: Path, tmp_path: Path
) -> None:
    training = [
        f"actor.megatron.{key}" for key in ("grad_offload=true", "recompute_granularity=full")
    ]
    cfg = load(config_file, *training, "actor.megatron.use_distributed_optimizer=false")
    assert cfg.critic.megatron == cfg.actor.megatron
    for role in ("ref", "reward_model"):
        assert not set(TRAINING_ONLY) & set(vars(getattr(cfg, role).megatron))
        assert all(
            getattr(layouts(cfg)[role], key) == getattr(MegatronConfig(), key)
            for key in TRAINING_ONLY
        )
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(to_dict(cfg)))
    assert load(again) == cfg


@pytest.mark.parametrize("role", ["critic", "ref"])
def test_role_does_not_inherit_settings_of_another_split(config_file: Path, role: str) -> None:
    """TP 2: the actor's other settings. PP 1: no layers of a first stage. TP 1: no sequence
    parallelism."""
    cfg = load(config_file, *ACTOR_SPLIT, f"{role}.megatron.tensor_model_parallel_size=2")
    assert layouts(cfg)[role] == dataclasses.replace(
        layouts(cfg)["actor"], tensor_model_parallel_size=2
    )
    cfg = load(config_file, *ACTOR_SPLIT, f"{role}.megatron.pipeline_model_parallel_size=1")
    assert layouts(cfg)[role] == dataclasses.replace(
        layouts(cfg)["actor"],
        pipeline_model_parallel_size=1,
        num_layers_in_first_pipeline_stage=None,
    )
    cfg = load(config_file, *ACTOR_SPLIT, f"{role}.megatron.tensor_model_parallel_size=1")
    assert not getattr(cfg, role).megatron.sequence_parallel
    assert cfg.actor.megatron.sequence_parallel
    # What is set is set, even where it cannot be: that is for `validate` to say.
    one = f"{role}.megatron.tensor_model_parallel_size=1"
    cfg = load(config_file, *ACTOR_SPLIT, one, f"{role}.megatron.sequence_parallel=true")
    assert getattr(cfg, role).megatron.sequence_parallel


def test_strategy_is_inherited_without_what_it_cannot_have(
    config_file: Path, tmp_path: Path
) -> None:
    """Check that a role has the sharding of an actor with fsdp2, and with fsdp2 itself all but the
    split of a split actor."""
    sharded = ("actor.strategy=fsdp2", "actor.fsdp_config.fsdp_size=2")
    cfg = load(config_file, *sharded, "ref.fsdp_config.reshard_after_forward=false")
    assert layouts(cfg)["critic"].fsdp == model_schema.FsdpConfig(fsdp_size=2)
    assert layouts(cfg)["ref"].fsdp == model_schema.FsdpConfig(2, reshard_after_forward=False)
    assert load(config_file, *sharded, "ref.strategy=megatron").ref.strategy == "megatron"
    cfg = load(config_file, *ACTOR_SPLIT, "ref.strategy=fsdp2", "actor.megatron.dtype=float32")
    assert (cfg.actor.strategy, cfg.critic.strategy) == ("megatron", "megatron")
    megatron = cfg.ref.megatron
    assert (megatron.tensor_model_parallel_size, megatron.dtype) == (1, "float32")
    assert not megatron.sequence_parallel
    again = tmp_path / "again.yaml"
    again.write_text(commented_yaml(cfg))
    assert load(again) == cfg


def test_layout_of_a_role_can_be_loaded_again(config_file: Path, tmp_path: Path) -> None:
    config_file.write_text(
        MINIMAL + "critic: {megatron: {tensor_model_parallel_size: 1, dtype: bfloat16}}\n"
    )
    cfg = load(config_file, *ACTOR_SPLIT)
    assert (cfg.critic.megatron.tensor_model_parallel_size, cfg.critic.megatron.dtype) == (
        1,
        "bfloat16",
    )
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(to_dict(cfg)))
    assert load(again) == cfg


MODULES = (schema, model_schema, algorithm_schema, reward_schema, trainer_schema)


def section_classes() -> list[type]:
    """Return the dataclasses of the settings, and those of settings' values."""
    found = [
        cls for module in MODULES for _, cls in inspect.getmembers(module, dataclasses.is_dataclass)
    ]
    return list({cls for cls in found if cls.__module__ in {module.__name__ for module in MODULES}})


def test_dotted_keys_cover_every_field() -> None:
    keys = dotted_keys()
    assert len(keys) == len(set(keys))
    leaves = {key.rsplit(".", 1)[-1] for key in keys}
    sections = {part for key in keys for part in key.split(".")[:-1]}
    for cls in set(section_classes()) - {algorithm_schema.EstimatorNeeds, model_schema.RoleLayout}:
        for field in dataclasses.fields(cls):
            assert field.name in leaves | sections, f"{cls.__name__}.{field.name}"


@pytest.mark.parametrize(
    ("key", "is_free"),
    [
        ("trainer.default_local_dir", True),
        ("trainer.save_minutes", True),
        ("trainer.logger", True),
        ("trainer.seed", False),
        ("health.kl_coef", True),
        ("health.of_an_earlier_version", True),
        ("trainer.of_an_earlier_version", False),
        ("actor.optim.lr", False),
        ("reward_models.judge.model_path", False),
        ("custom_reward_function.reward_kwargs.trainer", False),
    ],
)
def test_settings_that_may_change_on_a_resume_are_marked(key: str, is_free: bool) -> None:
    assert is_free_on_resume(key) == is_free


def test_marker_is_no_part_of_a_type() -> None:
    types = field_types(TrainerConfig)
    assert types["save_freq"] == types["test_freq"]
    assert types["keep_best"] is bool
    assert field_types(Config)["health"] is HealthConfig


def test_every_setting_is_documented() -> None:
    """Check that a string follows each field of each section."""
    trees = [ast.parse(inspect.getsource(module)) for module in MODULES]
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
                assert documented, (
                    f"{node.name}.{ast.unparse(statement.target)} has no docstring under it"
                )


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("**/*.yaml")), ids=lambda path: path.name
)
def test_every_shipped_config_loads(path: Path) -> None:
    """Validate it with the smallest world of its layout."""
    cfg = load_config(str(path), [])
    layout = cfg.actor.megatron
    world = (
        layout.tensor_model_parallel_size
        * layout.pipeline_model_parallel_size
        * layout.context_parallel_size
    )
    world *= layout.expert_model_parallel_size
    check_config(cfg, math.lcm(world, cfg.rollout.tensor_model_parallel_size))
