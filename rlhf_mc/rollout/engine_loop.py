"""The generation of responses: the loop that drives this rank's rollout engine step by step, and
shares the requests with the other engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.data.batch import Generation
from rlhf_mc.rollout.base import Arrivals, Request, RolloutEngine, Sampling, Turns
from rlhf_mc.rollout.work_sharing import Clock, SharedQueue, period_length
from rlhf_mc.runtime.work import count, working
from rlhf_mc.topology.consensus import gather_objects, gather_vectors

NO_ARRIVALS = Arrivals()
_OVERHEAD_BYTES = {True: 1 << 32, False: 1 << 24}
"""Bytes that a device (a GPU or not) reads in the time that a step takes whatever the model is,
some 1.5 ms."""


def cached_token_cost(kv_bytes: int, weight_bytes: int, pool: dist.ProcessGroup | None) -> float:
    """Return RolloutEngine.cached_token_cost of this rank's engine. kv_bytes: of one token in the
    KV cache of a rank. weight_bytes: of the rank's weights. pool: the ranks of all engines, which
    must call it; they end a period with the same step, so their costs are equal."""
    read_bytes = max(gather_objects(weight_bytes, pool)) + _OVERHEAD_BYTES[platform.use_cuda()]
    return kv_bytes / read_bytes


def generate_responses(
    engine: RolloutEngine,
    requests: Sequence[Request],
    sampling: Sampling,
    clock: Clock,
    expected_lens: Sequence[float] | None = None,
    enough: Callable[[Set[int]], bool] | None = None,
    on_ended: Callable[[Mapping[int, Generation]], None] | None = None,
    turns: Turns | None = None,
    pool: dist.ProcessGroup | None = None,
) -> dict[int, Generation]:
    """Return the responses that this rank's engine has generated, by number: every rank of the
    engine has them. Every rank with an engine must call it with the same arguments; another one
    returns at once. Request i has number i. clock: a new one. expected_lens: see SharedQueue. pool:
    the ranks of all engines, in ascending order; None: all ranks.

    enough: whether the call may end, by the numbers of the responses that have ended; true of all
    of them. The call then ends with the first period after which it is true, and other responses
    have the tokens that they have.

    on_ended: called after a step with the responses that have ended in it, by number, each on one
    rank of its engine.

    turns: where responses are conversations with an environment. A request is then the first turn
    of one. Conversations that come back begin before new ones.

    A response depends on its prompt, its seed and the weights, not on the engine that generates
    it."""
    engine_index = _own_engine(engine.groups)
    if engine_index is None:
        return {}
    ranks = engine.groups[engine_index]
    rank_in_engine = ranks.index(dist.get_rank())
    queue = SharedQueue(len(requests), expected_lens, None if turns is None else turns.affinity)
    responses: dict[int, Generation] = {}
    share: list[int] = []
    promised = 0  # requests of the share that have left the queue, and are to begin at once
    num_cached = 0  # tokens in the engine's KV cache
    with working(total=-(-len(requests) // len(engine.groups)), unit="responses") as work:
        while True:
            if queue.left or enough is not None:
                num_awaited = len(requests) if enough is not None else 0
                nums_left, rooms, step_seconds, ended = _exchange(
                    engine, clock, responses, num_awaited, len(share), pool
                )
                queue.end_period(nums_left)
                if enough is not None and enough(ended):
                    break
                share = list(queue.deal(rooms, engine.max_running)[engine_index])
                promised = rooms[engine_index]
                clock.begin_period(period_length(sampling.max_tokens), step_seconds, engine_index)
            ends_with_period = bool(queue.left) or enough is not None
            while engine.num_unfinished or share or (turns is not None and turns.num_waiting):
                is_idle = not engine.num_unfinished and not share
                arrivals = NO_ARRIVALS if turns is None else turns.receive(is_idle)
                num_added = _begin(
                    engine, requests, share, sampling, arrivals.requests, promised, turns
                )
                promised = 0
                num_sampled = 0
                over = arrivals.ended
                if engine.num_unfinished:
                    finished, num_sampled, num_cached = _step(
                        engine, requests, clock, num_added, arrivals.num_cached, num_cached
                    )
                    if turns is None:
                        over = finished
                    else:
                        turns.submit(finished)
                work.advance(len(over), tokens=num_sampled)
                responses |= over
                if on_ended is not None and over:
                    on_ended(
                        {
                            number: response
                            for number, response in over.items()
                            if number % len(ranks) == rank_in_engine
                        }
                    )
                # Other engines do not wait for one that waits for environments.
                is_over = (
                    len(engine.groups) == 1
                    or clock.period_is_over
                    or not (engine.num_unfinished or share)
                )
                if ends_with_period and is_over:
                    break
            if not ends_with_period:
                break
    responses |= engine.abort()
    if turns is not None:
        responses |= turns.abort()
    _count_sampled(requests, responses)
    if engine_index == 0:
        responses |= {number: requests[number].partial for number in queue.left}
    return responses


def _own_engine(groups: Sequence[Sequence[int]]) -> int | None:
    """Return the index of this rank's engine; None: it has none."""
    return next((index for index, ranks in enumerate(groups) if dist.get_rank() in ranks), None)


