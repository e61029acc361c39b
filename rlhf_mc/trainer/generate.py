"""The responses of a step or a validation: the weight update before them, seeds of the sampler, generation."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

import numpy as np
import torch

from rlhf_mc.config.roles import estimator_needs
from rlhf_mc.data.batch import NOTHING, Generation, Prompt, RaggedBatch, Responses, build_batch
from rlhf_mc.data.order import PromptOrder
from rlhf_mc.environments.conversation import ConversationState
from rlhf_mc.environments.turns import Conversations
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.rollout.base import WEIGHTS, Request, Sampling
from rlhf_mc.rollout.engine_loop import generate_responses
from rlhf_mc.rollout.work_sharing import CLOCKS, Clock
from rlhf_mc.trainer.pool.group_pool import Group
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.scores import GroupScores, ScoreStream
from rlhf_mc.trainer.step_state import StepState

TRAINING = 0
VALIDATION = 1
"""Streams of sampling seeds: validation never shares random numbers with training."""


Enough = Callable[[np.ndarray], bool]
"""A condition under which generation may end: a function of which groups are complete, [groups] bool."""


def sampling_seeds(
    seed: int, stream: int, step: int, prompts: Sequence[Prompt], n: int, drawn: Counter[int] | None = None
) -> list[int]:
    """Return one seed per response, in the order of `repeat_prompts`. A seed is a function of (seed, stream, step,
    prompt, response 0 to n - 1) alone: neither the number of ranks nor a resume changes it. A prompt that
    the step draws again (data.train_file_weights, algorithm.filter_groups) has responses n to 2n - 1.

    seed, step and the indices of prompts are below 2^32. drawn: how often the step has drawn each prompt before, by its
    index. It is brought up to date; None: never."""
    drawn = Counter() if drawn is None else drawn
    earlier = []
    for prompt in prompts:
        earlier.append(drawn[prompt.index])
        drawn[prompt.index] += 1
    entropy = np.empty((len(prompts), n, 5), dtype=np.uint32)
    entropy[..., :3] = (seed, stream, step)
    entropy[..., 3] = np.array([prompt.index for prompt in prompts])[:, None]
    entropy[..., 4] = np.arange(n) + n * np.array(earlier)[:, None]
    return [int(np.random.SeedSequence(row).generate_state(1, np.uint64)[0] >> 1) for row in entropy.reshape(-1, 5)]


def repeat_prompts(prompts: Sequence[Prompt], n: int) -> list[Prompt]:
    """Return each prompt n times, one after the other."""
    return [prompt for prompt in prompts for _ in range(n)]


def generate(
    run: Run,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    sampling: Sampling,
    stream: ScoreStream,
    first: int = 0,
    expected_lens: Sequence[float] | None = None,
    numbers: Sequence[int] = (),
) -> Responses:
    """Return one response per prompt, on every rank. stream: gets each response as soon as it has ended; the first one
    has the number `first` there. expected_lens: of the responses; the longest begin first. numbers: of the responses in
    the run, by which the actor holds the experts that were chosen for them; empty: it does not."""
    requests = [
        Request(i, prompt.token_ids, seed, NOTHING) for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    turns, requests = begin_turns(run, requests, prompts, numbers or None)

    def score(ended: Mapping[int, Generation]) -> None:
        if numbers:
            hold_experts(run, {numbers[number]: one for number, one in ended.items()})
        if turns is not None:
            stream.episodes |= {first + number: turns.episode(number) for number in ended}
        stream.submit({first + number: one.token_ids for number, one in ended.items()}, others_follow=True)

    clock = new_clock(run)
    responses = generate_responses(run.rollout, requests, sampling, clock, expected_lens, on_ended=score, turns=turns)
    if turns is not None:
        turns.finish()
    return responses


def begin_turns(
    run: Run,
    requests: list[Request],
    prompts: Sequence[Prompt],
    numbers: Sequence[int] | None = None,
    kept: Mapping[int, ConversationState] | None = None,
) -> tuple[Conversations | None, list[Request]]:
    """Return the conversations of a call of the engines, and the request of each one's first turn; without environments
    None, and the requests. prompts: of each request. numbers: of the responses in the run. Other arguments as of
    EnvironmentManager.begin."""
    if run.environments is None:
        return None, requests
    turns = run.environments.begin(requests, prompts, numbers, kept)
    return turns, turns.requests


def hold_experts(run: Run, ended: Mapping[int, Generation]) -> None:
    """Have the actor hold the experts that the engine has chosen for these responses, given by their numbers in the
    run, where it replays them. One rank of the engine calls it for a response."""
    if run.actor.replay is not None and run.actor.replay.mode == "rollout":
        run.actor.replay.held |= {number: one.experts for number, one in ended.items() if one.experts is not None}


def new_clock(run: Run) -> Clock:
    """Return the clock of one call of the engines."""
    return CLOCKS[run.config.rollout.clock]()


def update_weights(run: Run, timer: PhaseTimer) -> None:
    """Write the actor's weights into the rollout engine's parameters. Each rank receives only the blocks that it
    lacks."""
    with run.offload_schedule.phase(timer, "update_weights"):
        run.weight_sync.run(run.actor.params, run.rollout.params)
        run.rollout.weights_updated()


def wake_weights(run: Run, state: StepState) -> None:
    """Update the engine's weights where it has lost them: a reward model's pass, between two batches of a step, may let
    it sleep."""
    if WEIGHTS not in run.rollout.awake:
        update_weights(run, state.timer)


def prompt_order(run: Run) -> PromptOrder:
    """Return the order in which the run draws its prompts."""
    return PromptOrder(run.config.data, run.train_prompts.file_sizes, run.config.trainer.seed)


def new_groups(run: Run, positions: Sequence[int]) -> list[Group]:
    """Return the groups at these places of the order in which the run draws its prompts, with nothing generated. Their
    seeds are those of the step that trains on them where steps train on the prompts that they have drawn."""
    order = prompt_order(run)
    groups = []
    for (number, batch), members in itertools.groupby(positions, order.batch_at):
        prompts = run.train_prompts.at(order.indices(batch))
        n = run.config.rollout.n
        seeds = sampling_seeds(run.config.trainer.seed, TRAINING, number + 1, prompts, n)
        for position in members:
            place = position - batch.start
            group = Group(position, prompts[place], seeds[place * n : (place + 1) * n], [NOTHING] * n, [])
            groups.append(group.restarted())
    return groups


def continue_groups(
    run: Run,
    state: StepState,
    groups: Sequence[Group],
    enough: Enough | None,
    scores: GroupScores,
    is_certain: np.ndarray,
    lens: Sequence[Sequence[int]] | None = None,
) -> list[Group]:
    """Generate the responses of the groups that have not ended, with the current weights. enough: None: all groups.
    lens: the length at which each response is cut; None: none is.

    scores: gets each response that has ended. is_certain: [groups] bool: the step trains on the group if it is complete
    in the end. Its responses are submitted in the period in which it is complete; with enough None, as they end."""
    limit = run.config.data.max_response_length
    lens = [[limit] * len(group.responses) for group in groups] if lens is None else lens
    rows = [
        (number, i)
        for number, group in enumerate(groups)
        for i in np.flatnonzero(~group.has_ended(limit)).tolist()
        if lens[number][i] > len(group.responses[i].token_ids)
        or (i in group.conversations and group.conversations[i].waits)
    ]
    group_of = np.array([number for number, _ in rows], dtype=np.int64)
    num_open = np.bincount(group_of, minlength=len(groups))
    requests = [
        Request(number, groups[g].prompt.token_ids, groups[g].seeds[i], groups[g].responses[i], min(limit, lens[g][i]))
        for number, (g, i) in enumerate(rows)
    ]
    is_partial = run.config.rollout.partial_rollout
    states = (groups[g].conversations.get(i) for g, i in rows)
    kept = {number: state for number, state in enumerate(states) if state is not None} if is_partial else None
    numbers = [groups[g].number(i) for g, i in rows]
    turns, requests = begin_turns(run, requests, [groups[g].prompt for g, _ in rows], numbers, kept)
    expected = None
    if not is_partial:  # there the oldest begin first: a begun response waits for no new one
        expected = run.response_lengths.expected([groups[g].prompt.index for g, _ in rows])
    parameters = Sampling(run.config.rollout.temperature, limit, run.stop_token_ids)
    earlier = {(g, i) for g, group in enumerate(groups) for i in range(len(group.responses))}.difference(rows)
    for g, i in sorted(earlier)[run.groups.rank :: run.groups.mesh.world]:
        conversation = groups[g].conversations.get(i)
        scores.add(g, i, groups[g].responses[i].token_ids, None if conversation is None else conversation.episode)

    def is_enough(ended: Set[int]) -> bool:
        assert enough is not None
        is_complete = np.bincount(group_of[sorted(ended)], minlength=len(groups)) == num_open
        scores.submit(is_complete & is_certain)
        return enough(is_complete)

    def on_ended(ended: Mapping[int, Generation]) -> None:
        hold_experts(run, {numbers[i]: one for i, one in ended.items()})
        for number, one in ended.items():
            scores.add(*rows[number], one.token_ids, None if turns is None else turns.episode(number))
        if enough is None:
            scores.submit(is_certain)

    with run.offload_schedule.phase(state.timer, "gen"):
        ends = None if enough is None else is_enough
        drawn = generate_responses(run.rollout, requests, parameters, new_clock(run), expected, ends, on_ended, turns)
    state.num_generated += drawn.num_drawn - sum(request.begun.num_drawn for request in requests)
    responses = [list(group.responses) for group in groups]
    for (g, i), response in zip(rows, drawn.generations(), strict=True):
        responses[g][i] = response
    conversations: list[dict[int, ConversationState]] = [{} for _ in groups]
    if turns is not None:
        turns.finish()
        hold_experts(run, {numbers[i]: one for i, one in turns.waiting.items()})
        for number, one in turns.states().items():
            g, i = rows[number]
            conversations[g][i] = one
    continued = [
        group.continued(each, state.step - 1, own)
        for group, each, own in zip(groups, responses, conversations, strict=True)
    ]
    ended = [(g, i) for g, i in rows if continued[g].has_ended(limit)[i]]
    run.response_lengths.record(
        [groups[g].prompt.index for g, _ in ended], [len(responses[g][i].token_ids) for g, i in ended]
    )
    return continued


def new_stream(run: Run, prompts: list[Prompt]) -> ScoreStream:
    """Return a stream of the scores of a response to each prompt, and of the greedy ones, if the advantage estimator
    needs them, after all others. prompts: of each response, repeated for its rollout.n responses."""
    has_greedy = estimator_needs(run.config.algorithm).greedy_baseline
    greedy = prompts[:: run.config.rollout.n] if has_greedy else []
    return ScoreStream(run.rewards, run.tokenizer, [*prompts, *greedy])


def generate_batch(run: Run, state: StepState) -> tuple[list[Prompt], RaggedBatch, ScoreStream]:
    """Generate rollout.n responses to each prompt of the next batch with the current weights, and a greedy one if the
    advantage estimator needs it. Return the prompt of each response, the batch, and the scores to come."""
    cfg = run.config
    order = prompt_order(run)
    positions = order.next_batch(state.num_prompts)
    drawn = run.train_prompts.at(order.indices(positions))
    wake_weights(run, state)
    first = positions.start * cfg.rollout.n
    state.num_prompts = order.next_batch(positions.stop).start
    with run.offload_schedule.phase(state.timer, "gen"):
        seeds = sampling_seeds(cfg.trainer.seed, TRAINING, state.step, drawn, cfg.rollout.n, state.drawn)
        prompts = repeat_prompts(drawn, cfg.rollout.n)
        parameters = Sampling(cfg.rollout.temperature, cfg.data.max_response_length, run.stop_token_ids)
        rows = [prompt.index for prompt in prompts]
        expected_lens = run.response_lengths.expected(rows)
        stream = new_stream(run, prompts)
        numbers = range(first, first + len(prompts))
        generations = generate(run, prompts, seeds, parameters, stream, 0, expected_lens, numbers)
        run.response_lengths.record(rows, generations.lens.tolist())
        state.num_generated += generations.num_drawn
        if estimator_needs(cfg.algorithm).greedy_baseline:
            greedy_seeds = seeds[:: cfg.rollout.n]
            greedy = generate(run, drawn, greedy_seeds, replace(parameters, temperature=0.0), stream, len(prompts))
            state.greedy = build_batch(drawn, greedy)
            state.num_generated += greedy.num_drawn
    stream.submit({})  # those that waited for all
    return prompts, build_batch(prompts, generations).with_fields(numbers=torch.tensor(numbers)), stream
