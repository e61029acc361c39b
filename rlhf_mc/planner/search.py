"""Search for the settings with the shortest step that fit: layouts of training and rollout, token
budgets, recomputation, offload, the rollout engine's share. All other settings are the user's.
Megatron sections other than the actor's inherit what they leave out.

Candidates are visited by a lower bound of their step time (unlimited KV cache, no offload) until
none can be better.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf_mc.config.checks import check_config
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.roles import has_rollout_pool, in_rollout_pool
from rlhf_mc.config.schema import Config
from rlhf_mc.planner.generation_time import generation, sequences_at_a_time
from rlhf_mc.planner.gpus import Machine
from rlhf_mc.planner.lengths import Lengths
from rlhf_mc.planner.measured import Expected, expect_times
from rlhf_mc.planner.memory import Capacity, RankMemory, plan_memory
from rlhf_mc.planner.model_state import ModelState
from rlhf_mc.planner.search_space import (
    BUCKET,
    EP,
    GRANULARITY,
    PP,
    RECOMPUTE,
    ROLLOUT_TP,
    SHARE,
    TP,
    SearchSpace,
    Settings,
)
from rlhf_mc.planner.start import MemoryFit, check_fit, plan_run
from rlhf_mc.planner.times import StepTimes, largest_states, passes, plan_times
from rlhf_mc.planner.traffic import Traffic, weight_update
from rlhf_mc.reshard.layout import logical_shapes
from rlhf_mc.reshard.model_checks import check_layouts
from rlhf_mc.rollout.engines import engine_factory
from rlhf_mc.runtime.console import print_line

MARGIN = 0.05
"""Share of the device memory that a plan leaves: activations are planned within 10 %, fragmentation
is not."""
EQUAL = 0.03
"""Relative difference below which two bounds count as equal, since they leave out more than that.
The simpler settings then come first."""
BUDGET = 4000
"""Layouts, candidates and plans after which a search returns the best so far, on any machine."""
MOST_RANKS = 4096
"""Ranks beyond which a search leaves out the weight update, whose plan for all of them takes
minutes."""
MOST_SPLITS = 7
"""Splits of the ranks into two pools that a search compares."""
_PRINT_SECONDS = 5.0
_SHARES = [twentieth / 20 for twentieth in range(2, 20)]
_BUCKETS = (128, 32)
"""Smaller values of reshard.bucket_megabytes to try where the weight update does not fit."""
_UNLIMITED = 1e18


@dataclass(frozen=True)
class PlannedSettings:
    """Settings that fit, with their plan."""

    settings: Settings
    """The settings that the search has set."""
    cfg: Config
    times: StepTimes
    fit: MemoryFit
    offload: int
    """Number of the offload settings, in the order in which they are tried."""
    expected: Expected | None = None
    """The times to expect; None: not yet computed."""


@dataclass(frozen=True)
class _Candidate:
    bound: float
    """Lower bound of the step's seconds."""
    layout: Settings
    recompute: str | None
    budget: int
    """Tokens of a micro-batch of updates."""
    forward: int
    """Tokens of a micro-batch of other passes."""
    rollout_tp: int


def search(
    settings: Settings,
    machine: Machine,
    capacity: Capacity,
    lengths: Lengths,
    top: int,
    keeps_split: bool = False,
) -> list[PlannedSettings]:
    """Return the best choices, the best first, at most `top`, each with another layout or
    recomputation. settings: the user's; where these have resource_pools, choices have other splits
    of the ranks too, or none, unless keeps_split. Raise UserError if none fits, or if the settings
    are wrong whatever the layout."""
    splits = [{}] if keeps_split else _splits(settings, machine)
    runs = [_Search(settings, split, machine, capacity, lengths) for split in splits]
    choices: list[PlannedSettings] = []
    best: list[str] = []
    for run in runs:
        of_split = run.best(top, beyond_node=False) or run.best(top, beyond_node=True)
        choices += of_split
        best += [f"{run.ranks} ranks {choice.times.seconds:.1f} s" for choice in of_split[:1]]
    if len(runs) > 1:
        print_line(f"the best step of each split: {'; '.join(best)}")
    choices = _ranked(choices)[:top]
    if any(run.budget.is_spent for run in runs):
        print_line(
            f"the search ended after {BUDGET} settings; with fewer GPUs it would compare all"
        )
    if machine.world > MOST_RANKS:
        hint = "the times leave out the weight update; plan the choice without --search"
        print_line(f"of more than {MOST_RANKS} GPUs {hint}")
    if not choices:
        host = "" if capacity.host_bytes is None else " and the host memory of their nodes"
        raise UserError(
            f"no settings fit {machine.world} GPUs of {capacity.device_bytes / 1e9:.1f} GB{host}, "
            f"if {MARGIN:.0%} stay free; use more GPUs, or shorter data.max_prompt_length and "
            "data.max_response_length"
        )
    return choices


