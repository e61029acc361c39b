"""The rollout of a step. With algorithm.filter_groups (dynamic sampling) it draws batches of
prompts until enough groups have responses that differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rlhf_mc.algorithms.estimators import differ, extremes
from rlhf_mc.config.algorithm_schema import GroupMetric
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.roles import prompts_per_batch
from rlhf_mc.config.schema import Config
from rlhf_mc.data.batch import Prompt, RaggedBatch, concatenate
from rlhf_mc.rewards.manager import ScoreStream
from rlhf_mc.rewards.results import Score, reward_metrics
from rlhf_mc.runtime.console import print_line
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.trainer.pool import ahead
from rlhf_mc.trainer.pool.sampling import sample_groups
from rlhf_mc.trainer.pool.strategies import off_policy_metrics
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.scores import await_rewards, record_samples
from rlhf_mc.trainer.step_state import StepState

PROGRESS_EVERY = 10
"""Batches of a step between two lines on its progress."""
BATCHES_IN_VAIN = 10
GROUPS_IN_VAIN = 1000
"""A step fails after this number of consecutive batches, and of groups, without a kept group: any
rate of usable groups that could fill a batch would have given one."""


class TooFewGroups(UserError):
    """Too few groups are kept of all batches that a step may draw, or none of many consecutive
    ones. Every rank raises it."""


@dataclass
class SampledGroups:
    """The groups that a step has sampled. Dropped groups leave only their scores."""

    n: int
    """Responses of each group."""
    metric: GroupMetric
    num_kept: int = 0
    prompts: list[Prompt] = field(default_factory=list)
    """The prompt of each response of the kept groups."""
    batches: list[RaggedBatch] = field(default_factory=list)
    """The responses of the kept groups, by batch of prompts."""
    kept_scores: list[Score] = field(default_factory=list)
    """The scores of the responses of the kept groups."""
    sources: list[str] = field(default_factory=list)
    """The data source of every response."""
    scores: list[Score] = field(default_factory=list)
    """The score of every response."""
    dropped: Counter[float] = field(default_factory=Counter)
    """Number of dropped groups by the value that their responses have in common; infinity: none of
    them is trained on."""

    def add(self, prompts: Sequence[Prompt], batch: RaggedBatch, scores: Sequence[Score]) -> None:
        """Add the groups of one batch of prompts. prompts, scores: one entry per response."""
        values = metric_values(scores, self.metric).view(-1, self.n)
        mask = None if batch.sample_mask is None else batch.sample_mask.view(-1, self.n)
        lowest, highest = extremes(values, mask)
        is_kept = lowest < highest
        if batch.decoupled_scores is not None:
            is_kept |= differ(batch.decoupled_scores.view(-1, self.n), mask)
        self.dropped.update(lowest[~is_kept].tolist())
        self.sources += [prompt.data_source for prompt in prompts]
        self.scores += scores
        chosen = is_kept.repeat_interleave(self.n).nonzero().flatten()
        if len(chosen):
            self.num_kept += int(is_kept.sum())
            self.batches.append(batch.select(chosen))
            self.prompts += [prompts[i] for i in chosen.tolist()]
            self.kept_scores += [scores[i] for i in chosen.tolist()]

    def first(self, count: int) -> tuple[list[Prompt], RaggedBatch, list[Score]]:
        """Return the first `count` kept groups: prompts, responses and scores."""
        rows = count * self.n
        return (
            self.prompts[:rows],
            concatenate(self.batches).select(range(rows)),
            self.kept_scores[:rows],
        )

    @property
    def num_drawn(self) -> int:
        """Number of groups, dropped ones included."""
        return len(self.scores) // self.n


def metric_values(scores: Sequence[Score], metric: GroupMetric) -> torch.Tensor:
    """Return algorithm.filter_groups.metric of each response: [S] float32. A response that could
    not be scored has reward.default_score in all of them."""
    values = [
        score.score
        if metric == "seq_reward"
        else score.by_functions
        if metric == "score"
        else score.accuracy
        for score in scores
    ]
    return torch.tensor(values, dtype=torch.float32)


def _progress_value(value: float) -> str:
    return "masked" if math.isinf(value) else f"{value:g}"


def rollout(
    run: Run, state: StepState, stop: StopRequests
) -> tuple[list[Prompt], RaggedBatch, ScoreStream | None]:
    """Generate the responses of the step, which the reward workers score meanwhile. Return the
    prompt of each response, the batch, and its scores to come; None where algorithm.filter_groups
    has scored the responses to choose them. Raise StopRequested if a stop is requested."""
    stream: ScoreStream | None = None
    if run.actor.replay is not None:
        run.actor.replay.stored = run.group_pool.experts(run.actor.replay.stored)
    if run.config.algorithm.filter_groups.enable:
        prompts, batch = filtered_rollout(run, state, stop)
    elif run.config.rollout.one_step_off:
        prompts, batch, stream = ahead.next_batch(run, state)
    else:
        prompts, batch, stream = sample_groups(run, state, run.config.data.train_batch_size)
    if batch.token_ages is not None:
        state.metrics |= off_policy_metrics(batch)
    state.prompts = prompts
    stop.check()
    if stream is not None and run.has_rollout_pool:
        stream.collect()  # from workers beside the engines: these ranks do not wait for updates
    return prompts, batch, stream


def filtered_rollout(
    run: Run, state: StepState, stop: StopRequests
) -> tuple[list[Prompt], RaggedBatch]:
    """Generate and score groups until data.train_batch_size of them differ. Return the prompt
    of each response, and the batch with its scores. Raise TooFewGroups if there are too few in the
    batches that a step may draw, or none in many consecutive ones, StopRequested if a stop is
    requested. All ranks have all scores, and so decide alike."""
    cfg = run.config
    wanted = cfg.data.train_batch_size
    size = prompts_per_batch(cfg.data)
    most = cfg.algorithm.filter_groups.max_num_gen_batches or len(run.train_prompts) // size
    most_in_vain = max(BATCHES_IN_VAIN * size, GROUPS_IN_VAIN)
    groups = SampledGroups(cfg.rollout.n, cfg.algorithm.filter_groups.metric)
    num_batches = 0
    in_vain = 0
    while groups.num_kept < wanted:
        if groups.num_drawn >= most * size or in_vain >= most_in_vain:
            raise TooFewGroups(
                _too_few(cfg, groups, num_batches, in_vain >= most_in_vain, state.step)
            )
        if num_batches and num_batches % PROGRESS_EVERY == 0:
            print_line(
                f"step {state.step}: {_progress(cfg, groups, num_batches)}; it draws on",
                rank_0_only=True,
            )
        if cfg.rollout.one_step_off and num_batches == 0:
            prompts, batch, stream = ahead.next_batch(run, state)
        else:
            prompts, batch, stream = sample_groups(run, state, wanted - groups.num_kept)
        num_batches += 1
        stop.check()
        batch, scores = await_rewards(run, state, prompts, batch, stream)
        stop.check()
        before = groups.num_kept
        groups.add(prompts, batch, scores)
        in_vain = 0 if groups.num_kept > before else in_vain + len(prompts) // cfg.rollout.n
    num_dropped = groups.dropped.total()
    state.metrics |= {
        **reward_metrics(groups.sources, groups.scores),
        "train/num_gen_batches": num_batches,
        "train/dropped_groups_ratio": num_dropped / groups.num_drawn,
        "train/surplus_groups_ratio": (groups.num_kept - wanted) / groups.num_drawn,
    }
    prompts, batch, scores = groups.first(wanted)
    record_samples(run, state, prompts, batch, scores)
    return prompts, batch


def _progress(cfg: Config, groups: SampledGroups, num_batches: int) -> str:
    """Return the number of usable groups so far, in words."""
    common = ", ".join(
        f"{_progress_value(value)} in {count}" for value, count in groups.dropped.most_common(2)
    )
    common += ", ..." if len(groups.dropped) > 2 else ""
    others = f" (the others have one value: {common})" if common else ""
    return (
        f"in {num_batches} batches {groups.num_kept} of {groups.num_drawn} groups have responses "
        f"that differ in {groups.metric}{others}, and data.train_batch_size is "
        f"{cfg.data.train_batch_size}"
    )


def _too_few(
    cfg: Config, groups: SampledGroups, num_batches: int, is_in_vain: bool, step: int
) -> str:
    """Return the message of TooFewGroups."""
    key = "algorithm.filter_groups.max_num_gen_batches"
    most = cfg.algorithm.filter_groups.max_num_gen_batches
    bound = (
        f"{key} is {most}: raise it, or"
        if most
        else f"{key} is 0, one pass over the training prompts:"
    )
    if is_in_vain:
        bound = "the last ones have brought none for so long that more will not help:"
    return (
        f"step {step}: {_progress(cfg, groups, num_batches)}; {bound} use prompts that the model "
        "answers partly right, a larger rollout.n or a smaller data.train_batch_size"
    )
