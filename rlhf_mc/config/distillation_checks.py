"""Checks of the settings of distillation, in the form of checks.py. Tokenizers, vocabularies and
rows are checked where these are read."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_mc.config.algorithm_schema import SELECTING_LOSSES
from rlhf_mc.config.reward_schema import TEACHERS
from rlhf_mc.config.roles import uses_critic
from rlhf_mc.config.schema import Config
from rlhf_mc.config.yaml_reader import yaml_text


def problems(cfg: Config) -> Iterator[str]:
    """Yield the problems of the settings of distillation."""
    if not cfg.distillation.enabled:
        return
    teachers = cfg.distillation.teacher_models
    if not teachers:
        yield f"distillation.enabled is true and {TEACHERS} is empty; it needs a teacher"
    keys = [teacher.key for teacher in teachers.values()]
    for name, teacher in teachers.items() if len(keys) > 1 else ():
        if teacher.key is None or keys.count(teacher.key) > 1:
            yield (
                f"{TEACHERS}.{name}.key is {yaml_text(teacher.key)}; of {len(keys)} teachers each "
                "needs the data source that it scores, and a data source has one"
            )
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
    if mode in SELECTING_LOSSES and (loss.use_policy_gradient or not loss.use_task_rewards):
        yield (
            f"actor.policy_loss.loss_mode is {mode}, which selects tokens by the rewards' "
            f"advantages, and {section} changes them in the update; set another loss"
        )
    if uses_critic(cfg) and not loss.use_task_rewards:
        yield (
            f"{section}.use_task_rewards is false and algorithm.adv_estimator is "
            f"{cfg.algorithm.adv_estimator}, whose critic no loss of the actor would read; set "
            "another, such as reinforce_plus_plus"
        )
