"""Conversions of verl's asynchronous runs: the programs one_step_off_policy and fully_async_policy,
and the modes of trainer.v1.

The nearest here: ranks of their own (resource_pools) with rollout.one_step_off, and with
rollout.partial_rollout where new weights continue responses. Without such ranks it is
rollout.partial_rollout on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rlhf_mc.verl import keys
from rlhf_mc.verl.keys import OFF, MappedSetting, Settings, int_or_default, renamed, verl_default

MODE = "trainer.v1.trainer_mode"
PROGRAMS = {"one_step_off_policy": "one_step_off", "fully_async": "fully_async"}
"""Mode of a run by a part of its program's name."""
_WITH_POOLS = (*PROGRAMS.values(), "separate_async")
_CORRECTION = "algorithm.rollout_correction."
_STATISTICS = ("rollout_is", "rollout_rs", "rollout_token_veto_threshold")
_PARTIAL = "rollout.partial_rollout"
_BY_GROUPS = "verl trains on groups as they end; here on those that the step before has ended"
_CONTINUES = "new weights continue responses"
_ON_ALL_RANKS = "all ranks train and generate in turn; new weights continue responses"
_DECOUPLED = "rollout_is, rollout_rs and compute_prox_log_prob need log-probs of the trainer here"
_BATCH = "ppo_mini_batch_size x require_batches x trigger_parameter_sync_step"


def async_mode(verl: Settings) -> str:
    """Return one_step_off, fully_async, verl's trainer.v1.trainer_mode, or sync."""
    mode = str(verl.get(MODE) or "sync")
    is_fully = mode == "sync" and any(key.startswith("async_training.") for key in verl)
    return "fully_async" if is_fully else mode


def _num_ranks(verl: Settings) -> tuple[int, int]:
    """Return verl's GPUs that train, and those that generate alone."""
    mode = async_mode(verl)
    gpus = int_or_default(verl, "trainer.n_gpus_per_node", 8)
    nodes, each = (1, 8) if mode in PROGRAMS.values() else (0, gpus)
    nodes = int_or_default(verl, "rollout.nnodes", nodes)
    rollout = nodes * int_or_default(verl, "rollout.n_gpus_per_node", each)
    return int_or_default(verl, "trainer.nnodes", 1) * gpus, rollout if mode in _WITH_POOLS else 0


def nodes_and_processes(verl: Settings) -> tuple[int, int]:
    """Return nodes and processes per node of a run of ours with as many GPUs."""
    train, rollout = _num_ranks(verl)
    total = train + rollout
    gpus = int_or_default(verl, "trainer.n_gpus_per_node", 8)
    processes = gpus if not rollout else total if total < 8 else math.gcd(total, 8)
    return total // max(1, processes), processes


def has_pools(verl: Settings) -> bool:
    """Return whether the run becomes one with resource_pools."""
    return _num_ranks(verl)[1] > 0


def _strategy(verl: Settings) -> str | None:
    """Return our setting for training on older weights; None: the run trains on the newest."""
    ahead = {
        "one_step_off": 1,
        "colocate_async": 1,
        "fully_async": verl.get("async_training.staleness_threshold", 0.1),
        "separate_async": verl.get("trainer.v1.separate_async.num_warmup_batches", 1),
    }
    if ahead.get(async_mode(verl)) in OFF:
        return None
    return "rollout.one_step_off" if has_pools(verl) else _PARTIAL


def _continues(verl: Settings) -> bool:
    """Return whether new weights continue the responses of older ones."""
    if not has_pools(verl):
        return True
    partial = bool(verl.get("async_training.partial_rollout", True))
    return {"fully_async": partial, "separate_async": True}.get(async_mode(verl), False)


def updates_of_step(verl: Settings) -> int:
    """Return the updates of verl from one weight update of the engines to the next, a step here.
    verl's learning rates count them."""
    mode = async_mode(verl)
    start = "async_training.trigger_" if mode == "fully_async" else f"trainer.v1.{mode}."
    default = 4 if mode in ("fully_async", "separate_async") else 1
    return int_or_default(verl, f"{start}parameter_sync_step", default)


def _prompts_of_step(verl: Settings) -> int:
    """Return the prompts of a fully asynchronous run between two weight updates."""
    batches = int_or_default(verl, "async_training.require_batches", 1)
    return updates_of_step(verl) * batches * int_or_default(verl, "actor.ppo_mini_batch_size", 256)


# ---------------------------------------------------------------- converters