def _splits(settings: Settings, machine: Machine) -> list[Settings]:
    """Return the settings of resource_pools to try: none, and splits into whole nodes, or on one
    node into GPUs. Where the user's settings have none, theirs alone."""
    pools = ("resource_pools.train", "resource_pools.rollout")
    if not any(settings.get(key) for key in pools):
        return [{}]
    unit = machine.gpus_per_node if machine.world > machine.gpus_per_node else 1
    count = machine.world // unit
    sizes = {-(-count * n // (MOST_SPLITS + 1)) for n in range(1, MOST_SPLITS + 1)} - {count}
    splits = [(unit * (count - size), unit * size) for size in sorted(sizes)]
    needs_pools = any(key.endswith(".pool") and settings[key] == "rollout" for key in settings)
    colocated = [] if needs_pools else [dict.fromkeys(pools)]
    return [*colocated, *(dict(zip(pools, split, strict=True)) for split in splits)]


def describe_ranks(cfg: Config, world: int) -> str:
    """Return the number of ranks: of all, or of training and rollout."""
    pools = cfg.resource_pools
    return f"{pools.train} + {pools.rollout}" if has_rollout_pool(cfg) else str(world)


class _Budget:
    """The number of settings that a search looks at. The clock decides only when a line is
    printed."""

    def __init__(self) -> None:
        self._looked_at = 0
        self._printed = time.monotonic()
        self.is_spent = False  # something was left out

    def take(self, share: float, done: str) -> bool:
        """Count one more setting, and return whether this share of the budget has room for it.
        done: what the search has done, printed at times."""
        if time.monotonic() - self._printed >= _PRINT_SECONDS:
            self._printed = time.monotonic()
            print_line(f"search: {done}")
        self._looked_at += 1
        has_room = self._looked_at <= share * BUDGET
        self.is_spent |= not has_room
        return has_room


class _Search:
    def __init__(
        self,
        settings: Settings,
        split: Settings,
        machine: Machine,
        capacity: Capacity,
        lengths: Lengths,
    ) -> None:
        """split: the settings of resource_pools that the search has chosen."""
        self._space = SearchSpace({**settings, **split}, machine)
        self._split = split
        self._shapes = self._space.shapes
        self.ranks = describe_ranks(self._space.base, machine.world)
        self._machine = machine
        self._capacity = capacity
        self._device_bytes = capacity.device_bytes
        self._lengths = lengths
        self.budget = _Budget()
        base = self._space.base
        self._overlaps = has_rollout_pool(base) and base.rollout.one_step_off
        sizes = {
            name: math.prod(size) for name, size in logical_shapes(self._shapes["actor"]).items()
        }
        self._experts = sum(size for name, size in sizes.items() if ".experts." in name)
        """Parameters of the actor's experts."""
        self._dense = sum(sizes.values()) - self._experts
        """Its other parameters."""
        self._too_large: set[tuple[object, ...]] = set()
        """Layouts, budgets and offload with which training alone does not fit."""

    def best(self, top: int, beyond_node: bool) -> list[PlannedSettings]:
        """Return the best choices. beyond_node: with tensor-parallel groups that span nodes, and
        only those."""
        best: dict[tuple[object, ...], PlannedSettings] = {}
        candidates = sorted(self._candidates(beyond_node), key=lambda candidate: candidate.bound)
        for number, candidate in enumerate(candidates):
            if not self.budget.take(
                0.8, f"{number} of {len(candidates)} settings tried, {len(best)} layouts fit"
            ):
                break
            enough = sorted(choice.times.seconds for choice in best.values())[top - 1 : top]
            if enough and candidate.bound > enough[0] * (1 + EQUAL):
                break
            if (choice := self._fitting(candidate)) is not None:
                key = (*candidate.layout.values(), candidate.rollout_tp, candidate.recompute)
                best[key] = _ranked([choice, best.get(key, choice)])[0]
        complete: list[PlannedSettings] = []
        for choice in _ranked(list(best.values())):
            if len(complete) == top or (
                complete and not self.budget.take(1.0, f"{len(complete)} of {top} plans")
            ):
                break
            complete += filter(None, [self._complete(choice)])
        return _ranked(complete)

    def _candidates(self, beyond_node: bool) -> Iterator[_Candidate]:
        """Yield all candidates whose layout the models, and the config's other settings, allow."""
        error = None
        engine = engine_factory(self._space.base.rollout)
        rollouts: dict[int, float] = {}
        for rollout_tp in self._space.group_sizes(self._space.num_rollout, beyond_node):
            try:
                engine.check_layout(self._shapes["actor"], rollout_tp)
            except UserError:
                continue
            cfg = self._space.config({ROLLOUT_TP: rollout_tp})
            decoded = sequences_at_a_time(cfg, self._machine.world, self._lengths, _UNLIMITED)
            parts = generation(cfg, self._shapes["actor"], self._machine, self._lengths, decoded)
            rollouts[rollout_tp] = sum(parts.values())
        is_any = False
        for number, layout in enumerate(self._space.training_layouts(beyond_node)):
            if not self.budget.take(0.5, f"{number} layouts looked at"):
                break
            engines = {  # the others are refused by check_config
                rollout_tp: seconds
                for rollout_tp, seconds in rollouts.items()
                if layout[TP] % rollout_tp == 0 or rollout_tp % layout[TP] == 0
            }
            if not engines:
                continue
            budget = self._space.budget_sizes(layout)[-1]
            trial = {
                **layout,
                **self._space.budgets(budget, budget),
                **self._space.offload_levels()[-1],
            }
            trial[ROLLOUT_TP] = max(engines)
            cfg = self._space.config(trial)
            try:
                check_config(cfg, self._machine.world)
                check_layouts(cfg, self._shapes)
            except UserError as refused:
                error = error or refused
                continue
            is_any = True
            for candidate, (rollout_tp, seconds) in itertools.product(
                self._layout_candidates(layout, max(engines)), engines.items()
            ):
                if beyond_node and max(layout[TP], rollout_tp) <= self._machine.gpus_per_node:
                    continue
                bound = candidate.bound + seconds
                if self._overlaps:
                    bound = max(candidate.bound, seconds)
                yield replace(candidate, bound=bound, rollout_tp=rollout_tp)
        if not is_any and error is not None and not beyond_node:
            raise error

    def _layout_candidates(self, layout: Settings, rollout_tp: int) -> Iterator[_Candidate]:
        """Yield the candidates of a training layout, with the bound of all but generation.
        rollout_tp: the size with least memory."""
        states = self._smallest({**layout, ROLLOUT_TP: rollout_tp})
        if states is None:
            return
        for recompute in RECOMPUTE:
            chosen = {**layout, GRANULARITY: recompute, ROLLOUT_TP: rollout_tp}
            forward: dict[int, float] = {}
            update: dict[int, float] = {}
            for budget in self._space.budget_sizes(layout):
                cfg = self._space.config({**chosen, **self._space.budgets(budget, budget)})
                phases = [
                    phase
                    for phase in passes(cfg, self._shapes, states, self._machine, self._lengths)
                    if not in_rollout_pool(cfg, phase.name)
                ]
                update[budget] = sum(
                    phase.total for phase in phases if phase.name.startswith("update_")
                )
                forward[budget] = sum(phase.total for phase in phases) - update[budget]
            quickest = min(forward.values())
            largest = max(
                budget for budget, seconds in forward.items() if seconds <= quickest * (1 + EQUAL)
            )
            for budget, seconds in update.items():
                yield _Candidate(
                    seconds + forward[largest], layout, recompute, budget, largest, rollout_tp
                )

    def _smallest(self, layout: Settings) -> dict[str, ModelState] | None:
        """Return the states of the models in a layout; None where it does not fit with all that
        saves memory."""
        stages = layout[TP] * layout[PP]
        dp = self._space.num_training // stages
        # Weights of two bytes, gradients of four, Adam's moments over all replicas.
        base = self._space.base
        shared = self._dense * (6 + 8 / dp) + self._experts * (6 + 8 * layout[EP] / dp) / layout[EP]
        if (
            not any(role.freeze or role.lora.rank for role in (base.actor, base.critic))
            and not self._space.is_sharded
            and shared / stages > self._device_bytes
        ):
            return None
        budget = self._space.budget_sizes(layout)[0]
        chosen = {
            **layout,
            **self._space.budgets(budget, budget),
            **self._space.offload_levels()[-1],
        }
        cfg = self._space.config({**chosen, GRANULARITY: "full"})
        plan = self._plan(cfg)
        return None if self._room_of_engine(plan) is None else largest_states(plan)

    def _fitting(self, candidate: _Candidate) -> PlannedSettings | None:
        """Return the quickest choice of offload for a candidate; None: none fits."""
        fitting = []
        for level, settings in enumerate(self._space.offload_levels()):
            for forward in dict.fromkeys((candidate.forward, candidate.budget)):
                key = (
                    *candidate.layout.values(),
                    candidate.recompute,
                    candidate.budget,
                    forward,
                    level,
                )
                if key in self._too_large:
                    continue
                chosen = {
                    **candidate.layout,
                    GRANULARITY: candidate.recompute,
                    **self._space.budgets(candidate.budget, forward),
                    ROLLOUT_TP: candidate.rollout_tp,
                    **settings,
                }
                choice = self._with_engine(chosen, level, key)
                if choice is not None:
                    fitting.append(choice)
                    break
            # More offload frees memory for the KV cache alone.
            if fitting and fitting[-1].times.sequences_at_a_time == sequences_at_a_time(
                fitting[-1].cfg, self._machine.world, self._lengths, _UNLIMITED
            ):
                break
        return _ranked(fitting)[0] if fitting else None

    def _with_engine(
        self, chosen: Settings, level: int, key: tuple[object, ...]
    ) -> PlannedSettings | None:
        """Return the choice with the smallest share of the rollout engine that holds all of an
        engine's sequences, or else the largest that fits; None: it does not fit. key: of training,
        which is recorded where training does not fit."""
        bucket = self._space.base.reshard.bucket_megabytes
        for megabytes in (bucket, *(size for size in _BUCKETS if size < bucket)):
            trial = {**chosen, BUCKET: megabytes}
            cfg = self._space.config(trial)
            plan = self._plan(cfg)
            room = self._room_of_engine(plan)
            if room is not None:
                return self._with_share({**trial, SHARE: self._share(cfg, plan, room)}, level)
            limit = self._device_bytes * (1 - MARGIN)
            full = {
                phase.name
                for ranks in plan
                for phase in ranks.phases
                if _without_engine(phase.parts) > limit
            }
            if full != {"update_weights"}:
                self._too_large.add(key)
                return None
        return None

    def _with_share(self, chosen: Settings, level: int) -> PlannedSettings | None:
        cfg = self._space.config(chosen)
        # Host memory is summed over all ranks of a node.
        plan = self._plan(cfg, one_of_each_stage=self._capacity.host_bytes is None)
        fit = self._checked_fit(cfg, plan)
        if fit is None:
            return None
        return PlannedSettings(
            {**self._split, **chosen},
            cfg,
            plan_times(cfg, self._shapes, plan, (), self._machine, self._lengths),
            fit,
            level,
        )

    def _checked_fit(self, cfg: Config, plan: Sequence[RankMemory]) -> MemoryFit | None:
        """Return the fit of a plan; None: it does not fit, or leaves less than MARGIN."""
        fit = check_fit(cfg, self._shapes, plan, self._capacity)
        return None if fit.problem is not None or fit.spare < MARGIN * self._device_bytes else fit

    def _room_of_engine(self, plan: Sequence[RankMemory]) -> float | None:
        """Return the share of the device that the rollout engine may take; None: even without its
        KV cache a phase does not fit."""
        limit = self._device_bytes * (1 - MARGIN)
        phases = [phase for ranks in plan for phase in ranks.phases]
        if any(_without_engine(phase.parts) > limit for phase in phases):
            return None
        return (
            min(limit - _without_engine(phase.parts) for phase in phases if "vLLM" in phase.parts)
            / self._device_bytes
        )

    def _share(self, cfg: Config, plan: Sequence[RankMemory], room: float) -> float:
        """Return rollout.gpu_memory_utilization. room: the most it may be."""
        decoded = sequences_at_a_time(cfg, self._machine.world, self._lengths, _UNLIMITED)
        rollouts = [ranks.rollout for ranks in plan if ranks.rollout is not None]
        needed = max(
            rollout.weights
            + rollout.activations
            + decoded * self._space.longest * rollout.kv_bytes_per_token
            for rollout in rollouts
        )
        fitting = [share for share in _SHARES if share <= room]
        enough = [share for share in fitting if share * self._device_bytes >= needed]
        return enough[0] if enough else fitting[-1] if fitting else _SHARES[0]

    def _complete(self, choice: PlannedSettings) -> PlannedSettings | None:
        """Return the choice with its weight update, checked as a run is and planned on all ranks;
        None: it is refused or does not fit."""
        try:
            plan = plan_run(choice.cfg, self._shapes, self._capacity)
        except UserError:
            return None
        fit = self._checked_fit(choice.cfg, plan)
        machine = self._machine
        if fit is None:
            return None
        weights: list[Traffic] = []
        if machine.world <= MOST_RANKS:
            world = machine.world
            weights = weight_update(choice.cfg, self._shapes["actor"], world, machine.gpus_per_node)
        times = plan_times(choice.cfg, self._shapes, plan, weights, machine, self._lengths)
        expected = expect_times(choice.cfg, self._shapes, plan, weights, machine, self._lengths)
        return replace(choice, times=times, expected=expected, fit=fit)

    def _plan(self, cfg: Config, one_of_each_stage: bool = True) -> list[RankMemory]:
        return plan_memory(cfg, self._shapes, self._capacity, one_of_each_stage)


def _without_engine(parts: Mapping[str, float]) -> float:
    return sum(size for name, size in parts.items() if name != "vLLM")


def _ranked(choices: Sequence[PlannedSettings]) -> list[PlannedSettings]:
    """Return the choices by step time, in steps of EQUAL of the best; among equals by less offload
    and recomputation, by larger micro-batches, whose products run nearer to the peak rates, and by
    fewer pipeline chunks, which wait for messages."""
    if not choices:
        return []
    best = min(choice.times.seconds for choice in choices)

    def key(choice: PlannedSettings) -> tuple[float, ...]:
        actor = choice.cfg.actor
        megatron = actor.megatron
        recompute = RECOMPUTE.index(megatron.recompute_granularity)
        chunks = megatron.pipeline_model_parallel_size * (
            megatron.virtual_pipeline_model_parallel_size or 1
        )
        behind = math.floor((choice.times.seconds / best - 1) / EQUAL)
        return (
            behind,
            choice.offload,
            recompute,
            -actor.ppo_max_token_len_per_gpu,
            chunks,
            choice.times.seconds,
        )

    return sorted(choices, key=key)
