"""The shapes of a run's models, from their config.json, and what follows from the actor's. No torch
here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_mc import json_files
from rlhf_mc.architectures.families import FAMILIES
from rlhf_mc.architectures.hf_config import check_architecture
from rlhf_mc.architectures.parameters import model_params, with_adapters
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.algorithm_schema import RouterReplayMode
from rlhf_mc.config.errors import NodeError, UserError, error_prefix, error_reason
from rlhf_mc.config.roles import has_reference_model, uses_critic
from rlhf_mc.config.schema import Config, reward_models, teacher_paths


def model_shapes(cfg: Config) -> dict[str, tuple[str, ModelShape]]:
    """Return by role (the setting that names the model's directory, its shape), the actor's first.
    Raise UserError if a config.json cannot be read or is of an unsupported model."""
    base = _shape("model.path", cfg.model.path, for_rollout=True)
    actor = with_adapters(base, "actor.lora", cfg.actor.lora)
    roles = {"actor": ("model.path", actor)}
    if uses_critic(cfg):
        key = "model.path" if cfg.critic.model_path is None else "critic.model_path"
        shape = _shape(key, cfg.critic.model_path or cfg.model.path, value_head=True)
        roles["critic"] = (key, with_adapters(shape, "critic.lora", cfg.critic.lora))
    if has_reference_model(cfg):
        roles["ref"] = ("model.path", actor)
    for role, scorer in reward_models(cfg).items():
        key = f"{role}.model_path"
        roles[role] = (key, _shape(key, str(scorer.model_path), value_head=True))
    for role, path in teacher_paths(cfg).items():
        key = f"{role}.model_path"
        roles[role] = (key, _shape(key, path))
    return roles


def _shape(
    key: str, directory: str, value_head: bool = False, for_rollout: bool = False
) -> ModelShape:
    """Return the shape of the model of config.json in the directory that the setting `key` names.
    Raise NodeError if the file is unreadable, UserError if the model is not supported (by the
    rollout engine, for_rollout)."""
    with error_prefix(f"{key}:"):
        config = read_json_object(Path(directory) / "config.json")
        return described_shape(directory, config, value_head, for_rollout)


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raise NodeError if there is none."""
    try:
        content = json_files.read(path)
    except OSError as error:
        raise NodeError(f"{path} cannot be read ({error_reason(error)})") from error
    except ValueError as error:
        raise NodeError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise NodeError(f"{path} is not a JSON object")
    return content


def described_shape(
    directory: str, config: Mapping[str, Any], value_head: bool, for_rollout: bool = False
) -> ModelShape:
    """Return the shape of the model of a config.json. Raise UserError if it is not supported, by
    the rollout engine too with for_rollout. directory: of the file, for messages."""
    try:
        shape = ModelShape.from_hf_config(config, value_head=value_head)
        if for_rollout:
            check_architecture(config, shape.family, FAMILIES[shape.family].architecture)
        return shape
    except UserError as error:
        message = str(error)
        raise UserError(
            f"{directory}/{message}" if message.startswith("config.json") else message
        ) from None


def router_replay(cfg: Config, actor: ModelShape) -> RouterReplayMode:
    """Return the run's router replay. vLLM returns experts only with prefix caching, which linear
    attention excludes, and those of an agent's last context. Raise UserError if the run cannot have
    the replay that is set."""
    mode = cfg.algorithm.router_replay
    has_experts = actor.num_experts > 0
    has_linear_attention = not all(mixer.returns_experts for mixer in actor.mixers)
    has_contexts = cfg.rollout.environment.has_contexts
    if mode is None and has_experts and (has_linear_attention or has_contexts):
        return "off" if cfg.algorithm.rollout_correction.bypass_mode else "recompute"
    if mode is None:
        return "rollout" if has_experts else "off"
    if mode != "off" and not has_experts:
        raise UserError(
            f"algorithm.router_replay is {mode}; the model of model.path has no experts: set it to "
            "off or null"
        )
    if mode == "rollout" and has_linear_attention:
        raise UserError(
            "algorithm.router_replay is rollout; vLLM returns no experts of a model with linear "
            "attention: set it to recompute, off or null"
        )
    if mode == "rollout" and has_contexts:
        raise UserError(
            "algorithm.router_replay is rollout; the engine's experts are those of an agent's last "
            "context: set it to recompute, off or null, or rollout.environment.rewritten_history "
            "to refuse"
        )
    return mode


def balances_experts(cfg: Config, actor: ModelShape) -> bool:
    """Return whether the actor's updates balance its experts. Raise UserError if they cannot."""
    has_experts = actor.num_experts > 0
    has_bias = any(param.is_correction_bias for param in model_params(actor))
    can = {
        "aux_loss_coeff": has_experts,
        "z_loss_coeff": has_experts,
        "router_bias_update_rate": has_bias,
    }
    values = {name: value for name in can if (value := getattr(cfg.actor, f"moe_{name}"))}
    for name, value in values.items():
        if not can[name]:
            lacks = "routers without a correction bias" if has_experts else "no experts"
            raise UserError(
                f"actor.moe_{name} is {value}; the model of model.path has {lacks}: set it to 0"
            )
    return bool(values)
