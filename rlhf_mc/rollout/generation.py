"""The generation of responses: the loop that drives this rank's rollout engine step by step, and shares the requests
with the other engines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.data.batch import Generation, Responses
from rlhf_mc.data.responses import exchange_responses
from rlhf_mc.observability.phase_work import count
from rlhf_mc.rollout.base import Request, RolloutEngine, Sampling
from rlhf_mc.rollout.work_sharing import SharedQueue, VirtualClock, room_for
from rlhf_mc.runtime.work import working
from rlhf_mc.topology.consensus import gather_vectors


def generate_responses(
    engine: RolloutEngine,
    prompts: Sequence[np.ndarray],
    seeds: Sequence[int],
    sampling: Sampling,
    expected_lens: Sequence[float] | None = None,
) -> Responses:
    """Return one response per prompt ([tokens] int32), for all prompts, on every rank. Every rank must call it with the
    same arguments. expected_lens: see SharedQueue.

    A response depends on its prompt, its seed and the weights, not on the engine that generates it. Raise UserError if
    the ranks of one engine have drawn different tokens."""
    requests = [Request(*fields) for fields in zip(range(len(prompts)), prompts, seeds, strict=True)]
    own = next(number for number, ranks in enumerate(engine.groups) if dist.get_rank() in ranks)
    queue = SharedQueue(len(requests), expected_lens)
    clock = VirtualClock()
    responses: dict[int, Generation] = {}
    with working(total=-(-len(requests) // len(engine.groups)), unit="responses") as work:
        while queue or engine.num_unfinished:
            if queue:
                taken = [requests[number] for number in queue.take(_rooms(engine))[own]]
                engine.add(taken, sampling)
                clock.begin_period(sum(len(request.prompt) for request in taken))
            while engine.num_unfinished and not (queue and clock.period_is_over):
                finished = engine.step()
                clock.step(engine.num_running + len(finished))
                work.advance(len(finished), tokens=engine.num_running + len(finished))
                responses |= finished
    count(tokens=sum(len(response.token_ids) for response in responses.values()), responses=len(responses))
    return exchange_responses(responses, engine.groups, len(prompts))


def _rooms(engine: RolloutEngine) -> list[int]:
    """Return how many requests each engine has room for. Every rank must call it."""
    # Requests that wait do so for memory, and the engine then runs no more than it does now.
    is_full = engine.num_unfinished > engine.num_running > 0
    room = room_for(engine.num_running if is_full else engine.max_running, engine.num_unfinished)
    if len(engine.groups) == 1:
        return [room]
    rooms = gather_vectors(torch.tensor([room], device=platform.device()))[:, 0].tolist()
    return [rooms[ranks[0]] for ranks in engine.groups]
