"""A simulator of rollout engines, on one core and without a model: the time of a rollout with static assignment, the
shared queue, tail batching and partial rollouts, for any number of engines.

    python benchmarks/rollout_simulator.py --engines 8 32 64

The loop, the queue, the virtual clocks and the groups are the trainer's own: each simulated rank is a thread that runs
rollout/engine_loop.py, and trainer/pool/pooled_rollout.py decides what a step trains on. Simulated are vLLM's schedule
(first come, first served, chunked prefill), the lengths of responses, and the seconds of an engine's step.
benchmarks/rollout_tail.py measures these seconds (--costs reads its file), compares its engines' schedule with the one
here, and its times with those of the simulator.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import heapq
import json
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rlhf_mc.config.schema import Config, DataConfig, ModelConfig, RolloutConfig, TrainerConfig
from rlhf_mc.data.batch import Generation, Prompt, Responses
from rlhf_mc.patching import replaced
from rlhf_mc.rollout import engine_loop
from rlhf_mc.rollout.base import KV_CACHE, WEIGHTS, Request, Sampling
from rlhf_mc.rollout.work_sharing import Clock, ResponseLengths, SharedQueue
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer import generate
from rlhf_mc.trainer.pool import pooled_rollout
from rlhf_mc.trainer.pool.group_pool import GroupPool
from rlhf_mc.trainer.step_state import begin_step

SEED = 5
PROMPT_TOKENS = 8
DIGIT = 64
"""A prompt is its index in digits of this base."""
TOKEN_BUDGET = 8192
"""Tokens of a step of an engine: rollout.max_num_batched_tokens."""
CYCLE = 5
"""Steps that are counted: with 5/4 of the prompts in flight, every fifth step of tail batching is one of the tail."""
WARM_UP = 4
"""Steps of partial rollouts before these: the first ones have no kept responses."""


@dataclass(frozen=True)
class Workload:
    """The responses of a rollout, and the engines that generate them."""

    kind: str
    """Distribution of the lengths: a key of QUANTILES."""
    engines: int
    limit: int = 2048
    """Maximum length of a response."""
    places: int = 16
    """Requests that an engine runs at once."""
    per_place: int = 4
    """Responses of a step for each place."""
    n: int = 4
    """Responses to a prompt."""
    correlation: float = 0.75
    """Of the normal scores of the lengths of two responses to a prompt."""
    steps: int = CYCLE

    @property
    def batch_size(self) -> int:
        """Prompts of a step."""
        return self.engines * self.places * self.per_place // self.n

    def length(self, prompt: int, seed: int) -> int:
        """Return the length of a response, a function of its prompt's index and its seed."""
        return _length(self.kind, self.limit, self.correlation, prompt, seed)


@functools.cache
def _length(kind: str, limit: int, correlation: float, prompt: int, seed: int) -> int:
    shared, own = (float(np.random.default_rng((SEED, *key)).standard_normal()) for key in ((prompt,), (1, seed)))
    share = NormalDist().cdf(math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own)
    return min(limit, max(1, round(limit * QUANTILES[kind](share))))


def _bimodal(share: float) -> float:
    return 1.0 if share > 15 / 16 else 1 / 40 + share * 16 / 15 * (1 / 7 - 1 / 40)


QUANTILES: dict[str, Callable[[float], float]] = {
    "geometric": lambda share: -math.log1p(-min(share, 1 - 1e-12)) / 5,
    "log-normal": lambda share: math.exp(0.9 * NormalDist().inv_cdf(min(max(share, 1e-12), 1 - 1e-12))) / 8,
    "bimodal": _bimodal,
    "equal": lambda share: 1 / 8,
}
"""Length of the response at this share of all responses, relative to the limit (longer ones are cut there). geometric:
mean 1/5; log-normal: median 1/8, sigma 0.9; bimodal: 1 in 16 at the limit, the others uniform from 1/40 to 1/7."""
KINDS = ("geometric", "log-normal", "bimodal")


