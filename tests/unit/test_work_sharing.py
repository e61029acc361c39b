"""Which engine takes which request (rollout/work_sharing.py): engines without processes, whose steps are counted."""

from __future__ import annotations

import random

import pytest

from rlhf_mc.rollout.work_sharing import ResponseLengths, SharedQueue, VirtualClock, room_for

PLACES = 8


def _generate(lens: list[int], engines: int, expected_lens: list[float] | None = None) -> tuple[list[list[int]], float]:
    """Generate responses of these lengths on engines with PLACES places each. Return the requests of each engine, in
    the order in which it took them, and the idle share: 1 - steps of all engines / (engines x steps of the slowest)."""
    queue = SharedQueue(len(lens), expected_lens)
    clocks = [VirtualClock() for _ in range(engines)]
    left: list[dict[int, int]] = [{} for _ in range(engines)]  # tokens to draw, by request
    shares: list[list[int]] = [[] for _ in range(engines)]
    steps = [0] * engines
    while queue or any(left):
        if queue:
            taken = queue.take([room_for(PLACES, len(requests), len(queue.left) // engines) for requests in left])
            for numbers, share, requests, clock in zip(taken, shares, left, clocks, strict=True):
                share += numbers
                requests |= {number: lens[number] for number in numbers}
                clock.begin_period(0, [], 0)
        for engine, (requests, clock) in enumerate(zip(left, clocks, strict=True)):
            while requests and not (queue and clock.period_is_over):
                running = list(requests)[:PLACES]
                for number in running:
                    requests[number] -= 1
                    if requests[number] == 0:
                        del requests[number]
                clock.step(len(running))
                steps[engine] += 1
    return shares, 1 - sum(steps) / (engines * max(1, *steps))


def _lens(count: int) -> list[int]:
    """Return lengths of which 1 in 16 is at the limit of 512."""
    rng = random.Random(3)
    return [512 if number % 16 == 0 else rng.randrange(10, 80) for number in range(count)]


@pytest.mark.parametrize("engines", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 3, 64, 200])
def test_every_request_is_taken_once(engines: int, count: int) -> None:
    shares, _ = _generate(_lens(count), engines)
    assert sorted(number for share in shares for number in share) == list(range(count))


def test_two_calls_assign_alike() -> None:
    assert _generate(_lens(200), 4) == _generate(_lens(200), 4)


def test_an_engine_with_long_responses_takes_fewer() -> None:
    """Check the case in which every long response is among the first requests of engine 0."""
    lens = [512 if number % 2 == 0 and number < 2 * PLACES else 16 for number in range(200)]
    shares, idle = _generate(lens, 2)
    assert len(shares[0]) < 40 and len(shares[1]) > 150
    static = [sum(lens[engine::2]) for engine in range(2)]
    assert idle < 0.25 < 0.35 < 1 - sum(static) / (2 * max(static))


def test_the_longest_begin_first() -> None:
    lens = _lens(256)
    expected = [float(length) for length in lens]
    shares, idle = _generate(lens, 4, expected)
    for share in shares:
        assert [lens[number] for number in share] == sorted((lens[number] for number in share), reverse=True)
    assert idle < 0.03 < 0.1 < _generate(lens, 4)[1]


def test_requests_go_where_there_is_most_room() -> None:
    queue = SharedQueue(6)
    assert queue.take([1, 3, 0]) == [[2], [0, 1, 3], []]
    assert queue.take([0, 0, 0]) == [[], [], []]
    assert queue.take([5, 5, 5]) == [[4], [5], []]
    assert not queue


def test_an_engine_takes_more_than_it_runs() -> None:
    assert room_for(256, 0, 0) == 288 and room_for(1, 0, 0) == 2, "an eighth more"
    assert room_for(256, 288, 0) == 0 and room_for(256, 300, 0) == 0
    assert room_for(256, 0, 1000) == 506 and room_for(256, 256, 1000) == 250, "or a quarter of its part of the queue"


def test_expected_lengths_are_those_of_the_last_responses() -> None:
    lengths = ResponseLengths()
    assert lengths.expected([4, 2]) == [0.0, 0.0], "nothing is known: any order"
    lengths.record([2, 2, 7], [10, 21, 40])
    lengths.record([7], [44])
    assert lengths.expected([7, 2, 4]) == [44, 16, 30.0], "an unknown one has the mean"
    other = ResponseLengths()
    other.load_state_dict(lengths.state_dict())
    assert other.expected([7, 2, 4]) == lengths.expected([7, 2, 4])
