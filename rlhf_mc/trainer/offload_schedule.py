"""The offload schedule: TABLE gives the device placement of each phase, and OffloadSchedule offloads and onloads what
changes between two phases. Tensors are moved by models/offload.py, vLLM sleeps by rollout/vllm_engine.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rlhf_mc import platform
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.reward_schema import unnamed
from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.rollout.base import KV_CACHE, WEIGHTS, RolloutEngine

UNCHANGED = None
"""Row of a phase that needs nothing on the device: the placement stays."""
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
"""The parts that each phase needs on the device. All others are offloaded if the settings allow it: params, grads and
optimizer by {actor,critic,ref,reward_model}.megatron.{param,grad,optimizer}_offload, both parts of vLLM by
rollout.free_cache_engine. Each of reward_models has a phase of its own, like reward_model. Weights that vLLM shares
with the actor (reshard.share_weights) stay on the device: the actor's params then cannot be offloaded, and vLLM's sleep
skips them."""

Row = Mapping[str, frozenset[str]]
_NOTHING: frozenset[str] = frozenset()


def row_of(phase: str) -> Row | None:
    """Return the parts that the phase needs on the device, by role; None for UNCHANGED. The phase of a reward model is
    named after its role, and needs that model."""
    row = TABLE[unnamed(phase)]
    if row is None:
        return None
    roles = (*ROLES[:-1], phase if unnamed(phase) == "reward_model" else "reward_model")
    return {role: frozenset(names.split()) for role, names in zip(roles, row, strict=True)}


def check_offload(rollout: RolloutConfig) -> None:
    """Raise UserError, before anything is built, if this machine cannot offload or hold vLLM's memory."""
    if rollout.free_cache_engine and not platform.use_cuda():
        raise UserError(
            "rollout.free_cache_engine is true; vLLM can release its memory on a GPU only, and this run is on a CPU: "
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
    """The device placement of a run's models and its rollout engine."""

    def __init__(self) -> None:
        self._engines: dict[str, ModelEngine] = {}
        self._rollout: RolloutEngine | None = None
        self._peak_bytes: dict[str, int] = {}

    def add(self, role: str, engine: ModelEngine) -> None:
        """Add a model and offload it until a phase needs it, so that the next model can be built."""
        self._engines[role] = engine
        engine.offload.offload_all_but(())
        self._record_peak()

    def add_rollout(self, rollout: RolloutEngine) -> None:
        """Add a rollout engine that sleeps between its phases (rollout.free_cache_engine)."""
        self._rollout = rollout

    @contextmanager
    def phase(self, timer: PhaseTimer, name: str) -> Iterator[None]:
        """Establish the phase's row of TABLE, then run and time the body. Moves are timed as "offload"; without a move
        there is no such time."""
        row = row_of(name)
        if row is not None and self._differs(row):
            with timer.phase("offload"):
                self._enter(row)
        with timer.phase(name):
            yield

    def metrics(self) -> dict[str, float]:
        """Return the largest amount of offloaded device memory, in GiB, of each role that has offloaded any."""
        return {f"memory/{role}_offloaded_gb": size / 2**30 for role, size in self._peak_bytes.items() if size}

    def _differs(self, row: Row) -> bool:
        moves = any(engine.offload.differs_from(row.get(role, _NOTHING)) for role, engine in self._engines.items())
        return moves or (self._rollout is not None and self._rollout.awake != row["vllm"])

    def _enter(self, row: Row) -> None:
        """Establish the row: offload first, to make room, then onload."""
        for role, engine in self._engines.items():
            engine.offload.offload_all_but(row.get(role, _NOTHING))
        if self._rollout is not None and self._rollout.awake - row["vllm"]:
            # vLLM discards the weights with the KV cache. The one phase that needs the weights alone overwrites them.
            self._rollout.sleep()
        for role, engine in self._engines.items():
            engine.offload.onload(row.get(role, _NOTHING))
        if self._rollout is not None:
            for part in (WEIGHTS, KV_CACHE):
                if part in row["vllm"] - self._rollout.awake:
                    self._rollout.wake_up(part)
        self._record_peak()

    def _record_peak(self) -> None:
        for role, engine in self._engines.items():
            self._peak_bytes[role] = max(self._peak_bytes.get(role, 0), engine.offload.offloaded_bytes)