class Prompts:
    """The training prompts, as much of trainer/run.py's as a rollout uses."""

    def __init__(self, count: int) -> None:
        self.file_sizes = (count,)

    def __len__(self) -> int:
        return self.file_sizes[0]

    def at(self, indices: Sequence[int]) -> list[Prompt]:
        """Return the prompts of these indices."""
        return [
            Prompt(index, np.array([index // DIGIT**k % DIGIT for k in range(PROMPT_TOKENS)], np.int32), "", "")
            for index in indices
        ]


class NoScores:
    """In place of trainer/scores.py's ScoreStream: no response is scored."""

    def __init__(self, *args: Any) -> None:
        pass

    def submit(self, responses: Mapping[int, Any], others_follow: bool = False) -> None:
        """Do nothing."""

    def select(self, numbers: Sequence[int]) -> None:
        """Do nothing."""


def prompt_index(request: Request) -> int:
    """Return the index of a request's prompt."""
    return sum(int(digit) * DIGIT**k for k, digit in enumerate(request.prompt))


class StaticQueue(SharedQueue):
    """Static assignment in place of the shared queue: engine e of E takes requests e, e + E, ... at once."""

    def take(self, rooms: Sequence[int]) -> list[list[int]]:
        """Return the requests of each engine, whatever it has room for."""
        requests = sorted(self.left)
        self.left.clear()
        return [requests[engine :: len(rooms)] for engine in range(len(rooms))]


@dataclass(frozen=True)
class Variant:
    """A way to share the requests of a step."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of section rollout."""
    queue: type[SharedQueue] = SharedQueue
    knows_lengths: bool = True
    """Earlier responses to all prompts are known."""


VARIANTS = {
    "static": Variant(queue=StaticQueue, knows_lengths=False),
    "shared": Variant(knows_lengths=False),
    "shared, expected lengths": Variant(),
    "tail batching": Variant({"tail_batching": True}),
    "partial rollouts": Variant({"partial_rollout": True}),
}


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

    def step(self, running: int, prefilled: int, cached: int) -> float:
        """Return the seconds of a step."""
        return self.by_batch[running] + prefilled * self.per_prefilled_token + cached * self.per_cached_token


class SimulatedEngine:
    """One engine of rollout/base.py's Protocol that draws nothing: vLLM's schedule alone."""

    awake = frozenset({WEIGHTS, KV_CACHE})

    def __init__(self, workload: Workload, costs: Costs | None = None) -> None:
        """costs: None: no time is counted."""
        self.groups = [[engine] for engine in range(workload.engines)]
        self.max_running = workload.places
        self.seconds = 0.0
        """Of work since the last exchange."""
        self.tokens = 0
        """Tokens drawn."""
        self.last_step = (0, 0, 0)
        """Of the last step: requests that drew a token, tokens prefilled, tokens read from the KV cache."""
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
        while budget > 0 and (self._prefilling or (self._waiting and len(self._ends) < self.max_running)):
            if not self._prefilling:
                number = self._waiting.popleft()
                request = self._requests[number]
                self._prefilling.append([number, len(request.prompt) + len(request.begun.token_ids)])
            entry = self._prefilling[0]
            chunk = min(entry[1], budget)
            entry[1] -= chunk
            budget -= chunk
            prefilled += chunk
            if entry[1] == 0:
                self._prefilling.popleft()
                heapq.heappush(self._ends, (self._step + self._left(self._requests[entry[0]]) - 1, entry[0]))
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
            total = len(request.begun.token_ids) + self._left(request)
            self._cached -= len(request.prompt) + total - 1
            ended[number] = _response(total, finished=True)
        return ended

    def abort(self) -> dict[int, Generation]:
        """See rollout/base.py."""
        left = {number: end - self._step for end, number in self._ends}
        responses = {}
        for number, request in self._requests.items():
            total = len(request.begun.token_ids) + self._left(request) - left.get(number, self._left(request))
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
        return self._workload.length(prompt_index(request), request.seed) - len(request.begun.token_ids)


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
    ) -> Responses:
        """Run engine_loop.generate_responses on every engine. Return what it returns."""
        answers: dict[int, bool] = {}

        def is_enough(ended: Set[int]) -> bool:
            assert enough is not None
            # All ranks ask about the same responses, and responses only become more.
            if len(ended) not in answers:
                answers[len(ended)] = enough(ended)
            return answers[len(ended)]

        def run(rank: int) -> Responses:
            self._thread.rank = rank
            try:
                return engine_loop.generate_responses(
                    self.engines[rank], requests, sampling, type(clock)(), expected_lens, enough and is_enough
                )
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
            replaced(engine_loop, "exchange_responses", self._exchange_responses),
        ):
            yield
        self._threads.shutdown()

    def _gather_vectors(self, vector: torch.Tensor) -> torch.Tensor:
        self._vectors[self._thread.rank] = vector
        self._gather.wait()
        return self._gathered

    def _exchange_responses(self, own: Mapping[int, Generation], engines: Any, num_responses: int) -> Responses:
        self._own[self._thread.rank] = own
        self._end.wait()
        return self._responses

    def _stack(self) -> None:
        self._gathered = torch.stack(self._vectors)
        self._end_segment(self._exchange_seconds)

    def _merge(self) -> None:
        merged = {number: response for own in self._own for number, response in own.items()}
        self._responses = Responses.of([merged[number] for number in range(len(merged))])
        self._end_segment(0.0)

    def _end_segment(self, seconds_of_next: float) -> None:
        self.segments.append([engine.seconds for engine in self.engines])
        for engine in self.engines:
            engine.seconds = seconds_of_next


@dataclass(frozen=True)
class Figures:
    """The figures of some steps, without the exchange of responses and what follows."""

    seconds: float
    """Of a step."""
    idle: float
    """Share of the engines' time in which they wait for others."""
    waits: float
    """The part of `idle` that is before a step's last segment: waiting for the clocks of others."""
    tokens: int
    """Tokens of the responses that a step trains on."""
    tokens_per_second: float
    """Tokens drawn, those of responses that are generated again only once."""
    staleness: float = 0.0
    """Mean age of a trained token in weight updates."""

    @staticmethod
    def of(calls: Sequence[np.ndarray], tokens: int, kept_tokens: int, ages: Sequence[float]) -> Figures:
        """Return the figures of the calls of the engines, [segments, engines] seconds of work each. tokens: trained
        on. kept_tokens: drawn, without those that are drawn again."""
        total = sum(call.max(1).sum() for call in calls)
        gaps = [(call.max(1, keepdims=True) - call).mean(1) for call in calls]
        return Figures(
            total / len(calls),
            sum(gap.sum() for gap in gaps) / total,
            sum(gap[:-1].sum() for gap in gaps) / total,
            tokens // len(calls),
            kept_tokens / total,
            float(np.mean(ages)) if ages else 0.0,
        )


def make_run(workload: Workload, variant: Variant, engine: Any) -> Any:
    """Return what a rollout uses of trainer/run.py's Run."""
    count = workload.batch_size * workload.steps
    config = Config(
        data=DataConfig(
            train_files="", train_batch_size=workload.batch_size, max_prompt_length=PROMPT_TOKENS,
            max_response_length=workload.limit, shuffle=False,
        ),
        model=ModelConfig(path=""),
        trainer=TrainerConfig(default_local_dir="", total_training_steps=1),
        rollout=RolloutConfig(n=workload.n, max_num_seqs=workload.places, **variant.settings),
    )  # fmt: skip
    lengths = ResponseLengths()
    if variant.knows_lengths:  # of responses with other seeds
        rows = [(prompt, seed) for prompt in range(count) for seed in range(workload.n)]
        lengths.record([prompt for prompt, _ in rows], [workload.length(*row) for row in rows])
    return SimpleNamespace(
        config=config,
        rollout=engine,
        train_prompts=Prompts(count),
        response_lengths=lengths,
        group_pool=GroupPool(),
        rewards=None,
        tokenizer=None,
        groups=SimpleNamespace(rank=0, mesh=SimpleNamespace(world=1)),
        journal=SimpleNamespace(is_replayed=False, record=lambda *row: None),
        stop_token_ids=(),
        offload_schedule=SimpleNamespace(phase=lambda timer, name: contextlib.nullcontext()),
    )


def run_steps(run: Any, workload: Workload, is_counted: Callable[[bool], None]) -> tuple[int, int, list[float]]:
    """Run the rollouts of the steps. Call is_counted before each one. Return of the counted steps: tokens that are
    trained on, tokens that were drawn and are not drawn again, mean ages of the trained tokens."""
    rollout = run.config.rollout
    has_pool = rollout.partial_rollout or rollout.tail_batching
    pooled = functools.partial(pooled_rollout.pooled_rollout, needed=workload.batch_size)
    rollout_of_step = pooled if has_pool else generate.generate_batch
    warm_up = WARM_UP if rollout.partial_rollout else 0
    tokens = 0
    kept = 0
    ages = []
    for step in range(1, workload.steps + warm_up + 1):
        counts = step > warm_up
        is_counted(counts)
        run.rollout.weights_updated()
        state = begin_step(step, RankStatus())
        before = _tokens_of(run)
        with replaced(generate, "ScoreStream", NoScores):
            _, batch, _ = rollout_of_step(run, state)
        if counts:
            trained = int(batch.response_lens.sum())
            tokens += trained
            kept += trained + _tokens_of(run) - before
            ages += [] if batch.token_ages is None else [float(batch.token_ages.float().mean())]
    return tokens, kept, ages


def _tokens_of(run: Any) -> int:
    """Return the tokens of the responses that are kept for later steps."""
    return sum(len(one.token_ids) for group in run.group_pool.groups for one in group.responses)


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
    """Return the least seconds of a step in which all of its responses are generated: its tokens in full batches, or
    its longest response alone."""
    run = make_run(workload, VARIANTS["static"], SimulatedEngine(workload))
    total = 0.0
    for step in range(1, workload.steps + 1):
        positions = range((step - 1) * workload.batch_size, step * workload.batch_size)
        groups = generate.new_groups(run, positions)
        lens = [workload.length(group.prompt.index, seed) for group in groups for seed in group.seeds]
        full = sum(lens) / (workload.engines * workload.places) * costs.by_batch[workload.places]
        total += max(full, max(lens) * costs.by_batch[1])
    return total / workload.steps


HEADER = (
    "| engines | lengths | | idle | waiting for clocks | s a step | tokens/s | over static | least / actual time | age"
    " |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def row(workload: Workload, name: str, figures: Figures, static: Figures, least: float) -> str:
    """Return a row of the table."""
    return (
        f"| {workload.engines} | {workload.kind} | {name} | {figures.idle:.1%} | {figures.waits:.1%} "
        f"| {figures.seconds:.2f} | {figures.tokens_per_second:.0f} "
        f"| {figures.tokens_per_second / static.tokens_per_second:.2f} | {least / figures.seconds:.2f} "
        f"| {figures.staleness:.2f} |"
    )


def default_costs(places: int) -> Costs:
    """Return costs of a GPU that reads its weights in 10 ms: the proportions of rollout/work_sharing.py."""
    step = 0.01
    return Costs(tuple(step * (1 + k / 256) for k in range(places + 1)), step / 512, 0.0, 1e-4, 1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--lengths", nargs="+", choices=QUANTILES, default=list(KINDS))
    parser.add_argument("--limit", type=int, default=2048)
    parser.add_argument("--places", type=int, default=16)
    parser.add_argument("--per-place", type=int, default=4, help="responses of a step for each place")
    parser.add_argument("--correlation", type=float, default=0.75, help="of the lengths of responses to a prompt")
    parser.add_argument("--costs", type=Path, help="file of rollout_tail.py; default: proportions of a GPU")
    args = parser.parse_args()
    costs = Costs(**json.loads(args.costs.read_text())) if args.costs else default_costs(args.places)
    print(HEADER)
    for engines in args.engines:
        for kind in args.lengths:
            workload = Workload(kind, engines, args.limit, args.places, args.per_place, correlation=args.correlation)
            results = {name: simulate(workload, variant, costs) for name, variant in VARIANTS.items()}
            for name, figures in results.items():
                print(row(workload, name, figures, results["static"], bound(workload, costs)), flush=True)


if __name__ == "__main__":
    main()
