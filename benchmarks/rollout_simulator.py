"""A simulator of rollout engines, on one core and without a model: the time of a rollout with
static assignment, the shared queue, tail batching and partial rollouts, for any number of engines.

    python benchmarks/rollout_simulator.py --engines 8 32 64
    python benchmarks/rollout_simulator.py --pools --engines 8 32 128

The loop, the queue, the virtual clocks and the groups are the trainer's own: each simulated rank is
a thread that runs rollout/engine_loop.py, and trainer/pool/strategies.py decides what a step trains
on. Simulated are vLLM's schedule (first come, first served, chunked prefill), the lengths of
responses, and the seconds of an engine's step. benchmarks/rollout_tail.py measures these seconds
(--costs reads its file), compares its engines' schedule with the one here, and its times with those
of the simulator.

--pools compares colocated GPUs, of an engine each, with pools one step ahead at their best split:
generation on M of G engines beside training on the others, of which each does as much in a second.
The training of a batch on all G takes --training times as long as its generation with the shared
queue. A step is the sum of both, or the longer one.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rollout_workload import (
    HEADER,
    KINDS,
    QUANTILES,
    VARIANTS,
    Figures,
    Variant,
    Workload,
    make_run,
    prompt_index,
    row,
    run_steps,
)

from rlhf_mc.data.batch import Generation, Responses
from rlhf_mc.patching import replaced
from rlhf_mc.rollout import engine_loop
from rlhf_mc.rollout.base import KV_CACHE, WEIGHTS, Request, Sampling
from rlhf_mc.rollout.work_sharing import Clock
from rlhf_mc.trainer.pool import generate, strategies

TOKEN_BUDGET = 8192
"""Tokens of a step of an engine: rollout.max_num_batched_tokens."""


@dataclass(frozen=True)
class Costs:
    """Seconds of processor time of an engine, as rollout_tail.py measures them."""

    by_batch: tuple[float, ...]
    """Of a step that draws a token of k requests, at index k."""
    per_prefilled_token: float
    """Of a token that a step prefills."""
    per_cached_token: float
    """Of a token in the KV cache that a step reads."""
    per_request: float
    """Of adding a request."""
    per_exchange: float
    cached_token_cost: float
    """RolloutEngine.cached_token_cost of the engine."""

    def step(self, running: int, prefilled: int, cached: int) -> float:
        """Return the seconds of a step."""
        return (
            self.by_batch[running]
            + prefilled * self.per_prefilled_token
            + cached * self.per_cached_token
        )


class SimulatedEngine:
    """One engine of rollout/base.py's Protocol that draws nothing: vLLM's schedule alone."""

    awake = frozenset({WEIGHTS, KV_CACHE})

    def __init__(self, workload: Workload, costs: Costs | None = None) -> None:
        """costs: None: no time is counted."""
        self.groups = [[engine] for engine in range(workload.engines)]
        self.max_running = workload.places
        self.cached_token_cost = 0.0 if costs is None else costs.cached_token_cost
        self.seconds = 0.0
        """Of work since the last exchange."""
        self.tokens = 0
        """Tokens drawn."""
        self.last_step = (0, 0, 0)
        """Of the last step: requests that drew a token, tokens prefilled, tokens read from the KV
        cache."""
        self._workload = workload
        self._costs = costs
        self._requests: dict[int, Request] = {}
        self._waiting: deque[int] = deque()
        self._prefilling: deque[list[int]] = deque()  # [number, tokens to prefill]
        self._ends: list[tuple[int, int]] = []  # heap of (step of the last token, number)
        self._step = 0
        self._cached = 0

    @property
    def num_unfinished(self) -> int:
        """See rollout/base.py."""
        return len(self._requests)

    @property
    def num_running(self) -> int:
        """See rollout/base.py."""
        return len(self._ends) + len(self._prefilling)

    def add(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """See rollout/base.py."""
        for request in requests:
            self._requests[request.number] = request
            self._waiting.append(request.number)
        if self._costs is not None:
            self.seconds += len(requests) * self._costs.per_request

    def step(self) -> dict[int, Generation]:
        """See rollout/base.py."""
        self._step += 1
        budget = TOKEN_BUDGET - len(self._ends)
        self._cached += len(self._ends)
        prefilled = 0
        while budget > 0 and (
            self._prefilling or (self._waiting and len(self._ends) < self.max_running)
        ):
            if not self._prefilling:
                number = self._waiting.popleft()
                request = self._requests[number]
                self._prefilling.append(
                    [number, len(request.prompt) + len(request.partial.token_ids)]
                )
            entry = self._prefilling[0]
            chunk = min(entry[1], budget)
            entry[1] -= chunk
            budget -= chunk
            prefilled += chunk
            if entry[1] == 0:
                self._prefilling.popleft()
                heapq.heappush(
                    self._ends, (self._step + self._left(self._requests[entry[0]]) - 1, entry[0])
                )
        running = len(self._ends)
        self._cached += prefilled
        self.tokens += running
        self.last_step = (running, prefilled, self._cached)
        if self._costs is not None:
            self.seconds += self._costs.step(*self.last_step)
        ended = {}
        while self._ends and self._ends[0][0] <= self._step:
            _, number = heapq.heappop(self._ends)
            request = self._requests.pop(number)
            total = len(request.partial.token_ids) + self._left(request)
            self._cached -= len(request.prompt) + total - 1
            ended[number] = _response(total, finished=True)
        return ended

    def abort(self) -> dict[int, Generation]:
        """See rollout/base.py."""
        left = {number: end - self._step for end, number in self._ends}
        responses = {}
        for number, request in self._requests.items():
            total = (
                len(request.partial.token_ids)
                + self._left(request)
                - left.get(number, self._left(request))
            )
            responses[number] = _response(total, finished=False)
        self._requests.clear()
        self._waiting.clear()
        self._prefilling.clear()
        self._ends.clear()
        self._cached = 0
        return responses

    def weights_updated(self) -> None:
        """See rollout/base.py."""

    def _left(self, request: Request) -> int:
        return self._workload.length(prompt_index(request), request.seed) - len(
            request.partial.token_ids
        )


def _response(num_tokens: int, finished: bool) -> Generation:
    return Generation([0] * num_tokens, [0.0] * num_tokens, finished)


class SimulatedEngines:
    """All engines of a rollout. Each is driven by the trainer's loop, in a thread of its own."""

    def __init__(self, workload: Workload, costs: Costs) -> None:
        self.engines = [SimulatedEngine(workload, costs) for _ in range(workload.engines)]
        self.segments: list[list[float]] = []
        """Seconds of each engine between two exchanges."""
        self._exchange_seconds = costs.per_exchange
        self._thread = threading.local()
        self._gather = threading.Barrier(workload.engines, self._stack)
        self._end = threading.Barrier(workload.engines, self._merge)
        self._vectors: list[Any] = [None] * workload.engines
        self._own: list[Any] = [None] * workload.engines
        self._threads = ThreadPoolExecutor(workload.engines)

    def generate_responses(
        self,
        engine: Any,
        requests: Sequence[Request],
        sampling: Sampling,
        clock: Clock,
        expected_lens: Sequence[float] | None = None,
        enough: Callable[[Set[int]], bool] | None = None,
        on_ended: Callable[[Mapping[int, Generation]], None] | None = None,
        turns: None = None,
        pool: None = None,
    ) -> dict[int, Generation]:
        """Run engine_loop.generate_responses on every engine. Return all responses by number."""
        answers: dict[int, bool] = {}

        def is_enough(ended: Set[int]) -> bool:
            assert enough is not None
            # All ranks ask about the same responses, and responses only become more.
            if len(ended) not in answers:
                answers[len(ended)] = enough(ended)
            return answers[len(ended)]

        def run(rank: int) -> dict[int, Generation]:
            self._thread.rank = rank
            try:
                self._own[rank] = engine_loop.generate_responses(
                    self.engines[rank],
                    requests,
                    sampling,
                    type(clock)(),
                    expected_lens,
                    enough and is_enough,
                )
                self._end.wait()
                return self._merged
            except BaseException:
                self._gather.abort()
                self._end.abort()
                raise

        first, *_ = self._threads.map(run, range(len(self.engines)))
        return first

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Let the trainer generate with these engines while the body runs."""
        ranks = SimpleNamespace(get_rank=lambda: self._thread.rank)
        with (
            replaced(generate, "generate_responses", self.generate_responses),
            replaced(engine_loop, "dist", ranks),
            replaced(engine_loop, "gather_vectors", self._gather_vectors),
            replaced(generate, "exchange_responses", _in_order),
        ):
            yield
        self._threads.shutdown()

    def _gather_vectors(self, vector: torch.Tensor, group: None) -> torch.Tensor:
        self._vectors[self._thread.rank] = vector
        self._gather.wait()
        return self._gathered

    def _stack(self) -> None:
        self._gathered = torch.stack(self._vectors)
        self._end_segment(self._exchange_seconds)

    def _merge(self) -> None:
        self._merged = {number: response for own in self._own for number, response in own.items()}
        self._end_segment(0.0)

    def _end_segment(self, seconds_of_next: float) -> None:
        self.segments.append([engine.seconds for engine in self.engines])
        for engine in self.engines:
            engine.seconds = seconds_of_next


def _in_order(merged: Mapping[int, Generation], engines: Any, num_responses: int) -> Responses:
    return Responses.of([merged[number] for number in range(num_responses)])


def simulate(workload: Workload, variant: Variant, costs: Costs) -> Figures:
    """Return the figures of a rollout on simulated engines."""
    engines = SimulatedEngines(workload, costs)
    calls: list[np.ndarray] = []
    counted = False

    def begin(counts: bool) -> None:
        nonlocal counted
        end()
        counted = counts

    def end() -> None:
        if engines.segments and counted:
            calls.append(np.array(engines.segments))
        engines.segments.clear()

    with engines.installed(), replaced(engine_loop, "SharedQueue", variant.queue):
        sums = run_steps(make_run(workload, variant, engines.engines[0]), workload, begin)
    end()
    return Figures.of(calls, *sums)


def bound(workload: Workload, costs: Costs) -> float:
    """Return the least seconds of a step in which all of its responses are generated: its tokens in
    full batches, or its longest response alone."""
    run = make_run(workload, VARIANTS["static"], SimulatedEngine(workload))
    total = 0.0
    for step in range(1, workload.steps + 1):
        positions = range((step - 1) * workload.batch_size, step * workload.batch_size)
        groups = strategies.groups_at(run, positions)
        lens = [
            workload.length(group.prompt.index, seed) for group in groups for seed in group.seeds
        ]
        full = sum(lens) / (workload.engines * workload.places) * costs.by_batch[workload.places]
        total += max(full, max(lens) * costs.by_batch[1])
    return total / workload.steps


SPLITS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Shares of the GPUs that generate."""
POOLS_HEADER = (
    "| GPUs | lengths | mode | tokens/s over colocated | rollout | idle train | idle rollout "
    "| age |\n|---|---|---|---|---|---|---|---|"
)


