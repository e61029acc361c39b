"""The learning-rate schedule of an optimizer, in Megatron-Core's scheduler. It counts PPO steps."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from rlhf_mc.config.schema import OptimConfig


def learning_rate_schedule(optimizer: Any, optim: OptimConfig, total_steps: int) -> OptimizerParamScheduler:
    """Return the schedule of `optim` for total_steps PPO steps, at the first step.

    Without a warm-up the first step has learning rate lr. With one of W steps, step s of the first W has lr * s / W.
    The decay goes from there to min_lr, which it reaches after the last step, as in Megatron-LM and transformers: with
    min_lr 0 every step still moves the weights.
    """
    # Megatron-Core's position 0 is learning rate 0 under a warm-up: a first PPO step that changes nothing.
    warmup = optim.lr_warmup_steps or int(optim.lr_warmup_steps_ratio * total_steps)
    first = 1 if warmup > 0 else 0
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=first + max(total_steps, warmup, 1),
        lr_decay_style=optim.lr_decay_style,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    schedule.step(increment=first)
    return schedule


def set_learning_rates(schedule: OptimizerParamScheduler, optim: OptimConfig, factor: float) -> None:
    """Set the highest and lowest learning rates to those of `optim` times `factor`, at this position and later ones."""
    schedule.max_lr = optim.lr * factor
    schedule.min_lr = optim.min_lr * factor
    for group in schedule.optimizer.param_groups:
        group.update(max_lr=schedule.max_lr, min_lr=schedule.min_lr)
    schedule.step(increment=0)