def trainer_mode(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    """Convert verl's mode, or program."""
    if (ours := _strategy(verl)) is not None:
        text = "" if async_mode(verl) == "one_step_off" else _BY_GROUPS
        return renamed(ours, True, _ON_ALL_RANKS if ours == _PARTIAL else text)
    return keys.implied("no staleness") if async_mode(verl) in _WITH_POOLS else None


def ranks(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    """Convert nodes and GPUs per node to the ranks of a pool."""
    train, rollout = _num_ranks(verl)
    if has_pools(verl):
        pool, size = ("train", train) if key.startswith("trainer.") else ("rollout", rollout)
        return renamed(f"resource_pools.{pool}", size, "nodes x GPUs")
    return keys.not_needed(_ON_ALL_RANKS) if rollout else None


def ahead(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    """Convert how far the rollout ranks are ahead, and what an update does to their responses."""
    ours = _strategy(verl)
    if ours is None or async_mode(verl) not in _WITH_POOLS:
        return None
    if key.endswith("partial_rollout"):
        if _continues(verl):
            return renamed(_PARTIAL, True, "" if value else _ON_ALL_RANKS)
        return keys.implied(f"by {ours}")
    if not (_continues(verl) and isinstance(value, int | float)):
        return renamed(ours, True, f"verl samples at most {value} batches ahead, here one")
    is_fully = async_mode(verl) == "fully_async"
    size = int_or_default(verl, "data.train_batch_size", 1024)
    most = math.ceil((1 + value) * (_prompts_of_step(verl) if is_fully else size))
    return renamed("rollout.prompts_in_flight", most, f"1 + {value} batches")


def train_batch(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    """Convert the batch of a fully asynchronous run, which verl has as 0."""
    is_fully = async_mode(verl) == "fully_async"
    return keys.same(key, _prompts_of_step(verl), _BATCH) if is_fully else None


def total_prompts(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Convert rollout.total_rollout_steps, a number of prompts."""
    if type(value) is not int:
        return keys.implied("by total_epochs")
    size = _prompts_of_step(verl)
    text = f"{value} prompts, {size} a step; verl ends after total_epochs if these are fewer"
    return renamed("trainer.total_training_steps", max(1, value // size), text)


def off_policy_bound(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Convert the bound of the weight versions of a response, and what follows from it."""
    ours = _strategy(verl)
    if ours is not None and _continues(verl):
        return renamed(f"rollout.{key.rpartition('.')[2]}", value)
    return keys.not_needed("responses are one version old" if ours else f"{MODE} is sync")


def bypass_mode(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    """Convert bypass_mode of an asynchronous run with weights or rejection."""
    is_both = value and async_mode(verl) in _WITH_POOLS and _has_statistics(verl)
    return keys.same(key, False, _DECOUPLED) if is_both else None


def _has_statistics(verl: Settings) -> bool:
    return any(verl.get(_CORRECTION + name) not in OFF for name in _STATISTICS)


def async_defaults(verl: Settings, settings: Settings) -> Iterator[MappedSetting]:
    """Yield what an asynchronous run needs and was not given. settings: ours, which the caller
    updates by each line."""
    mode = async_mode(verl)
    ours = _strategy(verl)
    train, rollout = _num_ranks(verl)
    pools = has_pools(verl)
    program = mode in PROGRAMS.values()
    decouples = _has_statistics(verl) or bool(verl.get("async_training.compute_prox_log_prob"))
    bypass = f"{_CORRECTION}bypass_mode"
    is_unweighted = ours is not None and not settings.get(bypass, program and not decouples)
    lines = (
        (pools, "resource_pools.train", train, "nodes x GPUs"),
        (pools, "resource_pools.rollout", rollout, "nodes x GPUs"),
        (pools, "rollout.free_cache_engine", False, "an engine has ranks of its own"),
        (ours is not None, str(ours), True, _BY_GROUPS if pools else _ON_ALL_RANKS),
        (ours is not None and pools and _continues(verl), _PARTIAL, True, _CONTINUES),
        (mode == "fully_async", "data.train_batch_size", _prompts_of_step(verl), _BATCH),
        (program, bypass, not decouples, _DECOUPLED if decouples else "of this program"),
        (is_unweighted, f"{_CORRECTION}rollout_is", "token", "older weights' tokens; verl: none"),
    )
    for is_needed, key, value, text in lines:
        if is_needed and settings.get(key) is None:
            yield verl_default(key, value, text)