def pool_rows(workload: Workload, training: float, costs: Costs) -> Iterator[str]:
    """Yield a row for each mode. training: over the seconds of generation on all GPUs."""
    gpus = workload.engines
    plain = VARIANTS["shared, expected lengths"]
    base = simulate(workload, plain, costs)
    tokens = base.tokens
    train = training * base.seconds
    colocated = base.seconds + train
    for name, variant in (("", plain), (", partial", VARIANTS["partial rollouts"])):
        whole = simulate(workload, variant, costs)
        seconds = tokens / whole.tokens_per_second + train
        yield (
            f"| {gpus} | {workload.kind} | colocated{name} | {colocated / seconds:.2f} | - | - | - "
            f"| {whole.staleness:.2f} |"
        )
        best: tuple[float, str] | None = None
        for share in SPLITS:
            engines = round(gpus * share)
            part = replace(workload, engines=engines, per_place=workload.per_place / share)
            figures = simulate(part, variant, costs)
            generation = tokens / figures.tokens_per_second
            update = train * gpus / (gpus - engines)
            step = max(generation, update)
            line = (
                f"| {gpus} | {workload.kind} | pools{name} | {colocated / step:.2f} | {engines} | "
                f"{1 - update / step:.0%} | {1 - generation / step:.0%} | "
                f"{figures.staleness + 1:.2f} |"
            )
            best = min(best or (step, line), (step, line))
        assert best is not None
        yield best[1]


