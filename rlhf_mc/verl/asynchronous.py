"""Conversions of verl's asynchronous runs: the programs one_step_off_policy and fully_async_policy,
and the modes of trainer.v1.

The nearest here: ranks of their own (resource_pools) with rollout.one_step_off. Without such ranks,
and with filter_groups, it is rollout.partial_rollout on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rlhf_mc.verl.keys import (
    OFF,
    MappedSetting,
    Settings,
    implied,
    int_or_default,
    not_needed,
    renamed,
    same,
    verl_default,
)

MODE = "trainer.v1.trainer_mode"
PROGRAMS = {"one_step_off_policy": "one_step_off", "fully_async": "fully_async"}
"""Mode of a run by a part of its program's name."""
_CORRECTION = "algorithm.rollout_correction."
_NEAREST = {
    "colocate_async": "verl's colocate_async; it needs algorithm.rollout_correction",
    "one_step_off": "both pools work at the same time, as in verl",
    "fully_async": "verl trains on groups as they end, of several versions; here on a whole batch "
    "that the step before has sampled",
    "separate_async": "verl trains on groups as they end, of several versions; here on a whole "
    "batch that the step before has sampled",
}
_ON_ALL_RANKS = (
    "with filter_groups, or without rollout ranks, all ranks train and generate, in turn: responses"
    " go on with new weights"
)


def async_mode(verl: Settings) -> str:
    """Return one_step_off, fully_async, verl's trainer.v1.trainer_mode, or sync."""
    mode = str(verl.get(MODE) or "sync")
    is_fully = mode == "sync" and any(key.startswith("async_training.") for key in verl)
    return "fully_async" if is_fully else mode


def _num_ranks(verl: Settings) -> tuple[int, int]:
    """Return verl's GPUs that train, and those that generate alone."""
    gpus = int_or_default(verl, "trainer.n_gpus_per_node", 8)
    train = int_or_default(verl, "trainer.nnodes", 1) * gpus
    if async_mode(verl) not in ("one_step_off", "fully_async", "separate_async"):
        return train, 0
    is_separate = async_mode(verl) == "separate_async"
    nodes = int_or_default(verl, "rollout.nnodes", 0 if is_separate else 1)
    return train, nodes * int_or_default(
        verl, "rollout.n_gpus_per_node", gpus if is_separate else 8
    )


def nodes_and_processes(verl: Settings) -> tuple[int, int]:
    """Return nodes and processes per node of a run of ours with as many GPUs."""
    train, rollout = _num_ranks(verl)
    if not rollout:
        gpus = int_or_default(verl, "trainer.n_gpus_per_node", 8)
        return int_or_default(verl, "trainer.nnodes", 1), gpus
    total = train + rollout
    processes = total if total <= 8 else math.gcd(total, 8)
    return total // processes, processes


def has_pools(verl: Settings) -> bool:
    """Return whether the run becomes one with resource_pools."""
    return _num_ranks(verl)[1] > 0 and not verl.get("algorithm.filter_groups.enable")


def _strategy(verl: Settings) -> str | None:
    """Return our setting for training on older weights; None: the run trains on the newest."""
    mode = async_mode(verl)
    ahead = {
        "sync": 0,
        "fully_async": verl.get("async_training.staleness_threshold", 0.1),
        "separate_async": verl.get("trainer.v1.separate_async.num_warmup_batches", 1),
    }
    if ahead.get(mode, 1) in OFF:
        return None
    return "rollout.one_step_off" if has_pools(verl) else "rollout.partial_rollout"


def updates_of_step(verl: Settings) -> int:
    """Return the updates of verl, each of which is a step of its learning rates, in one step
    here: from one weight update of the engines to the next."""
    mode = async_mode(verl)
    if mode == "fully_async":
        return int_or_default(verl, "async_training.trigger_parameter_sync_step", 4)
    key = "trainer.v1.separate_async.parameter_sync_step"
    return int_or_default(verl, key, 4) if mode == "separate_async" else 1


def _prompts_of_step(verl: Settings) -> int:
    """Return the prompts of a fully asynchronous run between two weight updates."""
    batches = int_or_default(verl, "async_training.require_batches", 1)
    size = int_or_default(verl, "actor.ppo_mini_batch_size", 256)
    return updates_of_step(verl) * batches * size


# ---------------------------------------------------------------- converters


