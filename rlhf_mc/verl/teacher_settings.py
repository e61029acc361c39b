"""Conversions of verl's settings of on-policy distillation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_mc.verl.keys import (
    OFF,
    MappedSetting,
    Settings,
    implied,
    int_or_default,
    not_needed,
    not_supported,
    renamed,
    same,
    verl_default,
)

_LOSS = "distillation.distillation_loss"
_TEACHERS = "distillation.teacher_models."
_BUDGET = "actor.ppo_max_token_len_per_gpu"


def has_no_rewards(verl: Settings) -> bool:
    """Return whether verl's run trains on the distillation loss alone."""
    return bool(
        verl.get("distillation.enabled") and not verl.get(f"{_LOSS}.use_task_rewards", True)
    )


def distillation(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    name = key.rpartition(".")[2]
    if key.startswith(_TEACHERS):
        return _teacher(key, value, verl)
    if name in ("n_gpus_per_node", "nnodes"):
        return not_needed("teachers are on the ranks of the actor")
    if name == "teacher_key":
        ours = verl.get("data.reward_fn_key", "data_source")
        return implied("data.reward_fn_key") if value == ours else not_supported(f"it is {ours}")
    if name in ("use_chunked_topk", "chunked_topk_chunk_size"):
        return not_needed("logits are computed in chunks")
    if name == "policy_loss_mode" or name.startswith("clip_ratio"):
        return _policy_loss(name, value, verl)
    return None


def _policy_loss(name: str, value: Any, verl: Settings) -> MappedSetting:
    if not verl.get(f"{_LOSS}.use_policy_gradient") or name == "clip_ratio":
        return not_needed("the loss is not a policy loss" if name != "clip_ratio" else "not read")
    ours = "actor.policy_loss.loss_mode" if name == "policy_loss_mode" else f"actor.{name}"
    actor = verl.get(ours, "vanilla" if name == "policy_loss_mode" else 0.2)
    return implied(f"by {ours}") if value == actor else not_supported(f"it is {ours}, {actor}")


def _teacher(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    """Return the line of a setting of a teacher."""
    teacher, _, rest = key.removeprefix(_TEACHERS).partition(".")
    if verl.get(f"{_TEACHERS}{teacher}.model_path") in OFF:
        return not_needed("there is no such teacher: its model_path is null")
    if rest == "inference.tensor_model_parallel_size":
        ours = f"{_TEACHERS}{teacher}.megatron.tensor_model_parallel_size"
        return renamed(ours, value, "of the training engine, which scores")
    if rest == "inference.temperature" and value != verl.get("rollout.temperature", 1.0):
        return not_supported("it is rollout.temperature")
    if rest.startswith("inference.") or rest == "num_replicas":
        return not_needed("the training engine scores, on all of its ranks")
    return implied("of all rows") if rest == "key" and value is None else same(key, value)


def teacher_defaults(verl: Settings, settings: Mapping[str, Any]) -> Iterator[MappedSetting]:
    """Yield the token budgets of the teachers' passes, which verl's engine does not have."""
    for key in [key for key in settings if key.startswith(_TEACHERS)]:
        role, _, name = key.rpartition(".")
        if name == "model_path" and int_or_default(settings, _BUDGET):
            ours = f"{role}.log_prob_max_token_len_per_gpu"
            yield verl_default(ours, settings[_BUDGET], f"as {_BUDGET}")