def default_costs(places: int) -> Costs:
    """Return costs of a GPU that reads its weights in 10 ms: the proportions of
    rollout/work_sharing.py, and a KV cache of 57 kB for a token beside weights of 15 GB."""
    step = 0.01
    cached = 57e3 / 15e9
    return Costs(
        tuple(step * (1 + k / 256) for k in range(places + 1)),
        step / 512,
        step * cached,
        1e-4,
        1e-4,
        cached,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--lengths", nargs="+", choices=QUANTILES, default=list(KINDS))
    parser.add_argument("--limit", type=int, default=2048)
    parser.add_argument("--places", type=int, default=16)
    parser.add_argument(
        "--per-place", type=int, default=4, help="responses of a step for each place"
    )
    parser.add_argument(
        "--correlation", type=float, default=0.75, help="of the lengths of responses to a prompt"
    )
    parser.add_argument(
        "--costs", type=Path, help="file of rollout_tail.py; default: proportions of a GPU"
    )
    parser.add_argument("--pools", action="store_true", help="compare resource pools")
    parser.add_argument(
        "--training", type=float, default=1.0, help="of a batch, over its generation (--pools)"
    )
    args = parser.parse_args()
    costs = (
        Costs(**json.loads(args.costs.read_text())) if args.costs else default_costs(args.places)
    )
    print(POOLS_HEADER if args.pools else HEADER)
    for engines in args.engines:
        for kind in args.lengths:
            workload = Workload(
                "", engines, args.limit, args.places, args.per_place, correlation=args.correlation
            )
            workload = workload.of_kind(kind)
            if args.pools:
                for line in pool_rows(workload, args.training, costs):
                    print(line, flush=True)
                continue
            results = {
                name: simulate(workload, variant, costs) for name, variant in VARIANTS.items()
            }
            for name, figures in results.items():
                print(
                    row(workload, name, figures, results["static"], bound(workload, costs)),
                    flush=True,
                )


if __name__ == "__main__":
    main()
