"""The optimizer's learning-rate schedule, which counts PPO steps, and this rank's part of its
state: for each parameter its elements and the tensors of Adam's state, which the checkpoint writes
and reads. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from rlhf_mc.config.schema import OptimConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OptimizerPart:
    """The elements of one parameter that this rank updates, with their state."""

    local: str
    """Name of the parameter on this rank."""
    start: int
    """First of the elements, in the flattened local parameter."""
    end: int
    """One past the last of the elements."""
    ranks: tuple[int, ...]
    """The ranks over which the local parameter's elements are sharded; without the distributed
    optimizer, this one."""
    state: dict[str, torch.Tensor]
    """By name: flat tensors of end - start elements. "main" is the float32 copy of a parameter of
    another type."""


def optimizer_parts(
    optimizer: Any, params: Mapping[str, torch.nn.Parameter]
) -> list[OptimizerPart]:
    """Return this rank's parts. `params`: by their names on this rank. Before the first step there
    are no moments."""
    names = {id(param): name for name, param in params.items()}
    parts = []
    for part in _in_use(optimizer):
        for param, main, start, end in _main_params(part):
            if start == end:
                continue
            state = {
                key: part.optimizer.state[main][key].view(-1)
                for key in MOMENTS
                if main in part.optimizer.state
            }
            if main.dtype != param.dtype:
                state["main"] = main.detach().view(-1)
            parts.append(OptimizerPart(names[id(param)], start, end, _ranks(part), state))
    return parts


def state_bytes(optimizer: Any) -> int:
    """Return the bytes of this rank's state from the first step on: Adam's moments in float32, and
    the float32 copies of parameters of another type. It may be offloaded."""
    num_bytes = 0
    for part in _in_use(optimizer):
        for param, main, start, end in _main_params(part):
            copy = main.element_size() if main.dtype != param.dtype else 0
            num_bytes += (end - start) * (len(MOMENTS) * torch.float32.itemsize + copy)
    return num_bytes


def adam_steps(optimizer: Any) -> int:
    """Return the number of steps taken, which Adam's bias correction depends on; 0 on a rank that
    updates nothing."""
    for part in _in_use(optimizer):
        for group in part.optimizer.param_groups:
            if "step" in group:  # Apex and Transformer Engine count by group, torch by parameter
                return int(group["step"])
        for state in part.optimizer.state.values():
            return int(state["step"])
    return 0


def set_adam_steps(optimizer: Any, count: int) -> None:
    """Set the number of steps and allocate the moments; new ones are zero. With 0 steps the state
    is cleared."""
    for part in _in_use(optimizer):
        if count == 0:
            part.optimizer.state.clear()
            for group in part.optimizer.param_groups:
                group.pop("step", None)
            continue
        for group in part.optimizer.param_groups:
            counts_by_group = type(part.optimizer).__module__.partition(".")[0] != "torch"
            if counts_by_group:
                group["step"] = count
            for main in group["params"]:
                state = part.optimizer.state[main]
                for key in MOMENTS:
                    state.setdefault(key, torch.zeros_like(main, dtype=torch.float32))
                if not counts_by_group:
                    device = main.device if group.get("fused") else None
                    state["step"] = torch.full((), float(count), device=device)


def _in_use(optimizer: Any) -> list[Any]:
    """Return the optimizers that have a parameter to update on this rank."""
    return [
        part
        for part in optimizer.chained_optimizers
        if not getattr(part, "is_stub_optimizer", False)
    ]


def _main_params(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
    """Yield (model's parameter, tensor that the optimizer updates in its place, first element, one
    past the last)."""
    if isinstance(part, DistributedOptimizer):
        for param, (group, order) in part.model_param_group_index_map.items():
            elements = part._get_model_param_range_map(param)["param"]
            yield (
                param,
                part.optimizer.param_groups[group]["params"][order],
                elements.start,
                elements.end,
            )
        return
    # all in float32: the optimizer updates the model's own parameters
    if not hasattr(part, "float16_groups"):
        pairs = (
            (param, param) for group in part.optimizer.param_groups for param in group["params"]
        )
    else:
        model = [*part.float16_groups, *part.fp32_from_fp32_groups]
        main = [*part.fp32_from_float16_groups, *part.fp32_from_fp32_groups]
        pairs = (
            (p, m) for ps, ms in zip(model, main, strict=True) for p, m in zip(ps, ms, strict=True)
        )
    for param, updated in pairs:
        yield param, updated, 0, param.numel()


def _ranks(part: Any) -> tuple[int, ...]:
    if isinstance(part, DistributedOptimizer):
        return tuple(dist.get_process_group_ranks(part.data_parallel_group))
    return (dist.get_rank(),)


def learning_rate_schedule(
    optimizer: Any, optim: OptimConfig, total_steps: int
) -> OptimizerParamScheduler:
    """Return the schedule of `optim` for total_steps PPO steps, at the first step.

    Without a warm-up the first step has learning rate lr. With one of W steps, step s of the first
    W has lr * s / W. The decay goes from there to min_lr, which it reaches after the last step, as
    in Megatron-LM and transformers: with min_lr 0 every step still moves the weights.
    """
    # Megatron-Core's position 0 is learning rate 0 under a warm-up: a first PPO step that changes
    # nothing.
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


def set_learning_rates(
    schedule: OptimizerParamScheduler, optim: OptimConfig, factor: float
) -> None:
    """Set the highest and lowest learning rates to `optim`'s times `factor`, at this position and
    later ones."""
    schedule.max_lr = optim.lr * factor
    schedule.min_lr = optim.min_lr * factor
    for group in schedule.optimizer.param_groups:
        group.update(max_lr=schedule.max_lr, min_lr=schedule.min_lr)
    schedule.step(increment=0)
