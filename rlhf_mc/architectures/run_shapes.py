"""The shapes of a run's models, from their config.json. No torch here."""

from __future__ import annotations

from pathlib import Path

from rlhf_mc import json_files
from rlhf_mc.architectures.families import FAMILIES
from rlhf_mc.architectures.hf_config import check_architecture
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.errors import NodeError, UserError, error_prefix, error_reason
from rlhf_mc.config.roles import uses_critic, uses_reference
from rlhf_mc.config.schema import Config, reward_models


def model_shapes(cfg: Config) -> dict[str, tuple[str, ModelShape]]:
    """Return by role (the setting that names the model's directory, its shape), the actor's first.
    Raise UserError if a config.json cannot be read or is of an unsupported model."""
    actor = _shape("model.path", cfg.model.path, for_rollout=True)
    roles = {"actor": ("model.path", actor)}
    if uses_critic(cfg):
        key = "model.path" if cfg.critic.model_path is None else "critic.model_path"
        roles["critic"] = (
            key,
            _shape(key, cfg.critic.model_path or cfg.model.path, value_head=True),
        )
    if uses_reference(cfg):
        roles["ref"] = ("model.path", actor)
    for role, scorer in reward_models(cfg).items():
        key = f"{role}.model_path"
        roles[role] = (key, _shape(key, str(scorer.model_path), value_head=True))
    return roles


def _shape(
    key: str, directory: str, value_head: bool = False, for_rollout: bool = False
) -> ModelShape:
    """Return the shape of the model of config.json in the directory that the setting `key` names.
    Raise NodeError if the file is unreadable, UserError if the model is not supported (by the
    rollout engine, for_rollout)."""
    path = Path(directory) / "config.json"
    with error_prefix(f"{key}:"):
        try:
            content = json_files.read(path)
        except OSError as error:
            raise NodeError(f"{path} cannot be read ({error_reason(error)})") from error
        except ValueError as error:
            raise NodeError(f"{path} is not valid JSON ({error})") from error
        if not isinstance(content, dict):
            raise NodeError(f"{path} is not a JSON object")
        try:
            shape = ModelShape.from_hf_config(content, value_head=value_head)
            if for_rollout:
                check_architecture(content, shape.family, FAMILIES[shape.family].architecture)
            return shape
        except UserError as error:
            message = str(error)
            raise UserError(
                f"{directory}/{message}" if message.startswith("config.json") else message
            ) from None
