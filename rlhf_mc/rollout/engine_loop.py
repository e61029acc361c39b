"""The generation of responses: the loop that drives this rank's rollout engine step by step, and
shares the requests with the other engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.data.batch import Generation
from rlhf_mc.rollout.base import Arrivals, Request, RolloutEngine, Sampling, Turns
from rlhf_mc.rollout.work_sharing import Clock, SharedQueue, period_length
from rlhf_mc.runtime.work import count, working
from rlhf_mc.topology.consensus import gather_objects, gather_vectors

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
    rank = dist.get_rank()
    engine_index = next((i for i, ranks in enumerate(engine.groups) if rank in ranks), None)
    if engine_index is None:
        return {}
    ranks = engine.groups[engine_index]
    queue = SharedQueue(len(requests), expected_lens, None if turns is None else turns.affinity)
    call = _Call(engine, requests, sampling, clock, turns, pool)
    with working(total=-(-len(requests) // len(engine.groups)), unit="responses") as work:
        while True:
            if queue.left or enough is not None:
                nums_left, rooms, step_seconds, ended = call.exchange(enough is not None)
                queue.end_period(nums_left)
                if enough is not None and enough(ended):
                    break
                call.share = list(queue.deal(rooms, engine.max_running)[engine_index])
                call.promised = rooms[engine_index]
                clock.begin_period(period_length(sampling.max_tokens), step_seconds, engine_index)
            ends_with_period = bool(queue.left) or enough is not None
            while engine.num_unfinished or call.share or (turns is not None and turns.num_waiting):
                over, num_sampled = call.step()
                work.advance(len(over), tokens=num_sampled)
                if on_ended is not None and over:
                    place = ranks.index(rank)
                    on_ended({i: over[i] for i in over if i % len(ranks) == place})
                # Other engines do not wait for one that waits for environments.
                is_over = (
                    len(engine.groups) == 1
                    or clock.period_is_over
                    or not (engine.num_unfinished or call.share)
                )
                if ends_with_period and is_over:
                    break
            if not ends_with_period:
                break
    responses = call.responses | engine.abort()
    if turns is not None:
        responses |= turns.abort()
    num_tokens = sum(
        response.num_drawn - requests[i].partial.num_drawn for i, response in responses.items()
    )
    count(tokens=num_tokens, responses=len(responses))
    if engine_index == 0:
        responses |= {number: requests[number].partial for number in queue.left}
    return responses


def _room(engine: RolloutEngine) -> int:
    """Return how many further requests the engine can begin now."""
    # Requests that wait do so for memory, and the engine then runs no more than it does now.
    is_full = engine.num_unfinished > engine.num_running > 0
    return 0 if is_full else max(0, engine.max_running - engine.num_unfinished)


@dataclass
class _Call:
    """A call of generate_responses on a rank with an engine: its arguments, and its state."""

    engine: RolloutEngine
    requests: Sequence[Request]
    sampling: Sampling
    clock: Clock
    turns: Turns | None
    pool: dist.ProcessGroup | None
    responses: dict[int, Generation] = field(default_factory=dict)
    """Responses that have ended, by number."""
    share: list[int] = field(default_factory=list)
    """Requests of this engine's share that it has not begun."""
    promised: int = 0
    """Requests of the share that have left the queue: the next step begins them."""
    num_cached: int = 0
    """Tokens in the engine's KV cache."""

    def step(self) -> tuple[Mapping[int, Generation], int]:
        """Add what environments have answered and requests of the share to the engine, and run a
        step of it. Return the responses that have ended, by number, and the number of sampled
        tokens."""
        engine = self.engine
        is_idle = not engine.num_unfinished and not self.share
        arrivals = Arrivals() if self.turns is None else self.turns.receive(is_idle)
        num_added = self.begin(arrivals.requests)
        stopped: dict[int, Generation] = {}
        num_sampled = 0
        if engine.num_unfinished:
            stopped = engine.step()
            num_sampled = engine.num_running + len(stopped)
            self.num_cached += num_added + num_sampled
            cache_cost = self.num_cached * engine.cached_token_cost
            self.clock.step(num_sampled, num_added - arrivals.num_cached, cache_cost)
            self.num_cached -= sum(
                replace(self.requests[number], partial=response).num_tokens
                for number, response in stopped.items()
            )
        if self.turns is not None:
            self.turns.submit(stopped)
        over = stopped if self.turns is None else arrivals.ended
        self.responses |= over
        return over, num_sampled

    def begin(self, returning: Sequence[Request]) -> int:
        """Add the returning requests to the engine. Then move requests from the share to the
        engine: as many as it has room for, and at least the promised ones. Return the tokens of
        the added prompts and partial responses."""
        room = max(self.promised, _room(self.engine) - len(returning)) if self.share else 0
        self.promised = 0
        new = [self.requests[number] for number in self.share[:room]]
        del self.share[:room]
        added = [*returning, *(new if self.turns is None else self.turns.start(new))]
        if added:
            self.engine.add(added, self.sampling)
        return sum(request.num_tokens for request in added)

    def exchange(self, exchanges_ended: bool) -> tuple[list[int], list[int], list[float], set[int]]:
        """Return by engine: the requests of its share that it has not begun, the requests that it
        can begin now, and its seconds per step. Return also the requests that have ended on any
        engine, if `exchanges_ended`. Every rank of the pool must call it."""
        num_requests = len(self.requests) if exchanges_ended else 0
        has_ended = np.zeros(-(-num_requests // 64) * 64, dtype=np.bool_)
        if exchanges_ended:
            has_ended[list(self.responses)] = True
        nanoseconds = int(self.clock.step_seconds * 1e9)
        numbers = np.array([len(self.share), _room(self.engine), nanoseconds])
        vector = torch.from_numpy(np.concatenate([numbers, np.packbits(has_ended).view(np.int64)]))
        vectors = vector[None]
        groups = self.engine.groups
        if len(groups) > 1:
            # On the CPU: on a GPU it would wait for the step that the engine has begun ahead.
            first = min(min(ranks) for ranks in groups)  # of the pool
            vectors = gather_vectors(vector, self.pool)[[ranks[0] - first for ranks in groups]]
        bits = np.bitwise_or.reduce(vectors[:, 3:].numpy(), axis=0)
        ended = set(np.flatnonzero(np.unpackbits(bits.view(np.uint8))).tolist())
        nums_left, rooms, durations = vectors[:, :3].T.tolist()
        return nums_left, rooms, [duration / 1e9 for duration in durations], ended
