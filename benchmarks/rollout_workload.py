"""Rollouts whose responses have drawn lengths, as benchmarks/rollout_simulator.py and
rollout_tail.py run them: the lengths, the ways to share them, the steps of the trainer's own
rollout, and their figures. Engines are elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlhf_mc.config.schema import Config, DataConfig, ModelConfig, RolloutConfig, TrainerConfig
from rlhf_mc.data.batch import Prompt
from rlhf_mc.patching import replaced
from rlhf_mc.rollout.base import Request
from rlhf_mc.rollout.work_sharing import ResponseLengths, SharedQueue
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer.pool import sampling
from rlhf_mc.trainer.pool.group_pool import GroupPool
from rlhf_mc.trainer.step_state import begin_step

SEED = 5
PROMPT_TOKENS = 8
DIGIT = 64
"""A prompt is its index in digits of this base."""
CYCLE = 5
"""Steps that are counted: with 5/4 of the prompts in flight, every fifth step of tail batching is
one of the tail."""
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
    per_place: float = 4
    """Responses of a step for each place."""
    n: int = 4
    """Responses to a prompt."""
    correlation: float = 0.75
    """Of the normal scores of the lengths of two responses to a prompt."""
    steps: int = CYCLE

    @property
    def batch_size(self) -> int:
        """Prompts of a step."""
        return round(self.engines * self.places * self.per_place) // self.n

    def length(self, prompt: int, seed: int) -> int:
        """Return the length of a response, a function of its prompt's index and its seed."""
        share = _share(self.correlation, prompt, seed)
        length = QUANTILES[self.kind](share) / (8 if self.kind == TWO_SOURCES and prompt % 2 else 1)
        return min(self.limit, max(1, round(self.limit * length)))

    def of_kind(self, kind: str) -> Workload:
        """Return this workload with lengths of another kind."""
        return replace(self, kind=kind, n=1 if kind == TWO_SOURCES else self.n)


@functools.cache
def _share(correlation: float, prompt: int, seed: int) -> float:
    shared, own = (
        float(np.random.default_rng((SEED, *key)).standard_normal())
        for key in ((prompt,), (1, seed))
    )
    return NormalDist().cdf(math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own)


def _bimodal(share: float) -> float:
    return 1.0 if share > 15 / 16 else 1 / 40 + share * 16 / 15 * (1 / 7 - 1 / 40)


def _geometric(share: float) -> float:
    return -math.log1p(-min(share, 1 - 1e-12)) / 5


TWO_SOURCES = "two sources"
QUANTILES: dict[str, Callable[[float], float]] = {
    "geometric": _geometric,
    "log-normal": lambda share: (
        math.exp(0.9 * NormalDist().inv_cdf(min(max(share, 1e-12), 1 - 1e-12))) / 8
    ),
    "bimodal": _bimodal,
    TWO_SOURCES: _geometric,
    "equal": lambda share: 1 / 8,
}
"""Length of the response at this share of all responses, relative to the limit (longer ones are cut
there). geometric: mean 1/5; log-normal: median 1/8, sigma 0.9; bimodal: 1 in 16 at the limit, the
others uniform from 1/40 to 1/7; two sources: geometric, but those of every second prompt an eighth
as long, and one response to a prompt: with an even number of engines, static assignment gives each
engine the prompts of one source."""
KINDS = ("geometric", "log-normal", "bimodal", TWO_SOURCES)


class Prompts:
    """The training prompts, as much of trainer/run.py's as a rollout uses."""

    def __init__(self, count: int) -> None:
        self.file_sizes = (count,)

    def __len__(self) -> int:
        return self.file_sizes[0]

    def select(self, indices: Sequence[int]) -> list[Prompt]:
        """Return the prompts of these indices."""
        return [
            Prompt(
                index,
                np.array([index // DIGIT**k % DIGIT for k in range(PROMPT_TOKENS)], np.int32),
                "",
                "",
            )
            for index in indices
        ]


class NoScores:
    """In place of rewards/manager.py's ScoreStream: no response is scored."""

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
    """Static assignment in place of the shared queue: engine e of E takes requests e, e + E, ... at
    once."""

    def deal(self, rooms: Sequence[int], num_more: int) -> list[list[int]]:
        """Return the requests of each engine, whatever it has room for."""
        requests = sorted(self.left)
        self.left = []
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
    def of(
        calls: Sequence[np.ndarray], tokens: int, kept_tokens: int, ages: Sequence[float]
    ) -> Figures:
        """Return the figures of the calls of the engines, [segments, engines] seconds of work each.
        tokens: trained
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
        rollout_pool=None,
        has_rollout_pool=False,
        rollout_ranks=[0],
        environments=None,
        actor=SimpleNamespace(replay=None),
        train_prompts=Prompts(count),
        response_lengths=lengths,
        group_pool=GroupPool(),
        schedule=SimpleNamespace(ends_by_epochs=False),
        rewards=None,
        tokenizer=None,
        groups=SimpleNamespace(rank=0, mesh=SimpleNamespace(world=1)),
        journal=SimpleNamespace(is_replayed=False, record=lambda *row: None),
        stop_token_ids=(),
        offload_schedule=SimpleNamespace(phase=lambda timer, name: contextlib.nullcontext()),
    )


def run_steps(
    run: Any, workload: Workload, is_counted: Callable[[bool], None]
) -> tuple[int, int, list[float]]:
    """Run the rollouts of the steps. Call is_counted before each one. Return of the counted steps:
    tokens that are trained on, tokens that were drawn and are not drawn again, mean ages of the
    trained tokens."""
    warm_up = WARM_UP if run.config.rollout.partial_rollout else 0
    tokens = 0
    kept = 0
    ages = []
    for step in range(1, workload.steps + warm_up + 1):
        counts = step > warm_up
        is_counted(counts)
        run.rollout.weights_updated()
        state = begin_step(step, RankStatus(), (step - 1) * run.config.data.train_batch_size)
        before = _tokens_of(run)
        with replaced(sampling, "ScoreStream", NoScores):
            _, batch, _ = sampling.sample_groups(run, state, workload.batch_size)
        if counts:
            trained = int(batch.response_lens.sum())
            tokens += trained
            kept += trained + _tokens_of(run) - before
            ages += [] if batch.token_ages is None else [float(batch.token_ages.float().mean())]
    return tokens, kept, ages


def _tokens_of(run: Any) -> int:
    """Return the tokens of the responses that are kept for later steps."""
    return sum(len(one.token_ids) for group in run.group_pool.groups for one in group.responses)


HEADER = (
    "| engines | lengths | | idle | waiting for clocks | s a step | tokens/s | over static | least "
    "/ actual time | age"
    " |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def row(workload: Workload, name: str, figures: Figures, static: Figures, least: float) -> str:
    """Return a row of the table."""
    return (
        f"| {workload.engines} | {workload.kind} | {name} | {figures.idle:.1%} | "
        f"{figures.waits:.1%} | {figures.seconds:.2f} | {figures.tokens_per_second:.0f} | "
        f"{figures.tokens_per_second / static.tokens_per_second:.2f} | "
        f"{least / figures.seconds:.2f} | {figures.staleness:.2f} |"
    )