def trainer_mode(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    """Convert verl's mode, or program."""
    mode = async_mode(verl)
    if mode not in _NEAREST:
        return None  # as the table has it
    ours = _strategy(verl)
    if ours is None:
        return implied("a step trains on what its own weights generated")
    is_turned = mode != "colocate_async" and not has_pools(verl)
    return renamed(ours, True, _ON_ALL_RANKS if is_turned else _NEAREST[mode])


def ranks(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    """Convert nodes and GPUs per node to the ranks of a pool."""
    is_training = key.startswith("trainer.")
    train, rollout = _num_ranks(verl)
    if has_pools(verl):
        pool, size = ("train", train) if is_training else ("rollout", rollout)
        return renamed(f"resource_pools.{pool}", size, "ranks: nodes x GPUs per node")
    if is_training or not rollout:
        return None  # as the table has it
    return not_needed(_ON_ALL_RANKS)


def async_training(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    """Convert the section of fully asynchronous runs; None: it changes speed alone."""
    name = key.partition(".")[2]
    ours = _strategy(verl)
    if name in ("trigger_parameter_sync_step", "require_batches"):
        return implied("by data.train_batch_size")
    if name == "compute_prox_log_prob":
        return renamed(f"{_CORRECTION}bypass_mode", not value)
    if name == "use_rollout_log_probs":
        return implied("by algorithm.rollout_correction.bypass_mode")
    if ours is None or name not in ("staleness_threshold", "partial_rollout"):
        return None
    if name == "staleness_threshold":
        return renamed(ours, True, f"verl is at most {value} of a step ahead, here one step")
    if bool(value) == (ours == "rollout.partial_rollout"):
        return implied(f"by {ours}")
    if value:
        text = "verl continues responses with new weights; here a response is of one version"
    else:
        text = "verl waits for responses at an update; here they go on with new weights"
    return renamed(ours, True, text)


def train_batch(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    """Convert the batch of a fully asynchronous run, which verl has as 0."""
    if async_mode(verl) != "fully_async":
        return None
    return same(
        key,
        _prompts_of_step(verl),
        "ppo_mini_batch_size x require_batches x trigger_parameter_sync_step: the prompts of a "
        "weight update. verl trains on the first of them while others are generated",
    )


def total_prompts(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Convert rollout.total_rollout_steps, a number of prompts."""
    if type(value) is not int:
        return implied("by total_epochs")
    steps = max(1, value // _prompts_of_step(verl))
    text = f"{value} prompts, {_prompts_of_step(verl)} a step, whatever total_epochs"
    return renamed("trainer.total_training_steps", steps, text)


def total_steps(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    if "rollout.total_rollout_steps" in verl and async_mode(verl) == "fully_async":
        return not_needed("rollout.total_rollout_steps decides")
    return None


def separate_async(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    """Convert parameter_sync_step and num_warmup_batches."""
    if async_mode(verl) != "separate_async":
        return None
    if key.endswith("parameter_sync_step"):
        return implied("weights are updated after data.train_batch_size prompts")
    ours = _strategy(verl)
    if ours is None:
        return implied("0")
    return renamed(ours, True, f"verl is {value} batches ahead, here one")


def off_policy_bound(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Convert the bound of the weight versions of a response, and what follows from it."""
    ours = _strategy(verl)
    if ours == "rollout.partial_rollout":
        return renamed(f"rollout.{key.rpartition('.')[2]}", value)
    return not_needed("responses are one version old" if ours else f"{MODE} is sync")


def bypass_mode(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    """Convert bypass_mode of an asynchronous run, together with weights or rejection."""
    if not value or async_mode(verl) == "sync" or not _has_statistics(verl):
        return None
    return same(key, False, _DECOUPLED)


_DECOUPLED = (
    "verl's true: rollout_is and rollout_rs are of the trained weights against vLLM's; here of the "
    "trainer's log-probs before the update"
)


def _has_statistics(verl: Settings) -> bool:
    names = ("rollout_is", "rollout_rs", "rollout_token_veto_threshold")
    return any(verl.get(_CORRECTION + name) not in OFF for name in names)


def async_defaults(verl: Settings, settings: Settings) -> Iterator[MappedSetting]:
    """Yield what an asynchronous run needs and was not given. settings: ours, which the caller
    updates by each line."""
    mode, ours = async_mode(verl), _strategy(verl)
    if mode not in _NEAREST:
        return
    if has_pools(verl):
        for pool, size in zip(("train", "rollout"), _num_ranks(verl), strict=True):
            if f"resource_pools.{pool}" not in settings:
                yield verl_default(f"resource_pools.{pool}", size, "ranks: nodes x GPUs per node")
        yield verl_default("rollout.free_cache_engine", False, "an engine has its ranks alone")
        if "algorithm.router_replay" not in settings:
            yield verl_default("algorithm.router_replay", "off", "ours with experts: rollout")
    if ours is not None and ours not in settings:
        yield verl_default(ours, True, _NEAREST[mode])
    if mode == "fully_async" and "data.train_batch_size" not in settings:
        text = "ppo_mini_batch_size x require_batches x trigger_parameter_sync_step"
        yield verl_default("data.train_batch_size", _prompts_of_step(verl), text)
    bypass = f"{_CORRECTION}bypass_mode"
    if bypass not in settings and mode in PROGRAMS.values():
        has_statistics = _has_statistics(verl)
        text = _DECOUPLED if has_statistics else "of this program"
        yield verl_default(bypass, not has_statistics, text)
    weights = f"{_CORRECTION}rollout_is"
    if ours is not None and not settings.get(bypass) and settings.get(weights) in OFF:
        text = "verl has none; ours: tokens of older weights are weighted"
        yield verl_default(weights, "token", text)
