"""Checks of the settings of distillation, in the form of checks.py. Tokenizers, vocabularies and
rows are checked where these are read."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_mc.config.algorithm_schema import SELECTING_LOSSES
from rlhf_mc.config.reward_schema import TEACHERS
from rlhf_mc.config.schema import Config
from rlhf_mc.config.yaml_reader import yaml_text


def problems(cfg: Config) -> Iterator[str]:
    """Yield the problems of the settings of distillation."""
    if not cfg.distillation.enabled:
        return
    teachers = cfg.distillation.teacher_models
    if not teachers:
        yield f"distillation.enabled is true and {TEACHERS} is empty; it needs a teacher"
    keys: dict[str, str] = {}
    for name, teacher in teachers.items():
        if teacher.key is None and len(teachers) > 1:
            yield (
                f"{TEACHERS}.{name}.key is null; with {len(teachers)} teachers each needs the data "
                "source that it scores"
            )
        elif teacher.key in keys:
            yield (
                f"{TEACHERS}.{name}.key is {teacher.key!r}, as {TEACHERS}.{keys[teacher.key]}.key; "
                "a data source has one teacher"
            )
        keys[str(teacher.key)] = name
    loss = cfg.distillation.distillation_loss
    section = "distillation.distillation_loss"
    if loss.loss_mode in ("k1", "kl") and not loss.use_policy_gradient:
        yield (
            f"{section}.loss_mode is {loss.loss_mode}, whose gradient does not depend on the "
            f"teacher, and {section}.use_policy_gradient is false; set it to true, or another mode"
        )
    if loss.log_prob_min_clamp is not None and loss.log_prob_min_clamp >= 0:
        yield f"{section}.log_prob_min_clamp is {loss.log_prob_min_clamp}; it must be below 0"
    mode = cfg.actor.policy_loss.loss_mode
    changes = loss.use_policy_gradient or not loss.use_task_rewards
    if mode in SELECTING_LOSSES and changes:
        yield (
            f"actor.policy_loss.loss_mode is {mode}, which selects tokens by their advantages "
            f"before the update, and {section}.use_policy_gradient is "
            f"{yaml_text(loss.use_policy_gradient)} and use_task_rewards "
            f"{yaml_text(loss.use_task_rewards)}; set another loss"
        )
