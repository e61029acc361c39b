"""The offload schedule: what changes between the device placements of two phases
(config/roles.py) is offloaded and onloaded. Tensors are moved by models/offload.py, the
rollout engine sleeps by its own method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rlhf_mc.config.roles import Placement, parts_on_device
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.rollout.base import KV_CACHE, WEIGHTS, RolloutEngine

_NOTHING: frozenset[str] = frozenset()


class OffloadSchedule:
    """The device placement of a run's models and its rollout engine."""

    def __init__(self, shared: Mapping[str, str] | None = None) -> None:
        """shared: as parts_on_device has it."""
        self._engines: dict[str, ModelEngine] = {}
        self._shared = shared
        self._rollout: RolloutEngine | None = None
        self._peak_bytes: dict[str, int] = {}

    def add(self, role: str, engine: ModelEngine) -> None:
        """Add a model and offload it until a phase needs it, so that the next model can be
        built."""
        self._engines[role] = engine
        engine.offload.offload_all_but(())
        self._record_peak()

    def add_rollout(self, rollout: RolloutEngine) -> None:
        """Add a rollout engine that sleeps between its phases (rollout.free_cache_engine)."""
        self._rollout = rollout

    @contextmanager
    def phase(self, timer: PhaseTimer, name: str) -> Iterator[None]:
        """Establish the phase's placement, then run and time the body. Moves are timed as
        "offload"; without a move there is no such time."""
        row = parts_on_device(name, self._shared)
        if row is not None and self._differs(row):
            with timer.phase("offload"):
                self._enter(row)
        with timer.phase(name):
            yield

    def metrics(self) -> dict[str, float]:
        """Return the largest amount of offloaded device memory, in GiB, of each role that has
        offloaded any."""
        return {
            f"memory/{role}_offloaded_gb": size / 2**30
            for role, size in self._peak_bytes.items()
            if size
        }

    def _differs(self, row: Placement) -> bool:
        moves = any(
            engine.offload.differs_from(row.get(role, _NOTHING))
            for role, engine in self._engines.items()
        )
        return moves or (self._rollout is not None and self._rollout.awake != row["rollout"])

    def _enter(self, row: Placement) -> None:
        """Establish the row: offload first, to make room, then onload."""
        for role, engine in self._engines.items():
            engine.offload.offload_all_but(row.get(role, _NOTHING))
        if self._rollout is not None and self._rollout.awake - row["rollout"]:
            # The engine discards the weights with the KV cache. The one phase that needs the
            # weights alone overwrites them.
            self._rollout.sleep()
        for role, engine in self._engines.items():
            engine.offload.onload(row.get(role, _NOTHING))
        if self._rollout is not None:
            for part in (WEIGHTS, KV_CACHE):
                if part in row["rollout"] - self._rollout.awake:
                    self._rollout.wake_up(part)
        self._record_peak()

    def _record_peak(self) -> None:
        for role, engine in self._engines.items():
            self._peak_bytes[role] = max(
                self._peak_bytes.get(role, 0), engine.offload.offloaded_bytes
            )
