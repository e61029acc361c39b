"""One call of the engines: what it samples, which responses are scored as they end, and how they
are collected. And what precedes it: the weight update, and the seeds of the sampler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from rlhf_mc.architectures.run_shapes import router_replay
from rlhf_mc.data.batch import (
    NOTHING,
    Generation,
    Prompt,
    RaggedBatch,
    Responses,
    build_batch,
)
from rlhf_mc.data.order import PromptOrder
from rlhf_mc.data.responses import exchange_responses
from rlhf_mc.environments.conversation import ConversationState
from rlhf_mc.environments.turns import Conversations
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.rewards.manager import GroupScores
from rlhf_mc.rollout.base import WEIGHTS, Request, Sampling
from rlhf_mc.rollout.engine_loop import generate_responses
from rlhf_mc.rollout.work_sharing import CLOCKS
from rlhf_mc.runtime.heartbeat import await_all_ranks
from rlhf_mc.topology.consensus import send_objects
from rlhf_mc.trainer.pool.group_pool import Group
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.step_state import StepState

TRAINING = 0
VALIDATION = 1
"""Streams of sampling seeds: validation never shares random numbers with training."""


def sampling_seeds(
    seed: int,
    stream: int,
    step: int,
    prompts: Sequence[Prompt],
    n: int,
    draws: Counter[int] | None = None,
) -> list[int]:
    """Return one seed per response, in the order of `repeat_prompts`. A seed is a function of
    (seed, stream, step, prompt, response 0 to n - 1) alone: neither the number of ranks nor a
    resume changes it. A prompt that the step draws again (data.train_file_weights,
    algorithm.filter_groups) has responses n to 2n - 1.

    seed, step and the indices of prompts are below 2^32. draws: draws of each prompt earlier in the
    step, by its index; updated in place. None: none."""
    draws = Counter() if draws is None else draws
    earlier = []
    for prompt in prompts:
        earlier.append(draws[prompt.index])
        draws[prompt.index] += 1
    entropy = np.empty((len(prompts), n, 5), dtype=np.uint32)
    entropy[..., :3] = (seed, stream, step)
    entropy[..., 3] = np.array([prompt.index for prompt in prompts])[:, None]
    entropy[..., 4] = np.arange(n) + n * np.array(earlier)[:, None]
    return [
        int(np.random.SeedSequence(row).generate_state(1, np.uint64)[0] >> 1)
        for row in entropy.reshape(-1, 5)
    ]


def repeat_prompts(prompts: Sequence[Prompt], n: int) -> list[Prompt]:
    """Return each prompt n times, one after the other."""
    return [prompt for prompt in prompts for _ in range(n)]


def update_weights(run: Run, timer: PhaseTimer) -> None:
    """Write the actor's weights into the rollout engine's parameters. Each rank receives only the
    blocks that it lacks."""
    with run.offload_schedule.phase(timer, "update_weights"):
        run.weight_sync.run(run.actor.rollout_params, run.rollout.params)
        run.rollout.weights_updated()


def wake_weights(run: Run, state: StepState) -> None:
    """Update the engine's weights where it has lost them: a reward model's pass, between two
    batches of a step, may let it sleep."""
    if WEIGHTS not in run.rollout.awake:
        update_weights(run, state.timer)


def prompt_order(run: Run) -> PromptOrder:
    """Return the order in which the run draws its prompts."""
    return PromptOrder(run.config.data, run.train_prompts.file_sizes, run.config.trainer.seed)


def new_groups(
    prompts: Sequence[Prompt], positions: Sequence[int], seeds: Sequence[int]
) -> list[Group]:
    """Return a group without tokens for each prompt. positions: in the order in which the run draws
    its prompts. seeds: of the responses, in the order of `repeat_prompts`."""
    n = len(seeds) // max(len(prompts), 1)
    return [
        Group(position, prompt, seeds[i * n : (i + 1) * n], [NOTHING] * n, []).restarted()
        for i, (position, prompt) in enumerate(zip(positions, prompts, strict=True))
    ]


def group_batch(
    groups: Sequence[Group], responses: Responses, version: int | None, of_agents: bool
) -> tuple[list[Prompt], RaggedBatch]:
    """Return the prompt of each response, and the batch with the numbers of the responses in the
    run. responses: of the groups, in their order. version: of the present weights, for the ages of
    the tokens; None: the groups do not have the versions of theirs. of_agents: as build_batch."""
    n = len(groups[0].seeds)
    prompts = repeat_prompts([group.prompt for group in groups], n)
    numbers = torch.tensor([group.response_id(i) for group in groups for i in range(n)])
    batch = build_batch(prompts, responses, of_agents).with_fields(numbers=numbers)
    if version is None:
        return prompts, batch
    versions = np.concatenate([of_tokens for group in groups for of_tokens in group.versions])
    ages = torch.from_numpy(version - versions[responses.is_sampled])
    return prompts, batch.with_fields(token_ages=ages)


Enough = Callable[[np.ndarray], bool]
"""Condition under which a call may end, of the groups that are complete: [groups] bool."""


@dataclass(frozen=True, eq=False)
class CallPlan:
    """The groups that one call of the engines samples, and its end."""

    groups: Sequence[Group]
    needed: int
    """Groups that the step uses: the first ones that are complete."""
    certain: np.ndarray
    """[groups] bool: the step uses the group if it is complete in the end, so its responses may be
    scored at once."""
    enough: Enough | None = None
    """None: the call ends when all responses have ended."""
    max_lens: Sequence[Sequence[int]] | None = None
    """Length at which each response of each group is cut, of a run that is replayed."""
    is_resumable: bool = False
    """A later step continues the responses that have not ended."""
    is_training: bool = True
    """The responses are trained on: their experts are replayed, and their lengths remembered."""

    @staticmethod
    def of_all(groups: Sequence[Group], is_training: bool = True) -> CallPlan:
        """Return the plan of a call that samples all responses and uses all groups."""
        certain = np.ones(len(groups), dtype=bool)
        return CallPlan(groups, len(groups), certain, is_training=is_training)


class ResponseId(NamedTuple):
    """Id of a response in a call."""

    group: int
    """Index of its group in the plan."""
    response: int
    """Index in the group."""


class EngineCall:
    """One call of the engines. Every rank must make it alike."""

    def __init__(self, run: Run, plan: CallPlan, sampling: Sampling, scores: GroupScores) -> None:
        """scores: gets each response once it has ended and its group is certain to be used."""
        self._run = run
        self._plan = plan
        self._sampling = sampling
        self._scores = scores
        self._ids = [ResponseId(*pair) for pair in self._unfinished()]
        """By the number of the request."""
        groups = plan.groups
        self._group_of = np.array([g for g, _ in self._ids], dtype=np.int64)
        self._num_unfinished = np.bincount(self._group_of, minlength=len(groups))
        self._run_ids = [groups[g].response_id(i) for g, i in self._ids]
        """The number of each response in the run."""
        self._prompts = [groups[g].prompt for g, _ in self._ids]
        self._turns: Conversations | None = None
        self._num_drawn_before = 0
        """Tokens that the model had drawn of these responses before the call."""
        self._own: Mapping[int, Generation] = {}
        """The responses of this rank's engine, by number of the request."""
        self.num_sampled = 0
        """Tokens that the model has sampled in the call."""
        self._experts: dict[int, np.ndarray] = {}
        """On a rank of a rollout pool, the experts that its engine has chosen, by run id."""

    def sample(self) -> Responses:
        """Sample with the present weights. Return the responses that had not ended, in the order of
        the groups; of a plan of new groups these are all."""
        self.begin()
        return self.end()

    def begin(self) -> None:
        """Generate this rank's share of the responses; without an engine, return at once."""
        run = self._run
        plan = self._plan
        requests = self._requests()
        self._num_drawn_before = sum(request.partial.num_drawn for request in requests)
        self._add_ended_before()
        expected = None
        if plan.is_training and not plan.is_resumable:  # there the oldest responses begin first
            expected = run.response_lengths.expected([prompt.index for prompt in self._prompts])
        self._own = generate_responses(
            run.rollout,
            requests,
            self._sampling,
            CLOCKS[run.config.rollout.clock](),
            expected,
            None if plan.enough is None else self._is_enough,
            self._on_ended,
            self._turns,
            run.rollout_pool,
        )

    def end(self) -> Responses:
        """Exchange the responses of `begin`. Return those of `sample`."""
        run = self._run
        plan = self._plan
        if run.has_rollout_pool:
            await_all_ranks()
        responses = exchange_responses(self._own, run.rollout.groups, len(self._ids))
        if self._turns is not None:
            self._turns.finish()
        self.num_sampled = responses.num_drawn - self._num_drawn_before
        if plan.is_training:
            rows = [prompt.index for prompt in self._prompts]
            has_ended = responses.finished | (responses.lens >= self._sampling.max_tokens)
            ended = np.flatnonzero(has_ended).tolist()
            run.response_lengths.record(
                [rows[i] for i in ended], responses.lens[has_ended].tolist()
            )
        return responses

    def collect(self, responses: Responses, version: int) -> list[Group]:
        """Return the groups with the responses of `sample`. version: of the weights. Every rank
        must call it."""
        groups = self._plan.groups
        new = [list(group.responses) for group in groups]
        for (g, i), response in zip(self._ids, responses.generations(), strict=True):
            new[g][i] = response
        conversations: list[dict[int, ConversationState]] = [{} for _ in groups]
        if self._turns is not None:
            self._store_experts(self._turns.unanswered)
            for number, conversation in self._turns.states().items():
                g, i = self._ids[number]
                conversations[g][i] = conversation
        return [
            group.continued(updated, version, states)
            for group, updated, states in zip(groups, new, conversations, strict=True)
        ]

    def send_experts(self) -> None:
        """Have the ranks that train store the experts that the engines of a rollout pool have
        chosen, each of some responses. Every rank must call it, after `end` and `collect`."""
        run = self._run
        if not run.has_rollout_pool or router_replay(run.config, run.actor.shape) != "rollout":
            return
        parts: list[dict[int, np.ndarray]] = [{} for _ in range(dist.get_world_size())]
        for number, experts in self._experts.items():
            parts[number % run.groups.mesh.world][number] = experts
        for received in send_objects(parts, run.exchange):
            if run.actor.replay is not None:
                run.actor.replay.stored |= received

    def _unfinished(self) -> list[tuple[int, int]]:
        """Return group and index of the responses that this call continues."""
        plan = self._plan
        return [
            (g, int(i))
            for g, group in enumerate(plan.groups)
            for i in np.flatnonzero(~group.has_ended(self._sampling.max_tokens))
            if plan.max_lens is None
            or plan.max_lens[g][i] > len(group.responses[i].token_ids)
            or (i in group.conversations and group.conversations[i].waits)
        ]

    def _requests(self) -> list[Request]:
        """Return the request of each response; for a conversation, the request of its first
        turn."""
        groups = self._plan.groups
        lens = self._plan.max_lens
        limit = self._sampling.max_tokens
        requests = [
            Request(
                number,
                groups[g].prompt.token_ids,
                groups[g].seeds[i],
                groups[g].responses[i],
                None if lens is None else min(limit, lens[g][i]),
            )
            for number, (g, i) in enumerate(self._ids)
        ]
        if self._run.environments is None:
            return requests
        states = (groups[g].conversations.get(i) for g, i in self._ids)
        stored = {number: state for number, state in enumerate(states) if state is not None}
        self._turns = Conversations(
            self._run.environments,
            requests,
            self._prompts,
            self._run_ids if self._plan.is_training else None,
            stored if self._plan.is_resumable else None,
            self._sampling,
        )
        return self._turns.requests

    def _add_ended_before(self) -> None:
        """Add this rank's share of the responses that earlier calls have ended to the scores."""
        groups = self._plan.groups
        all_ids = {(g, i) for g, group in enumerate(groups) for i in range(len(group.responses))}
        ended = sorted(all_ids.difference(self._ids))
        if not ended or self._run.groups.rank not in (ranks := self._run.rollout_ranks):
            return
        for g, i in ended[ranks.index(self._run.groups.rank) :: len(ranks)]:
            conversation = groups[g].conversations.get(i)
            episode = None if conversation is None else conversation.episode
            self._scores.add(g, i, groups[g].responses[i].token_ids, episode)

    def _is_enough(self, ended: Set[int]) -> bool:
        """Return whether the call may end, by the requests that have ended on any engine."""
        counts = np.bincount(self._group_of[sorted(ended)], minlength=len(self._plan.groups))
        is_complete = counts == self._num_unfinished
        self._scores.submit(is_complete & self._plan.certain)
        assert self._plan.enough is not None
        return self._plan.enough(is_complete)

    def _on_ended(self, ended: Mapping[int, Generation]) -> None:
        """Take responses that have ended on this rank's engine, by the numbers of the requests."""
        self._store_experts(ended)
        for number, response in ended.items():
            episode = None if self._turns is None else self._turns.episode(number)
            self._scores.add(*self._ids[number], response.token_ids, episode)
        if self._plan.enough is None:
            self._scores.submit(self._plan.certain)

    def _store_experts(self, responses: Mapping[int, Generation]) -> None:
        """Have the actor store the experts that the engine has chosen for these responses; on a
        rank without the actor, hold them for `send_experts`. One rank of the engine calls it for a
        response."""
        replay = self._run.actor.replay
        if self._plan.is_training and (replay is None or replay.mode == "rollout"):
            stored = self._experts if replay is None else replay.stored
            stored |= {
                self._run_ids[number]: response.experts
                for number, response in responses.items()
                if response.experts is not None
            }
