"""Which rollout engine generates which response: arithmetic that every rank does alike.

The requests of a call are in one queue, and an engine begins the next ones when it has room. Time
decides nothing: an engine's clock is the cost of the steps that it has taken, and the engines
exchange their free places once in a period of that clock. So two runs assign alike and form the
same batches, as a killed and resumed run does.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

_PER_REQUEST = 1 / 256
_PER_PROMPT_TOKEN = 1 / 512
"""Costs of a request in a step, and of a token of a new prompt, relative to a step's fixed cost:
those of a model of some billion parameters on a GPU, where a step reads the weights once whatever
its batch is. Other engines take other times: the assignment is then less even, and as
repeatable."""


def period_length(max_tokens: int) -> float:
    """Return the virtual time between two exchanges, where a response has up to max_tokens tokens:
    a sixteenth of its steps, 16 to 64. In a longer period engines are unequal for longer, and more
    is generated after a call may end. In a shorter one engines exchange more often, and wait for a
    larger part of it: they end it up to a step apart."""
    return min(64.0, max(16.0, max_tokens / 16))


class VirtualClock:
    """Clock of one engine, which tells when a period ends: it adds up the cost of the engine's
    steps."""

    step_seconds = 0.0
    """Measured seconds of a step, which the engines exchange; 0: not measured."""

    def __init__(self) -> None:
        self._left = 0.0
        self._last = 0.0
        """Cost of the last step."""

    def begin_period(self, length: float, step_seconds: Sequence[float], engine: int) -> None:
        """Begin a period at the same time as all engines. step_seconds: of each engine. engine:
        this one."""
        self._left = length

    def step(self, num_running: int, num_prompt_tokens: int, cache_cost: float) -> None:
        """Count a step with num_running requests and num_prompt_tokens tokens of prompts that are
        added before it. cache_cost: of reading the KV cache, relative to the fixed cost of a
        step."""
        self._last = (
            1.0 + num_running * _PER_REQUEST + num_prompt_tokens * _PER_PROMPT_TOKEN + cache_cost
        )
        self._left -= self._last

    @property
    def period_is_over(self) -> bool:
        """Stopping now misses the period's end by less than one more step."""
        return self._left <= self._last / 2


class MeasuredClock:
    """Clock for engines of different speed: in a period the fastest engine takes as many steps as
    the period is long, and each other engine as many as it can take in the same time."""

    def __init__(self) -> None:
        self.step_seconds = 0.0
        self._num_steps = 0
        self._steps_left = 0
        self._start = 0.0

    def begin_period(self, length: float, step_seconds: Sequence[float], engine: int) -> None:
        """Begin a period, whose steps follow from those of the periods before."""
        fastest = min((seconds for seconds in step_seconds if seconds > 0), default=0.0)
        share = fastest / step_seconds[engine] if step_seconds[engine] > 0 else 1.0
        self._steps_left = max(1, round(length * share))
        self._num_steps = 0
        self._start = time.perf_counter()

    def step(self, num_running: int, num_prompt_tokens: int, cache_cost: float) -> None:
        """Count a step."""
        self._num_steps += 1
        self._steps_left -= 1
        self.step_seconds = (time.perf_counter() - self._start) / self._num_steps

    @property
    def period_is_over(self) -> bool:
        """The engine has taken the steps of this period."""
        return self._steps_left <= 0


Clock = VirtualClock | MeasuredClock
CLOCKS: dict[str, type[Clock]] = {"virtual": VirtualClock, "measured": MeasuredClock}
"""Clocks by the value of rollout.clock."""


class ResponseLengths:
    """Mean length of the last responses to each training prompt: the expected length of the next
    ones."""

    def __init__(self) -> None:
        self._lens: dict[int, int] = {}

    def expected(self, prompts: Sequence[int]) -> list[float]:
        """Return the expected response length in tokens for each prompt index. Unknown prompts get
        the mean over the known ones."""
        mean = sum(self._lens.values()) / len(self._lens) if self._lens else 0.0
        return [self._lens.get(prompt, mean) for prompt in prompts]

    def record(self, prompts: Sequence[int], lens: Sequence[int]) -> None:
        """Record the length of a response to each of the prompts."""
        by_prompt: dict[int, list[int]] = defaultdict(list)
        for prompt, length in zip(prompts, lens, strict=True):
            by_prompt[prompt].append(length)
        for prompt, of_prompt in by_prompt.items():
            self._lens[prompt] = round(sum(of_prompt) / len(of_prompt))

    def state_dict(self) -> dict[str, list[int]]:
        """Return the state for the checkpoint."""
        return {"prompts": list(self._lens), "lens": list(self._lens.values())}

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        """Continue with the lengths of a checkpoint."""
        self._lens = dict(zip(state["prompts"], state["lens"], strict=True))


class SharedQueue:
    """The requests that no engine has begun. Every rank has the same.

    For each period an engine gets a share of them, and begins the next one of its share when it has
    room. Those that it has not begun by the end of the period are dealt again: no engine waits for
    requests that another one has."""

    def __init__(
        self,
        num_requests: int,
        expected_lens: Sequence[float] | None = None,
        affinity: Mapping[int, int] | None = None,
    ) -> None:
        """Queue requests 0 to num_requests - 1. expected_lens: the expected length of each
        response; the longest begin first, so that the last ones to end are short. affinity: the
        only engine that may have a request, by its number."""
        order: Sequence[int] = range(num_requests)
        if expected_lens is not None:
            # stable: equal ones keep their order
            order = sorted(order, key=lambda number: -expected_lens[number])
        self.left = list(order)
        """Queued request numbers, in the order in which they are dealt."""
        self._affinity = {} if affinity is None else affinity
        self._shares: list[list[int]] = []

    def deal(self, rooms: Sequence[int], num_more: int) -> list[list[int]]:
        """Return the share of each engine. rooms: how many requests each begins at once; these
        leave the queue. num_more: how many more each may begin within the period. The next request
        goes to the engine with the most room, the first of equal ones. A request with an affinity
        goes to that engine, before others."""
        with_affinity: list[list[int]] = [[] for _ in rooms]
        others: list[int] = []
        for number in self.left:
            engine = self._affinity.get(number, len(rooms))
            (with_affinity[engine] if engine < len(rooms) else others).append(number)
        self._shares = [
            share[: room + num_more] for share, room in zip(with_affinity, rooms, strict=True)
        ]
        free = [room - len(share) for room, share in zip(rooms, self._shares, strict=True)]
        levels = np.concatenate([np.arange(room, -num_more, -1) for room in free])
        engines = np.repeat(np.arange(len(rooms)), [room + num_more for room in free])
        dealt = engines[np.lexsort((engines, -levels))].tolist()
        for engine, number in zip(dealt, others, strict=False):
            self._shares[engine].append(number)
        self._begin(share[:room] for share, room in zip(self._shares, rooms, strict=True))
        return self._shares

    def end_period(self, nums_left: Sequence[int]) -> None:
        """End a period. nums_left: how many requests of its share each engine has not begun."""
        self._begin(
            share[: len(share) - num] for share, num in zip(self._shares, nums_left, strict=False)
        )

    def _begin(self, shares: Iterable[Sequence[int]]) -> None:
        started = {number for share in shares for number in share}
        self.left = [number for number in self.left if number not in started]
