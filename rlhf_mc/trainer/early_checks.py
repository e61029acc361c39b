"""Checks that take about a second, before torch is imported and before a rank waits for another. Each rank makes them
by itself. setup.py makes the checks that need weights, tokenizer, rows or a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from rlhf_mc.architectures.hf_config import check_architecture
from rlhf_mc.architectures.spec import FAMILIES, ModelShape
from rlhf_mc.config.errors import NodeError, UserError, about, reason_of
from rlhf_mc.config.paths import check_present
from rlhf_mc.config.roles import uses_critic, uses_reference
from rlhf_mc.config.schema import Config, layouts, reward_models
from rlhf_mc.config.validate import validate
from rlhf_mc.data.source import check_columns, columns_of, scored_by_rule
from rlhf_mc.models.checks import check_layout, check_length
from rlhf_mc.reshard.layout import check_vllm


def world_size() -> int:
    """Return the number of ranks that torchrun or srun has started; 1 without them. Raise UserError if the environment
    variable is not a number."""
    text = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"the environment variable WORLD_SIZE is {text!r}; it must be the number of ranks")
    return int(text)


def check_early(cfg: Config, world: int) -> None:
    """Raise UserError if the settings, the files that they name, or a config.json show that the run cannot start on
    `world` ranks."""
    validate(cfg, world)
    check_present(cfg)
    _check_models(cfg)
    for key, files in (("data.train_files", cfg.data.train_files), ("data.val_files", cfg.data.val_files)):
        for file in files:
            with about(f"{key} {file}:"):
                check_columns(file, columns_of(cfg.data, scored_by_rule(cfg, key)))
    _check_environment()


def _check_environment() -> None:
    """Raise UserError if this is a rank and the environment lacks the address of rank 0."""
    if "RANK" not in os.environ:
        return
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise UserError(
            f"RANK is set in the environment, and {' and '.join(missing)} not; torchrun and launch/slurm_job.sh set "
            "them, and without RANK the run has one process"
        )


def _check_models(cfg: Config) -> None:
    """Raise UserError if a config.json is of an unsupported model, or of one that the layouts cannot shard."""
    actor = _shape("model.path", cfg.model.path, for_vllm=True)
    roles = {"actor": ("model.path", actor)}
    if uses_critic(cfg):
        key = "model.path" if cfg.critic.model_path is None else "critic.model_path"
        roles["critic"] = (key, _shape(key, cfg.critic.model_path or cfg.model.path, value_head=True))
    if uses_reference(cfg):
        roles["ref"] = ("model.path", actor)
    for role, scorer in reward_models(cfg).items():
        key = f"{role}.model_path"
        roles[role] = (key, _shape(key, str(scorer.model_path), value_head=True))
    for role, (key, shape) in roles.items():
        megatron = layouts(cfg)[role]
        with _in_section(f"{role}.megatron", key):
            check_layout(shape, megatron, role)
    check_length(actor, cfg.data)
    with _in_section("rollout", "model.path"):
        check_vllm(actor, cfg.rollout.tensor_model_parallel_size)


@contextlib.contextmanager
def _in_section(section: str, model: str) -> Iterator[None]:
    """Add to a UserError inside the section of the setting that it begins with, and the setting of its model."""
    try:
        yield
    except UserError as error:
        has_section = str(error).startswith((f"{section}.", "config.json"))
        raise UserError(f"{error if has_section else f'{section}.{error}'} ({model})") from None


def _shape(key: str, directory: str, value_head: bool = False, for_vllm: bool = False) -> ModelShape:
    """Return the shape of the model of config.json in the directory that the setting `key` names. Raise NodeError if
    the file is unreadable, UserError if the model is not supported (by vLLM, for_vllm)."""
    path = Path(directory) / "config.json"
    with about(f"{key}:"):
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            raise NodeError(f"{path} cannot be read ({reason_of(error)})") from error
        except (ValueError, RecursionError) as error:
            raise NodeError(f"{path} is not valid JSON ({error})") from error
        if not isinstance(content, dict):
            raise NodeError(f"{path} is not a JSON object")
        try:
            shape = ModelShape.from_hf_config(content, value_head=value_head)
            if for_vllm:
                check_architecture(content, shape.family, FAMILIES[shape.family].architecture)
            return shape
        except UserError as error:
            message = str(error)
            raise UserError(f"{directory}/{message}" if message.startswith("config.json") else message) from None
