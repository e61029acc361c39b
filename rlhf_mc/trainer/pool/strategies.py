"""The strategies of a rollout: which groups a call of the engines samples, when it ends, and what
becomes of the groups that the step does not train on."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlhf_mc.config.roles import has_pool, prompts_in_flight, prompts_per_batch
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.trainer.pool.generate import (
    TRAINING,
    CallPlan,
    Enough,
    new_groups,
    prompt_order,
    sampling_seeds,
)
from rlhf_mc.trainer.pool.group_pool import Group, drop_stale, may_end, oldest_first
from rlhf_mc.trainer.pool.rollout_journal import check_replayed
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.step_state import StepState

REFILLED = "training/off_policy/refilled_groups"
DROPPED = "training/off_policy/dropped_groups"


def choose_strategy(run: Run) -> Strategy:
    """Return the strategy of the next rollout."""
    rollout = run.config.rollout
    if rollout.partial_rollout:
        strategy: PoolStrategy = PartialRollout()
    elif rollout.one_step_off and not rollout.tail_batching:
        return AllGroups()
    elif has_pool(rollout) or run.group_pool.groups:
        # Groups of a run that had a pool before a resume: none is lost, or trained on twice.
        strategy = TailBatching()
    else:
        return PlainSampling()
    return Replay(strategy) if run.journal.is_replayed else strategy


class Strategy(ABC):
    """Plans a call of the engines. The step uses all groups of the call."""

    @abstractmethod
    def plan(self, run: Run, state: StepState, needed: int) -> CallPlan:
        """Return the plan of a rollout. The step can use `needed` of its groups."""


class PoolStrategy(Strategy):
    """Decides too which groups the step uses, and keeps the others for later steps."""

    def select(self, plan: CallPlan, groups: Sequence[Group], max_tokens: int) -> np.ndarray:
        """Return which groups the step uses, the first ones that are complete: [groups] bool.
        max_tokens: of a response."""
        is_complete = np.array([group.has_ended(max_tokens).all() for group in groups])
        return is_complete & (is_complete.cumsum() <= plan.needed)

    @abstractmethod
    def keep(
        self, run: Run, state: StepState, groups: Sequence[Group], others: list[Group]
    ) -> None:
        """Keep the groups that the step does not use for later steps. groups: all of the call."""


class PlainSampling(Strategy):
    """Each rollout samples one batch of prompts, and uses all of it."""

    def plan(self, run: Run, state: StepState, needed: int) -> CallPlan:
        cfg = run.config
        order = prompt_order(run)
        positions = order.next_batch(state.num_prompts)
        prompts = run.train_prompts.select(order.indices(positions))
        n = cfg.rollout.n
        seeds = sampling_seeds(cfg.trainer.seed, TRAINING, state.step, prompts, n, state.draws)
        state.num_prompts = order.next_batch(positions.stop).start
        run.group_pool.num_drawn = 0  # state.num_prompts counts
        return CallPlan.of_all(new_groups(prompts, positions, seeds))


class AllGroups(PoolStrategy):
    """A rollout one step ahead (rollout.one_step_off) ends with all groups of a batch: the first
    ones of the pool, and as many new ones as are needed."""

    def plan(self, run: Run, state: StepState, needed: int) -> CallPlan:
        needed = prompts_per_batch(run.config.data)
        retained = run.group_pool.groups[:needed]
        groups = [*retained, *draw(run, needed - len(retained))]
        return replace(CallPlan.of_all(groups), is_resumable=True)

    def keep(
        self, run: Run, state: StepState, groups: Sequence[Group], others: list[Group]
    ) -> None:
        run.group_pool.groups = run.group_pool.groups[len(groups) :]


class TailBatching(PoolStrategy):
    """A step samples more groups than it uses, and ends with the first ones that are complete.
    Later steps sample the others again, with their own weights, without any more."""

    def plan(self, run: Run, state: StepState, needed: int) -> CallPlan:
        needed = run.config.data.train_batch_size
        retained = list(run.group_pool.groups)
        if len(retained) >= needed:
            return _pool_plan(retained[:needed], needed, None)
        order = prompt_order(run)
        per_epoch = order.num_before(order.epoch_length)
        # An epoch ends without retained groups: it has a multiple of `needed`.
        in_epoch = per_epoch - order.num_before(run.group_pool.num_drawn) % per_epoch
        num_new = min(prompts_in_flight(run.config), in_epoch, _num_left(run))
        if num_new < needed:
            # As many, unless changed settings left another number: then some of the next epoch too.
            return _pool_plan([*retained, *draw(run, needed - len(retained))], needed, None)
        return _pool_plan(
            draw(run, int(num_new)), needed, lambda is_complete: is_complete.sum() >= needed
        )

    def keep(
        self, run: Run, state: StepState, groups: Sequence[Group], others: list[Group]
    ) -> None:
        sampled = {group.position for group in groups}
        waiting = [group for group in run.group_pool.groups if group.position not in sampled]
        run.group_pool.groups = [*waiting, *(group.restarted() for group in others)]
        state.metrics["train/tail_groups"] = len(run.group_pool.groups)


class PartialRollout(PoolStrategy):
    """A step ends with the first groups that are complete. Later steps continue the others."""

    def plan(self, run: Run, state: StepState, needed: int) -> CallPlan:
        cfg = run.config
        version = state.step - 1
        retained = drop_stale(run.group_pool.groups, version, cfg.rollout)
        retained = oldest_first(retained, version)
        # The last epoch ends with its own prompts, unless too few for a step are left of them.
        most = min(prompts_in_flight(cfg) - len(retained), _num_left(run))
        num_new = max(needed - len(retained), most, 0)
        groups = [*retained, *draw(run, int(num_new))]
        spans = np.array([group.span(version) for group in groups])
        size = cfg.data.train_batch_size

        def enough(is_complete: np.ndarray) -> bool:
            return may_end(spans, is_complete, needed, size, cfg.rollout)

        return replace(_pool_plan(groups, needed, enough), is_resumable=True)

    def keep(
        self, run: Run, state: StepState, groups: Sequence[Group], others: list[Group]
    ) -> None:
        before = run.group_pool.groups
        num_continued = len(
            {group.position for group in before} & {group.position for group in groups}
        )
        state.metrics |= {
            "training/off_policy/kept_groups": len(others),
            REFILLED: state.metrics.get(REFILLED, 0) + len(groups) - num_continued,
            DROPPED: state.metrics.get(DROPPED, 0) + len(before) - num_continued,
        }
        run.group_pool.groups = others


class Replay(PoolStrategy):
    """The decisions of the run of trainer.replay, by the strategy that both have."""

    def __init__(self, strategy: PoolStrategy) -> None:
        self._strategy = strategy

    def plan(self, run: Run, state: StepState, needed: int) -> CallPlan:
        self._row = run.journal.replayed(state.step, state.num_rollouts)
        state.num_rollouts += 1
        positions = self._row.positions
        retained = {group.position: group for group in run.group_pool.groups}
        new = {
            group.position: group
            for group in groups_at(run, [p for p in positions if p not in retained])
        }
        run.group_pool.num_drawn = max(run.group_pool.num_drawn, 1 + max(positions))
        return CallPlan(
            [retained.get(p) or new[p] for p in positions],
            needed,
            certain=np.isin(positions, self._row.taken),
            max_lens=self._row.lens,
            is_resumable=isinstance(self._strategy, PartialRollout),
        )

    def select(self, plan: CallPlan, groups: Sequence[Group], max_tokens: int) -> np.ndarray:
        check_replayed(self._row, groups)
        return plan.certain

    def keep(
        self, run: Run, state: StepState, groups: Sequence[Group], others: list[Group]
    ) -> None:
        self._strategy.keep(run, state, groups, others)


# ---------------------------------------------------------------- groups of the pool


def groups_at(run: Run, positions: Sequence[int]) -> list[Group]:
    """Return the groups, without tokens, at these positions of the run's order of prompts. Seed
    step = batch number + 1."""
    order = prompt_order(run)
    n = run.config.rollout.n
    groups: list[Group] = []
    for (number, batch), members in itertools.groupby(positions, order.batch_at):
        prompts = run.train_prompts.select(order.indices(batch))
        seeds = sampling_seeds(run.config.trainer.seed, TRAINING, number + 1, prompts, n)
        of_batch = new_groups(prompts, batch, seeds)
        groups += [of_batch[position - batch.start] for position in members]
    return groups


def next_position(run: Run) -> int:
    """Return the position in the order of prompts as of a run without a pool: the prompts drawn,
    less one for each group in the pool."""
    order = prompt_order(run)
    return order.position(order.num_before(run.group_pool.num_drawn) - len(run.group_pool.groups))


def _pool_plan(groups: Sequence[Group], needed: int, enough: Enough | None) -> CallPlan:
    """Return a plan. The first `needed` groups are always used if they are complete."""
    return CallPlan(groups, needed, np.arange(len(groups)) < needed, enough)


def draw(run: Run, count: int) -> list[Group]:
    """Return the groups of the next prompts of the run."""
    order = prompt_order(run)
    first = order.num_before(run.group_pool.num_drawn)
    run.group_pool.num_drawn = order.position(first + count)
    return groups_at(run, [order.position(i) for i in range(first, first + count)])


def _num_left(run: Run) -> float:
    """Return the number of prompts left to draw; infinity if trainer.total_training_steps ends
    it."""
    order = prompt_order(run)
    total = (
        order.num_before(run.schedule.total_prompts) if run.schedule.ends_by_epochs else math.inf
    )
    return total - order.num_before(run.group_pool.num_drawn)


def off_policy_metrics(batch: RaggedBatch) -> dict[str, float]:
    """Return verl's metrics of responses of several weight versions, and the share of tokens by
    age.

    For each response: trajectory_spans = largest - smallest age + 1; trajectory_staleness =
    smallest age; trajectory_staleness_worst = largest age."""
    assert batch.token_ages is not None
    ages = batch.token_ages.numpy()
    starts = np.cumsum(batch.response_lens.numpy()) - batch.response_lens.numpy()
    smallest = np.minimum.reduceat(ages, starts)
    largest = np.maximum.reduceat(ages, starts)
    numbers = {
        "trajectory_spans": largest - smallest + 1,
        "trajectory_staleness": smallest,
        "trajectory_staleness_worst": largest,
    }
    metrics = {
        f"training/off_policy/{name}/{kind}": float(getattr(values, kind)())
        for name, values in numbers.items()
        for kind in ("mean", "max", "min")
    }
    counts = np.bincount(ages)
    return metrics | {
        f"training/off_policy/token_share/age_{age}": count / len(ages)
        for age, count in enumerate(counts.tolist())
    }
