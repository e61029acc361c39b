"""The rollout of a step. With algorithm.filter_groups (dynamic sampling) it draws batches of prompts until enough
groups have responses that differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rlhf_mc.config.algorithm_schema import GroupMetric
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.roles import has_pool, prompts_per_batch
from rlhf_mc.config.schema import Config
from rlhf_mc.data.batch import Prompt, RaggedBatch, concatenate
from rlhf_mc.rewards.results import Score, reward_metrics
from rlhf_mc.runtime.console import print_line
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.trainer.generate import generate_batch
from rlhf_mc.trainer.pool.pooled_rollout import off_policy_metrics, pooled_rollout
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.scores import ScoreStream, await_rewards, record_samples
from rlhf_mc.trainer.step_state import StepState

PROGRESS_EVERY = 10
"""Batches of a step between two lines on its progress."""
BATCHES_IN_VAIN = 10
GROUPS_IN_VAIN = 1000
"""A step ends in error after as many consecutive batches and groups of which none is kept: a rate of usable groups that
could fill a batch would have brought one."""


class TooFewGroups(UserError):
    """Too few groups are kept of all batches that a step may draw, or none of many consecutive ones. Every rank raises
    it."""


@dataclass
class SampledGroups:
    """The groups that a step has drawn. Of dropped groups only the scores are kept."""

    n: int
    """Responses of each group."""
    metric: GroupMetric
    num_kept: int = 0
    prompts: list[Prompt] = field(default_factory=list)
    """The prompt of each response of the groups that are kept."""
    batches: list[RaggedBatch] = field(default_factory=list)
    """The responses of the groups that are kept, by batch of prompts."""
    kept_scores: list[Score] = field(default_factory=list)
    """Of the same responses."""
    sources: list[str] = field(default_factory=list)
    """The data source of every response."""
    scores: list[Score] = field(default_factory=list)
    """Of every response."""
    dropped: Counter[float] = field(default_factory=Counter)
    """Number of dropped groups by the value that their responses have in common."""

    def add(self, prompts: Sequence[Prompt], batch: RaggedBatch, scores: Sequence[Score]) -> None:
        """Add the groups of one batch of prompts. prompts, scores: one entry per response."""
        values = metric_values(scores, self.metric).view(-1, self.n)
        is_kept = differ(values)
        self.dropped.update(values[~is_kept, 0].tolist())
        self.sources += [prompt.data_source for prompt in prompts]
        self.scores += scores
        chosen = is_kept.repeat_interleave(self.n).nonzero().flatten()
        if len(chosen):
            self.num_kept += int(is_kept.sum())
            self.batches.append(batch.select(chosen))
            self.prompts += [prompts[i] for i in chosen.tolist()]
            self.kept_scores += [scores[i] for i in chosen.tolist()]

    def first(self, count: int) -> tuple[list[Prompt], RaggedBatch, list[Score]]:
        """Return the first `count` groups that are kept: prompts, responses and scores."""
        rows = count * self.n
        return self.prompts[:rows], concatenate(self.batches).select(range(rows)), self.kept_scores[:rows]

    @property
    def num_drawn(self) -> int:
        """Number of groups, dropped ones included."""
        return len(self.scores) // self.n


def metric_values(scores: Sequence[Score], metric: GroupMetric) -> torch.Tensor:
    """Return algorithm.filter_groups.metric of each response: [S] float32. A response that could not be scored has
    reward.default_score in all of them."""
    values = [
        score.score if metric == "seq_reward" else score.by_functions if metric == "score" else score.accuracy
        for score in scores
    ]
    return torch.tensor(values, dtype=torch.float32)


def differ(values: torch.Tensor) -> torch.Tensor:
    """Return whether the responses of a group differ: [G] bool. values: [G, n].

    verl asks for a standard deviation above 0, which rounding gives to three responses of 0.1."""
    return (values != values[:, :1]).any(dim=1)


def rollout(run: Run, state: StepState, stop: StopRequests) -> tuple[list[Prompt], RaggedBatch, ScoreStream | None]:
    """Generate the responses of the step, which the reward workers score meanwhile. Return the prompt of each response,
    the batch, and its scores to come; None where algorithm.filter_groups has scored the responses to choose them. Raise
    StopRequested if a stop is requested."""
    stream: ScoreStream | None = None
    if run.actor.replay is not None:
        run.actor.replay.held = run.group_pool.experts(run.actor.replay.held)
    if run.config.algorithm.filter_groups.enable:
        prompts, batch = filtered_rollout(run, state, stop)
    else:
        prompts, batch, stream = next_groups(run, state, run.config.data.train_batch_size)
    if batch.token_ages is not None:
        state.metrics |= off_policy_metrics(batch)
    stop.check()
    return prompts, batch, stream


def next_groups(run: Run, state: StepState, count: int) -> tuple[list[Prompt], RaggedBatch, ScoreStream]:
    """Generate the groups of the next batch of prompts, or the `count` groups that end first of those that
    rollout.tail_batching or partial_rollout generate at once."""
    if has_pool(run.config.rollout):
        return pooled_rollout(run, state, count)
    if run.group_pool.groups:
        # The run had a pool before a resume: no prompt of it is lost or trained on twice.
        return pooled_rollout(run, state, run.config.data.train_batch_size)
    run.group_pool.num_drawn = 0  # from here on state.num_prompts counts
    return generate_batch(run, state)


def filtered_rollout(run: Run, state: StepState, stop: StopRequests) -> tuple[list[Prompt], RaggedBatch]:
    """Generate and score groups until data.train_batch_size of them differ. Return the prompt
    of each response, and the batch with its scores. Raise TooFewGroups if there are too few in the batches that a step
    may draw, or none in many consecutive ones, StopRequested if a stop is requested. All ranks have all scores, and so
    decide alike."""
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
            raise TooFewGroups(_too_few(cfg, groups, num_batches, in_vain >= most_in_vain, state.step))
        if num_batches and num_batches % PROGRESS_EVERY == 0:
            print_line(f"step {state.step}: {_progress(cfg, groups, num_batches)}; it draws on", rank_0_only=True)
        prompts, batch, stream = next_groups(run, state, wanted - groups.num_kept)
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
    common = ", ".join(f"{value:g} in {count}" for value, count in groups.dropped.most_common(2))
    common += ", ..." if len(groups.dropped) > 2 else ""
    others = f" (the others have one value: {common})" if common else ""
    return (
        f"in {num_batches} batches {groups.num_kept} of {groups.num_drawn} groups have responses that differ in"
        f" {groups.metric}{others}, and data.train_batch_size is {cfg.data.train_batch_size}"
    )


def _too_few(cfg: Config, groups: SampledGroups, num_batches: int, is_in_vain: bool, step: int) -> str:
    """Return the message of TooFewGroups."""
    key = "algorithm.filter_groups.max_num_gen_batches"
    most = cfg.algorithm.filter_groups.max_num_gen_batches
    bound = f"{key} is {most}: raise it, or" if most else f"{key} is 0, one pass over the training prompts:"
    if is_in_vain:
        bound = "the last ones have brought none for so long that more will not help:"
    return (
        f"step {step}: {_progress(cfg, groups, num_batches)}; {bound} use prompts that the model answers partly right,"
        " a larger rollout.n or a smaller data.train_batch_size"
    )
