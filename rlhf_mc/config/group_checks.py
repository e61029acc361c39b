"""Checks of algorithm.filter_groups and the settings that it depends on."""

from __future__ import annotations

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.roles import uses_critic
from rlhf_mc.config.schema import Config

_ON = "algorithm.filter_groups.enable is true"


def check_filter_groups(cfg: Config) -> None:
    """Raise UserError if the settings of algorithm.filter_groups contradict others."""
    if not cfg.algorithm.filter_groups.enable:
        if cfg.data.gen_batch_size is not None:
            raise UserError(
                f"data.gen_batch_size is {cfg.data.gen_batch_size}; that needs algorithm.filter_groups.enable: true"
            )
        return
    for problem in (_group_size(cfg), _too_few_prompts(cfg), _metric(cfg), _schedule(cfg)):
        if problem is not None:
            raise UserError(problem)


def _group_size(cfg: Config) -> str | None:
    if cfg.rollout.n >= 2:
        return None
    return f"{_ON}, which compares the responses of a prompt; rollout.n is {cfg.rollout.n}; it must be at least 2"


def _too_few_prompts(cfg: Config) -> str | None:
    most = cfg.algorithm.filter_groups.max_num_gen_batches
    data = cfg.data
    size = data.train_batch_size if data.gen_batch_size is None else data.gen_batch_size
    if most == 0 or most * size >= data.train_batch_size:
        return None
    return (
        f"algorithm.filter_groups.max_num_gen_batches {most} x data.gen_batch_size {size} = {most * size} is fewer"
        f" prompts than data.train_batch_size, {data.train_batch_size}, which each step keeps"
    )


def _metric(cfg: Config) -> str | None:
    """Return the problem of a metric that the reward functions give, where no function scores a response."""
    metric = cfg.algorithm.filter_groups.metric
    if metric == "seq_reward" or cfg.reward_model.model_path is None:
        return None
    mixture = cfg.reward.mixture
    alone = [source for source, parts in mixture.items() if isinstance(parts, dict) and set(parts) == {"reward_model"}]
    if mixture and not alone:
        return None
    where = f" of the data source {alone[0]!r}" if alone else ""
    return (
        f"algorithm.filter_groups.metric is {metric}, which reward functions give, and the reward model alone scores"
        f" the responses{where}; it must be seq_reward"
    )


def _schedule(cfg: Config) -> str | None:
    """Return the problem of a schedule over the steps of the run, where their number depends on the groups."""
    if cfg.trainer.total_training_steps is not None:
        return None
    given = [
        f"{role}.optim.lr_decay_style is {optim.lr_decay_style}"
        for role, optim in (("actor", cfg.actor.optim), ("critic", cfg.critic.optim))
        if optim.lr_decay_style != "constant" and (role == "actor" or uses_critic(cfg))
    ]
    if cfg.actor.entropy_coeff_end is not None:
        given.append(f"actor.entropy_coeff_end is {cfg.actor.entropy_coeff_end}")
    if not given:
        return None
    return (
        f"{given[0]} and {_ON}: how many steps trainer.total_epochs has then depends on the dropped groups; set"
        " trainer.total_training_steps"
    )
