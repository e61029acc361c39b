"""The rollout of a step that begins more groups than it needs and trains on those that end first. rollout.tail_batching
generates the others again, rollout.partial_rollout continues them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_mc.checkpoint.training_state import read_arrays, reading_state
from rlhf_mc.config.roles import estimator_needs, has_pool, prompts_in_flight
from rlhf_mc.data.batch import Prompt, RaggedBatch, Responses, build_batch
from rlhf_mc.data.order import PromptOrder
from rlhf_mc.rollout.base import Sampling
from rlhf_mc.runtime.console import print_line
from rlhf_mc.topology.consensus import on_every_rank
from rlhf_mc.trainer.generate import (
    Enough,
    continue_groups,
    generate,
    new_groups,
    new_stream,
    prompt_order,
    repeat_prompts,
    wake_weights,
)
from rlhf_mc.trainer.pool.group_pool import (
    EXPERTS_FILE,
    POOL_FILE,
    Group,
    check_arrays,
    drop_stale,
    load_experts,
    load_groups,
    may_end,
    oldest_first,
)
from rlhf_mc.trainer.pool.rollout_journal import StepGroups, check_replayed
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.scores import GroupScores, ScoreStream
from rlhf_mc.trainer.step_state import Position, StepState

REFILLED = "training/off_policy/refilled_groups"
DROPPED = "training/off_policy/dropped_groups"


def pooled_rollout(run: Run, state: StepState, needed: int) -> tuple[list[Prompt], RaggedBatch, ScoreStream]:
    """Generate until `needed` groups are complete. Return the prompt of each response, the batch, and the scores to
    come. All ranks know which responses have ended, and so decide alike."""
    cfg = run.config
    n = cfg.rollout.n
    wake_weights(run, state)
    enough: Enough | None = None
    row: StepGroups | None = None
    if run.journal.is_replayed:
        row = run.journal.replayed(state.step, state.num_rollouts)
        groups = _replayed(run, state, row)
        is_certain = np.isin(row.positions, row.taken)
    else:
        groups, enough = _partial(run, state, needed) if cfg.rollout.partial_rollout else _tail(run)
        is_certain = np.arange(len(groups)) < needed  # the complete ones of these are taken, whichever others are
    stream = new_stream(run, repeat_prompts([group.prompt for group in groups], n))
    scores = GroupScores(stream, n)
    groups = continue_groups(run, state, groups, enough, scores, is_certain, None if row is None else row.lens)
    if row is None:
        is_complete = np.array([group.has_ended(cfg.data.max_response_length).all() for group in groups])
        is_taken = is_complete & (is_complete.cumsum() <= needed)
    else:
        check_replayed(row, groups)
        is_taken = is_certain
    taken = [group for group, is_one in zip(groups, is_taken, strict=True) if is_one]
    if run.groups.rank == 0:
        run.journal.record(state.step, groups, taken)
    used = {group.position for group in taken}
    others = [group for group in groups if group.position not in used]
    if not cfg.rollout.partial_rollout:
        in_step = {group.position for group in groups}
        waiting = [group for group in run.group_pool.groups if group.position not in in_step]
        others = [*waiting, *(group.restarted() for group in others)]
    drawn = [group.prompt for group in taken]
    prompts = repeat_prompts(drawn, n)
    responses = Responses.of([response for group in taken for response in group.responses])
    batch = build_batch(prompts, responses)
    numbers = [group.number(i) for group in taken for i in range(n)]
    batch = batch.with_fields(numbers=torch.tensor(numbers))
    if cfg.rollout.partial_rollout:
        versions = np.concatenate([each for group in taken for each in group.versions])[responses.drawn]
        batch = batch.with_fields(token_ages=torch.from_numpy(state.step - 1 - versions))
        continued = {group.position for group in run.group_pool.groups} & {group.position for group in groups}
        state.metrics |= {
            "training/off_policy/kept_groups": len(others),
            REFILLED: state.metrics.get(REFILLED, 0) + len(groups) - len(continued),
            DROPPED: state.metrics.get(DROPPED, 0) + len(run.group_pool.groups) - len(continued),
        }
    else:
        state.metrics["train/tail_groups"] = len(others)
    run.group_pool.groups = others
    state.num_prompts = _position(run)
    with run.offload_schedule.phase(state.timer, "reward"):
        scores.submit(is_taken)
    has_greedy = estimator_needs(cfg.algorithm).greedy_baseline
    is_selected = np.concatenate([np.repeat(is_taken, n), *([is_taken] if has_greedy else [])])
    stream.select(np.flatnonzero(is_selected).tolist())
    if has_greedy:
        with run.offload_schedule.phase(state.timer, "gen"):
            parameters = Sampling(0.0, cfg.data.max_response_length, run.stop_token_ids)
            greedy = generate(run, drawn, [group.seeds[0] for group in taken], parameters, stream, len(prompts))
            state.greedy = build_batch(drawn, greedy)
            state.num_generated += greedy.num_drawn
    stream.submit({})  # those that waited for all
    return prompts, batch, stream


def load_pool(run: Run, state: Mapping[str, Any], path: Path, position: Position, order: PromptOrder) -> int:
    """Load the pool of the checkpoint at path, from which the next step continues. position: the checkpoint's. order:
    with the checkpoint's sizes of a batch. Return position.num_prompts for the present sizes. Every rank must call
    it."""
    if run.environments is not None:
        run.environments.end_kept()  # of later steps, before a roll-back
    run.group_pool.groups = ()
    run.group_pool.num_drawn = state["num_drawn"] or position.num_prompts
    if not state["num_groups"]:
        return (
            _position(run) if has_pool(run.config.rollout) else prompt_order(run).next_batch(position.num_prompts).start
        )
    arrays = on_every_rank(lambda: read_arrays(path / POOL_FILE))
    shape = run.actor.shape
    with reading_state(path, POOL_FILE):
        check_arrays(arrays, state["num_groups"], run.group_pool.num_drawn, position.step, shape.vocab_size)
        positions = arrays["positions"].tolist()
        if "seeds" not in arrays:  # written by an earlier version, which counted without the remainder of each epoch
            positions = [order.position(place) for place in positions]
        groups = new_groups(run, positions)
        groups = load_groups(arrays, groups, run.config.data.max_response_length, run.environments is not None)
    if not run.config.rollout.partial_rollout:
        groups = [group.restarted() for group in groups]
    run.group_pool.groups = groups
    if (replay := run.actor.replay) is not None:
        files = sorted(path.glob(EXPERTS_FILE.format("*")))[run.groups.rank :: run.groups.mesh.world]

        def experts() -> dict[int, np.ndarray]:
            experts_by_number: dict[int, np.ndarray] = {}
            for file in files:
                with reading_state(path, file.name):
                    experts_by_number |= load_experts(read_arrays(file), shape.num_experts)
            return experts_by_number

        replay.held = on_every_rank(experts)
    pairs = zip(groups, arrays["lens"], strict=True)
    if num_anew := sum(group.first_version is None and lens.any() for group, lens in pairs):
        print_line(
            f"warning: {num_anew} groups that earlier steps have begun are generated anew: data or settings changed",
            rank_0_only=True,
        )
    return _position(run)


def _position(run: Run) -> int:
    """Return the position in the order of prompts of a run that has trained on all that it has drawn, except for as
    many as are in the pool."""
    order = prompt_order(run)
    return order.position(order.count(run.group_pool.num_drawn) - len(run.group_pool.groups))


def _draw(run: Run, count: int) -> list[Group]:
    """Return the groups of the next prompts of the run."""
    order = prompt_order(run)
    first = order.count(run.group_pool.num_drawn)
    run.group_pool.num_drawn = order.position(first + count)
    return new_groups(run, [order.position(i) for i in range(first, first + count)])


def _num_left(run: Run) -> float:
    """Return the number of prompts that the run has yet to draw; infinity if trainer.total_training_steps ends it."""
    order = prompt_order(run)
    total = order.count(run.schedule.total_prompts) if run.schedule.ends_by_epochs else math.inf
    return total - order.count(run.group_pool.num_drawn)


def _tail(run: Run) -> tuple[list[Group], Enough | None]:
    """Return the groups of a step of rollout.tail_batching: those that earlier steps have left, if there are enough for
    a step or no other prompts in the epoch, else new ones."""
    needed = run.config.data.train_batch_size
    left = list(run.group_pool.groups)
    if len(left) >= needed:
        return left[:needed], None
    order = prompt_order(run)
    per_epoch = order.count(order.epoch_length)
    # An epoch ends without groups that are left: it has a multiple of `needed`, of which each step takes that many.
    in_epoch = per_epoch - order.count(run.group_pool.num_drawn) % per_epoch
    num_new = min(prompts_in_flight(run.config), in_epoch, _num_left(run))
    if num_new < needed:
        # As many, unless a change of settings has left another number: then some of the next epoch too.
        return [*left, *_draw(run, needed - len(left))], None
    return _draw(run, int(num_new)), lambda is_complete: is_complete.sum() >= needed


def _partial(run: Run, state: StepState, needed: int) -> tuple[list[Group], Enough]:
    """Return the groups of a step of rollout.partial_rollout: those that earlier steps have left, and new ones."""
    cfg = run.config
    version = state.step - 1
    left = oldest_first(drop_stale(run.group_pool.groups, version, cfg.rollout), version)
    # The last epoch ends with its own prompts, unless too few for a step are left of them.
    num_new = max(needed - len(left), min(prompts_in_flight(cfg) - len(left), _num_left(run)), 0)
    groups = [*left, *_draw(run, int(num_new))]
    spans = np.array([group.span(version) for group in groups])
    return groups, lambda is_complete: may_end(spans, is_complete, needed, cfg.data.train_batch_size, cfg.rollout)


def _replayed(run: Run, state: StepState, row: StepGroups) -> list[Group]:
    """Return the groups of a step of the run that is replayed."""
    state.num_rollouts += 1
    left = {group.position: group for group in run.group_pool.groups}
    new = {group.position: group for group in new_groups(run, [p for p in row.positions if p not in left])}
    run.group_pool.num_drawn = max(run.group_pool.num_drawn, 1 + max(row.positions))
    return [left.get(p) or new[p] for p in row.positions]


def off_policy_metrics(batch: RaggedBatch) -> dict[str, float]:
    """Return verl's metrics of responses to which several weights have contributed, and the share of tokens by age.

    Of each response: trajectory_spans = largest - smallest age + 1; trajectory_staleness = smallest age;
    trajectory_staleness_worst = largest age."""
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
        f"training/off_policy/{name}/{kind}": float(getattr(each, kind)())
        for name, each in numbers.items()
        for kind in ("mean", "max", "min")
    }
    counts = np.bincount(ages)
    return metrics | {
        f"training/off_policy/token_share/age_{age}": count / len(ages) for age, count in enumerate(counts.tolist())
    }