def _count_sampled(requests: Sequence[Request], responses: Mapping[int, Generation]) -> None:
    """Count the responses, and the tokens that were sampled in this call, as work of the phase."""
    num_tokens = sum(
        response.num_drawn - requests[i].partial.num_drawn for i, response in responses.items()
    )
    count(tokens=num_tokens, responses=len(responses))


def _room(engine: RolloutEngine) -> int:
    """Return how many further requests the engine can begin now."""
    # Requests that wait do so for memory, and the engine then runs no more than it does now.
    is_full = engine.num_unfinished > engine.num_running > 0
    return 0 if is_full else max(0, engine.max_running - engine.num_unfinished)


def _begin(
    engine: RolloutEngine,
    requests: Sequence[Request],
    share: list[int],
    sampling: Sampling,
    returning: Sequence[Request],
    promised: int,
    turns: Turns | None,
) -> int:
    """Add the returning requests to the engine. Then move requests from `share` to the engine: as
    many as it has room for, and at least `promised`. Return the tokens of the added prompts and
    partial responses."""
    room = max(promised, _room(engine) - len(returning)) if share else 0
    new = [requests[number] for number in share[:room]]
    del share[:room]
    added = [*returning, *(new if turns is None else turns.start(new))]
    if not added:
        return 0
    engine.add(added, sampling)
    return sum(request.num_tokens for request in added)


def _step(
    engine: RolloutEngine,
    requests: Sequence[Request],
    clock: Clock,
    num_added: int,
    num_reused: int,
    num_cached: int,
) -> tuple[Mapping[int, Generation], int, int]:
    """Run a step of the engine. Return the responses that have ended in it, by number, the tokens
    that it has sampled, and those in the engine's KV cache after it.

    num_added: tokens of the requests that the step begins; num_reused: of those, in the KV cache
    already. num_cached: tokens in the KV cache before the step."""
    finished = engine.step()
    num_sampled = engine.num_running + len(finished)
    num_cached += num_added + num_sampled
    clock.step(num_sampled, num_added - num_reused, num_cached * engine.cached_token_cost)
    num_cached -= sum(
        replace(requests[number], partial=response).num_tokens
        for number, response in finished.items()
    )
    return finished, num_sampled, num_cached


def _exchange(
    engine: RolloutEngine,
    clock: Clock,
    responses: Mapping[int, Generation],
    num_requests: int,
    num_left: int,
    pool: dist.ProcessGroup | None,
) -> tuple[list[int], list[int], list[float], set[int]]:
    """Return by engine: the requests of its share that it has not begun (num_left), the requests
    that it can begin now, and its seconds per step. Return also the requests that have ended on any
    engine. num_requests: number of requests in the call; 0: leave out the ended requests. Every
    rank of the pool must call it."""
    has_ended = np.zeros(-(-num_requests // 64) * 64, dtype=np.bool_)
    if num_requests:
        has_ended[list(responses)] = True
    numbers = np.array([num_left, _room(engine), int(clock.step_seconds * 1e9)])
    vector = torch.from_numpy(np.concatenate([numbers, np.packbits(has_ended).view(np.int64)]))
    if len(engine.groups) > 1:
        # On the CPU: on a GPU it would wait for the step that the engine has begun ahead.
        first = min(min(ranks) for ranks in engine.groups)  # of the pool
        vectors = gather_vectors(vector, pool)[[ranks[0] - first for ranks in engine.groups]]
    else:
        vectors = vector[None]
    bits = np.bitwise_or.reduce(vectors[:, 3:].numpy(), axis=0)
    ended = set(np.flatnonzero(np.unpackbits(bits.view(np.uint8))).tolist())
    nums_left, rooms, nanoseconds = vectors[:, :3].T.tolist()
    return nums_left, rooms, [duration / 1e9 for duration in nanoseconds], ended
