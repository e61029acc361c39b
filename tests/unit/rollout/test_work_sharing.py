"""Which engine takes which request (rollout/work_sharing.py): engines without processes, whose
steps are counted."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_mc.data.batch import NOTHING
from rlhf_mc.rollout.base import Request, Sampling
from rlhf_mc.rollout.engine_loop import _Call, _room
from rlhf_mc.rollout.work_sharing import ResponseLengths, SharedQueue, VirtualClock, period_length

PLACES = 8


def _generate(
    lens: list[int], engines: int, expected_lens: list[float] | None = None, num_more: int = PLACES
) -> tuple[list[list[int]], float, int]:
    """Generate responses of these lengths on engines with PLACES places each. Return the requests
    of each engine, in the order in which it began them; the idle share: 1 - steps of all engines /
    (engines x steps of the slowest); and the steps of all engines with a free place, and their
    periods without any request, while requests are queued."""
    queue = SharedQueue(len(lens), expected_lens)
    clocks = [VirtualClock() for _ in range(engines)]
    left: list[dict[int, int]] = [{} for _ in range(engines)]  # tokens to draw, by request
    begun: list[list[int]] = [[] for _ in range(engines)]
    shares: list[list[int]] = [[] for _ in range(engines)]
    steps = [0] * engines
    free_steps = 0
    while queue.left or any(left):
        if queue.left:
            queue.end_period([len(share) for share in shares])
            shares = [
                list(share)
                for share in queue.deal([PLACES - len(requests) for requests in left], num_more)
            ]
            for clock in clocks:
                clock.begin_period(16.0, [], 0)
        for engine, (requests, share, clock) in enumerate(zip(left, shares, clocks, strict=True)):
            while requests or share:
                taken = share[: PLACES - len(requests)]
                del share[: len(taken)]
                begun[engine] += taken
                requests |= {number: lens[number] for number in taken}
                steps[engine] += 1
                free_steps += bool(queue.left) and len(requests) < PLACES
                clock.step(len(requests), 0, 0.0)
                for number in list(requests):
                    requests[number] -= 1
                    if requests[number] == 0:
                        del requests[number]
                if queue.left and clock.period_is_over:
                    break
            free_steps += bool(queue.left) and not clock.period_is_over
    return begun, 1 - sum(steps) / (engines * max(1, *steps)), free_steps


def _lens(count: int) -> list[int]:
    """Return lengths of which 1 in 16 is at the limit of 512."""
    rng = random.Random(3)
    return [512 if number % 16 == 0 else rng.randrange(10, 80) for number in range(count)]


@pytest.mark.parametrize("engines", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 3, 64, 200])
def test_every_request_is_begun_once(engines: int, count: int) -> None:
    shares, _, _ = _generate(_lens(count), engines)
    assert sorted(number for share in shares for number in share) == list(range(count))


def test_two_calls_assign_alike() -> None:
    assert _generate(_lens(200), 4) == _generate(_lens(200), 4)


def test_an_engine_with_long_responses_begins_fewer() -> None:
    """Check the case in which every long response is among the first requests of engine 0."""
    lens = [512 if number % 2 == 0 and number < 2 * PLACES else 16 for number in range(200)]
    shares, idle, _ = _generate(lens, 2)
    assert len(shares[0]) < 40 and len(shares[1]) > 150
    static = [sum(lens[engine::2]) for engine in range(2)]
    assert idle < 0.25 < 0.35 < 1 - sum(static) / (2 * max(static))


@pytest.mark.parametrize("engines", [2, 4])
def test_equal_responses_leave_no_place_free(engines: int) -> None:
    """Check responses whose end is not the end of a period."""
    lens = [40] * (engines * PLACES * 4)
    shares, idle, free_steps = _generate(lens, engines)
    assert idle == 0 and free_steps == 0
    assert {len(share) for share in shares} == {PLACES * 4}
    assert _generate(lens, engines, num_more=0)[2] > 0, "without requests ahead"


def test_the_longest_begin_first() -> None:
    lens = _lens(256)
    shares, idle, _ = _generate(lens, 4, [float(length) for length in lens])
    for share in shares:
        firsts = [lens[number] for number in share[:PLACES]]
        assert firsts == sorted(firsts, reverse=True)
        assert max(lens[number] for number in share[-PLACES:]) < 80, "the last ones are short"
    assert idle < 0.03 < 0.1 < _generate(lens, 4)[1]


def test_requests_go_where_there_is_most_room() -> None:
    queue = SharedQueue(6)
    assert queue.deal([1, 3, 0], 0) == [[2], [0, 1, 3], []]
    assert queue.left == [4, 5]
    assert queue.deal([0, 0, 0], 0) == [[], [], []]
    assert queue.deal([5, 5, 5], 0) == [[4], [5], []]
    assert not queue.left


def test_what_an_engine_has_not_begun_is_dealt_again() -> None:
    queue = SharedQueue(8)
    assert queue.deal([1, 2], 2) == [[1, 3, 5], [0, 2, 4, 6]]
    assert queue.left == [3, 4, 5, 6, 7], (
        "the first of engine 0 and the first two of engine 1 begin at once"
    )
    queue.end_period([1, 2])
    assert queue.left == [4, 5, 6, 7], "engine 0 has begun 3 too"
    assert queue.deal([0, 3], 1) == [[7], [4, 5, 6]]
    assert queue.left == [7]


def test_a_period_ends_where_the_next_step_would_not_bring_it_nearer() -> None:
    clock = VirtualClock()
    steps = []
    for num_running, cache_cost in ((0, 0.0), (0, 0.5), (256, 1.0)):
        clock.begin_period(16.0, [], 0)
        steps.append(0)
        while not steps[-1] or not clock.period_is_over:
            clock.step(num_running, 0, cache_cost)
            steps[-1] += 1
    assert steps == [16, 11, 5], "of 1, 1.5 and 3 units each; none is counted in the next period"


def test_a_period_is_a_part_of_the_longest_response() -> None:
    assert [period_length(limit) for limit in (8, 256, 512, 1024, 32768)] == [16, 16, 32, 64, 64]


def test_expected_lengths_are_those_of_the_last_responses() -> None:
    lengths = ResponseLengths()
    assert lengths.expected([4, 2]) == [0.0, 0.0], "nothing is known: any order"
    lengths.record([2, 2, 7], [10, 21, 40])
    lengths.record([7], [44])
    assert lengths.expected([7, 2, 4]) == [44, 16, 30.0], "an unknown one has the mean"
    other = ResponseLengths()
    other.load_state_dict(lengths.state_dict())
    assert other.expected([7, 2, 4]) == lengths.expected([7, 2, 4])


def test_a_request_begins_on_the_engine_that_has_had_it() -> None:
    """Check affinities with too little room for one of their requests, and one that does not
    exist."""
    queue = SharedQueue(6, None, {1: 1, 2: 1, 4: 1, 5: 9})
    assert queue.deal([1, 1], 1) == [[0, 3], [1, 2]]
    assert queue.left == [2, 3, 4, 5]


def test_a_returning_conversation_displaces_no_request_that_has_left_the_queue() -> None:
    """Check a period that ends with its first step: a request that has left the queue has begun."""
    added: list[int] = []

    def add(begun: list[Request], sampling: Any) -> None:
        added.extend(request.number for request in begun)

    engine: Any = SimpleNamespace(num_unfinished=0, num_running=0, max_running=1, add=add)
    requests = [Request(i, np.array([5], np.int32), i, NOTHING) for i in range(4)]
    queue = SharedQueue(3)
    share, other = queue.deal([1, 1], 1)
    sampling = Sampling(1.0, 8, ())
    call = _Call(engine, requests, sampling, VirtualClock(), None, None, share=share, promised=1)
    call.begin([requests[3]])
    queue.end_period([len(share), len(other) - 1])
    assert sorted([*added, *other, *queue.left]) == [0, 1, 2, 3]


def test_returning_conversations_beyond_the_places_leave_no_room() -> None:
    engine: Any = SimpleNamespace(num_unfinished=7, num_running=0, max_running=4)
    assert _room(engine) == 0
    assert SharedQueue(3).deal([_room(engine)], 0) == [[]]
