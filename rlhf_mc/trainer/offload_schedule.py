"""Who is on the device in which phase. TABLE says it; the rest of this file moves what changes when a phase begins. How
tensors are moved is in models/offload.py, how vLLM's memory is given back in rollout/vllm_engine.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rlhf_mc import platform
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.rollout.vllm_engine import KV_CACHE, WEIGHTS, RolloutEngine

UNCHANGED = None
"""A phase that uses nothing on the device: nothing moves."""
ROLES = ("actor", "critic", "ref", "vllm", "reward_model")

# fmt: off
TABLE: dict[str, tuple[str, str, str, str, str] | None] = {
    #                   actor                     critic                    reference  vLLM                reward model
    "update_weights":  ("params",                 "",                       "",        "weights",            ""),
    "gen":             ("",                       "",                       "",        "weights kv_cache",   ""),
    "testing":         ("",                       "",                       "",        "weights kv_cache",   ""),
    "reward":          UNCHANGED,
    "old_log_prob":    ("params",                 "",                       "",        "",                   ""),
    "ref":             ("",                       "",                       "params",  "",                   ""),
    "reward_model":    ("",                       "",                       "",        "",                 "params"),
    "values":          ("",                       "params",                 "",        "",                   ""),
    "adv":             UNCHANGED,
    "update_critic":   ("",                       "params grads optimizer", "",        "",                   ""),
    "update_actor":    ("params grads optimizer", "",                       "",        "",                   ""),
    "load_checkpoint": ("params optimizer",       "params optimizer",       "",        "",                   ""),
    "save_checkpoint": ("params optimizer",       "params optimizer",       "",        "",                   ""),
    "export":          ("params",                 "",                       "",        "",                   ""),
}
# fmt: on
"""By phase, what must be on the device. All else is away, as far as the settings let it go: params, grads and optimizer
by {actor,critic,ref,reward_model}.megatron.{param,grad,optimizer}_offload, both parts of vLLM by
rollout.free_cache_engine. Weights that vLLM shares with the actor (reshard.share_weights) stay: the actor's params may
then not go away, and vLLM's sleep does not touch them."""

Row = Mapping[str, frozenset[str]]


def row_of(phase: str) -> Row | None:
    """By role, what the phase needs on the device."""
    row = TABLE[phase]
    return row and {role: frozenset(names.split()) for role, names in zip(ROLES, row, strict=True)}


def check_offload(rollout: RolloutConfig) -> None:
    """Refuses, before anything is built, what this machine cannot put away."""
    if rollout.free_cache_engine and not platform.use_cuda():
        raise UserError(
            "rollout.free_cache_engine is true; vLLM can give its memory back on a GPU only, and this run is on a CPU: "
            "set it to false"
        )
    if not platform.use_cuda():
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        memory_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
        if rollout.cpu_kvcache_space_gb * ranks > memory_gb:
            raise UserError(
                f"rollout.cpu_kvcache_space_gb is {rollout.cpu_kvcache_space_gb}, and {ranks} ranks share this "
                f"machine's {memory_gb} GiB of memory; it must be at most {memory_gb // ranks}"
            )


class OffloadSchedule:
    """Where the models and the rollout engine of a run are."""

    def __init__(self) -> None:
        self._engines: dict[str, ModelEngine] = {}
        self._rollout: RolloutEngine | None = None
        self._most_offloaded: dict[str, int] = {}

    def add(self, role: str, engine: ModelEngine) -> None:
        """Puts a finished model away until a phase needs it, so that the next one has room to be built."""
        self._engines[role] = engine
        engine.offload.offload_all_but(())
        self._count()

    def add_rollout(self, rollout: RolloutEngine) -> None:
        """Takes over an engine that can sleep; others stay awake."""
        self._rollout = rollout

    @contextmanager
    def phase(self, timer: PhaseTimer, name: str) -> Iterator[None]:
        """One phase of the loop: its row of TABLE comes true, then the body runs and is timed. What moves is timed as
        "offload"; nothing is, where nothing moves."""
        row = row_of(name)
        if row is not None and self._differs(row):
            with timer.phase("offload"):
                self._enter(row)
        with timer.phase(name):
            yield

    def metrics(self) -> dict[str, float]:
        """GiB of device memory by role, the most that was put away at a time; of roles with something to put away."""
        return {f"memory/{role}_offloaded_gb": size / 2**30 for role, size in self._most_offloaded.items() if size}

    def _differs(self, row: Row) -> bool:
        moves = any(engine.offload.differs_from(row[role]) for role, engine in self._engines.items())
        return moves or (self._rollout is not None and self._rollout.awake != row["vllm"])

    def _enter(self, row: Row) -> None:
        """First all that leaves, then what comes, which so has room."""
        for role, engine in self._engines.items():
            engine.offload.offload_all_but(row[role])
        if self._rollout is not None and self._rollout.awake - row["vllm"]:
            # With the KV cache go the weights; the phase that needs these alone is about to bring new ones.
            self._rollout.sleep()
        for role, engine in self._engines.items():
            engine.offload.onload(row[role])
        if self._rollout is not None:
            for part in (WEIGHTS, KV_CACHE):
                if part in row["vllm"] - self._rollout.awake:
                    self._rollout.wake_up(part)
        self._count()

    def _count(self) -> None:
        for role, engine in self._engines.items():
            self._most_offloaded[role] = max(self._most_offloaded.get(role, 0), engine.offload.offloaded_bytes)
