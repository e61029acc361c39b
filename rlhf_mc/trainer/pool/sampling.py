"""One call of the engines by a strategy, and the groups of it that a step trains on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhf_mc.config.roles import estimator_needs
from rlhf_mc.data.batch import Responses, build_batch
from rlhf_mc.rewards.manager import GroupScores, ScoreStream
from rlhf_mc.rollout.base import Sampling
from rlhf_mc.trainer.pool.generate import (
    CallPlan,
    EngineCall,
    group_batch,
    new_groups,
    repeat_prompts,
    wake_weights,
)
from rlhf_mc.trainer.pool.group_pool import Group, ScoredBatch
from rlhf_mc.trainer.pool.strategies import (
    AllGroups,
    PoolStrategy,
    Strategy,
    choose_strategy,
    next_position,
)
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.step_state import StepState


class GroupSampling:
    """The sampling of groups with the present weights. Every rank must call each method alike. All
    ranks know which responses have ended, and so decide alike."""

    def __init__(
        self, run: Run, state: StepState, strategy: Strategy, needed: int, is_ahead: bool = False
    ) -> None:
        """needed: groups that the step can use; without a pool a whole batch of prompts is sampled.
        is_ahead: the next step trains on the groups."""
        self._run = run
        self._state = state
        self._strategy = strategy
        self._trained_version = state.step - 1 + is_ahead
        """Weight version that the groups are trained on."""
        self._plan = strategy.plan(run, state, needed)
        prompts = [group.prompt for group in self._plan.groups]
        self._has_greedy = estimator_needs(run.config.algorithm).greedy_baseline
        n = run.config.rollout.n
        every_prompt = [*repeat_prompts(prompts, n), *(prompts if self._has_greedy else [])]
        self._stream = ScoreStream(run.rewards, run.tokenizer, every_prompt)
        self._scores = GroupScores(self._stream, n)
        self._most = run.config.data.max_response_length
        sampling = Sampling(run.config.rollout.temperature, self._most, run.stop_token_ids)
        self._call = EngineCall(run, self._plan, sampling, self._scores)

    def begin(self) -> None:
        """Generate this rank's share of the responses; without an engine, return at once. Responses
        that are certain to be trained on are submitted to the reward workers as they end."""
        self._call.begin()
        if self._plan.enough is None:
            self._scores.submit(self._plan.certain)
            self._stream.submit({})  # those held back for a joint call

    def end(self) -> tuple[Sequence[Group], ScoredBatch]:
        """Exchange the responses of `begin`. Return the groups that a step trains on, and their
        batch. The pool has the others."""
        run = self._run
        state = self._state
        plan = self._plan
        responses = self._call.end()
        state.num_generated += self._call.num_sampled
        n = run.config.rollout.n
        groups = list(plan.groups)
        if isinstance(self._strategy, PoolStrategy):
            sampled = self._call.collect(responses, state.step - 1)
            is_used = self._strategy.select(plan, sampled, self._most)
            groups, others = _split(sampled, is_used)
            if run.groups.rank == 0 and not isinstance(self._strategy, AllGroups):
                run.journal.record(state.step, sampled, groups)
            self._strategy.keep(run, state, sampled, others)
            state.num_prompts = next_position(run)
            self._scores.submit(is_used)
            selected = [np.repeat(is_used, n), *([is_used] if self._has_greedy else [])]
            self._stream.select(np.flatnonzero(np.concatenate(selected)).tolist())
            responses = Responses.of([response for group in groups for response in group.responses])
        self._call.send_experts()
        if not self._has_greedy:  # else `add_greedy` does
            self._stream.submit({})  # those held back for a joint call
        has_ages = plan.is_resumable or self._trained_version == state.step
        version = self._trained_version if has_ages else None
        of_agents = run.config.rollout.environment.is_agent
        return groups, (*group_batch(groups, responses, version, of_agents), self._stream)


def sample_groups(run: Run, state: StepState, needed: int) -> ScoredBatch:
    """Sample groups by the strategy of the run, with the present weights, and greedy responses if
    the advantage estimator needs them. needed: groups that the step can use. Every rank must call
    it."""
    wake_weights(run, state)
    with run.offload_schedule.phase(state.timer, "gen"):
        sampling = GroupSampling(run, state, choose_strategy(run), needed)
        sampling.begin()
        groups, batch = sampling.end()
    add_greedy(run, state, groups, batch[2])
    return batch


def _split(groups: Sequence[Group], is_used: np.ndarray) -> tuple[list[Group], list[Group]]:
    """Return the groups that the step uses, and the others."""
    pairs = list(zip(groups, is_used, strict=True))
    return [group for group, used in pairs if used], [group for group, used in pairs if not used]


def add_greedy(run: Run, state: StepState, groups: Sequence[Group], stream: ScoreStream) -> None:
    """Sample a greedy response to the prompt of each group with the present weights, which the step
    trains, if the advantage estimator needs it. groups: all that `stream` scores; its numbers
    continue after theirs. Every rank must call it."""
    if not estimator_needs(run.config.algorithm).greedy_baseline:
        return
    sampling = Sampling(0.0, run.config.data.max_response_length, run.stop_token_ids)
    prompts = [group.prompt for group in groups]
    seeds = [group.seeds[0] for group in groups]
    greedy = new_groups(prompts, [group.position for group in groups], seeds)
    scores = GroupScores(stream, 1, first=len(groups) * run.config.rollout.n)
    wake_weights(run, state)
    with run.offload_schedule.phase(state.timer, "gen"):
        call = EngineCall(run, CallPlan.of_all(greedy, is_training=False), sampling, scores)
        of_agents = run.config.rollout.environment.is_agent
        state.greedy = build_batch(prompts, call.sample(), of_agents)
    state.num_generated += call.num_sampled
    stream.submit({})  # those held back for a joint call
