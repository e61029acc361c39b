"""Idle time of rollout engines: static assignment, the shared queue, tail batching and partial
rollouts, on vLLM's engines over responses of given lengths. The times of one run are compared with
each other, and with those that benchmarks/rollout_simulator.py computes from the measured seconds
of an engine's step.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/rollout_tail.py --limit 512
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 benchmarks/rollout_tail.py --limit 256
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/rollout_tail.py --size 26M --lengths

Each rank is an engine. A response ends at its drawn length and not with an end token. All else is
the trainer's own rollout, without rewards, updates and the exchange of responses. Ranks may share
cores: an engine's time is its processor time, and a segment between two exchanges lasts as long as
the engine that works longest in it, as if each engine had a core of its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from rollout_simulator import TOKEN_BUDGET, Costs, SimulatedEngine, bound, simulate
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
from workload import SIZES, Size

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.data.batch import Generation
from rlhf_mc.patching import replaced
from rlhf_mc.rollout import engine_loop
from rlhf_mc.rollout.base import Request, Sampling
from rlhf_mc.rollout.vllm_engine import VLLMEngine
from rlhf_mc.topology.consensus import gather_objects
from rlhf_mc.topology.groups import shut_down
from rlhf_mc.topology.rendezvous import init_process_group
from rlhf_mc.trainer.pool import generate

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Batches between which the seconds of a step are interpolated."""


class RecordedEngine(VLLMEngine):
    """vLLM's engine, whose responses end at their lengths. The simulator's engine takes the same
    steps beside it."""

    workload: Workload

    def begin(self, workload: Workload) -> None:
        """Begin a rollout of these responses."""
        self.workload = workload
        self.twin = SimulatedEngine(workload)
        self.steps: list[tuple[int, int, int, float]] = []
        """Of each step: requests that drew a token, tokens prefilled, tokens read from the cache,
        seconds."""
        self.added: list[float] = []
        """Seconds of adding a request."""
        self.exchanges: list[float] = []
        """Seconds of an exchange."""
        self.segments: list[float] = []
        """Seconds of work between two exchanges."""
        self._start = time.process_time()

    def end_segment(self) -> None:
        """End a segment here."""
        now = time.process_time()
        self.segments.append(now - self._start)
        self._start = now

    def add(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Add requests, which end at their lengths."""
        with self._not_counted():
            lens = [
                self.workload.length(prompt_index(request), request.seed) for request in requests
            ]
            requests = [
                replace(request, max_tokens=length)
                for request, length in zip(requests, lens, strict=True)
            ]
            self.twin.add(requests, sampling)
        start = time.process_time()
        super().add(requests, sampling)
        self.added += [(time.process_time() - start) / max(1, len(requests))] * len(requests)

    def step(self) -> dict[int, Generation]:
        """Take a step of vLLM, and compare it with the simulator's."""
        start = time.process_time()
        ended = super().step()
        seconds = time.process_time() - start
        with self._not_counted():
            simulated = self.twin.step()
            assert {n: len(one.token_ids) for n, one in ended.items()} == {
                n: len(one.token_ids) for n, one in simulated.items()
            }, "vLLM's schedule is not the simulator's"
            assert self.num_running == self.twin.num_running
            self.steps.append((*self.twin.last_step, seconds))
            ended = {number: replace(one, finished=True) for number, one in ended.items()}
        return ended

    def abort(self) -> dict[int, Generation]:
        """End all requests."""
        responses = super().abort()
        with self._not_counted():
            simulated = self.twin.abort()
            assert all(
                len(one.token_ids) == len(simulated[n].token_ids) for n, one in responses.items()
            )
        return responses

    @contextmanager
    def _not_counted(self) -> Iterator[None]:
        """Leave the body out of the segment's time."""
        start = time.process_time()
        yield
        self._start += time.process_time() - start


@contextmanager
def segments(engine: RecordedEngine) -> Iterator[None]:
    """End a segment of the engine at each exchange and at the end of each call, while the body
    runs."""
    exchange = engine_loop._Call.exchange
    exchange_responses = generate.exchange_responses

    def at_exchange(*args: Any) -> Any:
        engine.end_segment()
        start = time.process_time()
        result = exchange(*args)
        engine.exchanges.append(time.process_time() - start)
        return result

    def at_end(*args: Any) -> Any:
        engine.end_segment()
        return exchange_responses(*args)

    with (
        replaced(engine_loop._Call, "exchange", at_exchange),
        replaced(generate, "exchange_responses", at_end),
    ):
        yield


def build_engine(workload: Workload, directory: Path, size: Size = SIZES["0.7M"]) -> RecordedEngine:
    """Build this rank's engine. Its weights are zero: all tokens are equally probable."""
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": workload.limit + 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    shape = ModelShape.from_hf_config(config)
    cfg = RolloutConfig(max_num_seqs=workload.places, max_num_batched_tokens=TOKEN_BUDGET)
    groups = [[rank] for rank in range(workload.engines)]
    return RecordedEngine(
        str(directory), shape, cfg, groups, dist.get_rank(), workload.limit + 64, "float32", seed=0
    )


def measure(engine: RecordedEngine, workload: Workload, variant: Variant) -> tuple[Figures, float]:
    """Run the rollouts of a variant. Return their figures, and the seconds of a step by the clock.
    Every rank must
    call it."""
    engine.begin(workload)
    own: list[list[float]] = []
    starts: list[float] = []
    counted = False

    def begin(counts: bool) -> None:
        nonlocal counted
        end()
        counted = counts
        dist.barrier()
        engine._start = time.process_time()
        starts.extend([time.perf_counter()] * counts)

    def end() -> None:
        if engine.segments and counted:
            own.append(list(engine.segments))
        engine.segments.clear()

    with segments(engine), replaced(engine_loop, "SharedQueue", variant.queue):
        sums = run_steps(make_run(workload, variant, engine), workload, begin)
    end()
    wall = (time.perf_counter() - starts[0]) / len(starts)
    calls = [np.array(call).T for call in zip(*gather_objects(own), strict=True)]
    return Figures.of(calls, *sums), wall


def fit_costs(records: Sequence[Mapping[str, Any]], engine: RecordedEngine) -> Costs:
    """Return the costs of the engine by least squares over its steps: the seconds by batch
    piecewise linear between KNOTS, and proportional to tokens prefilled and read. records: "steps",
    "added", "exchanges" of RecordedEngine."""
    steps = np.array([step for record in records for step in record["steps"]])
    steps = steps[steps[:, 3] < np.quantile(steps[:, 3], 0.999)]  # a step that was interrupted
    places = engine.max_running
    knots = [knot for knot in KNOTS if knot < places] + [places]
    hats = np.eye(len(knots))
    by_knot = np.stack([np.interp(steps[:, 0], knots, hat) for hat in hats], axis=1)
    seconds, *_ = np.linalg.lstsq(
        np.concatenate([by_knot, steps[:, 1:3]], axis=1), steps[:, 3], rcond=None
    )
    by_batch = np.interp(range(places + 1), knots, seconds[: len(knots)])
    added = [each for record in records for each in record["added"]]
    exchanges = [each for record in records for each in record["exchanges"]]
    return Costs(
        tuple(by_batch.tolist()),
        *(max(0.0, float(each)) for each in seconds[len(knots) :]),
        float(np.mean(added)),
        float(np.mean(exchanges)) if exchanges else 0.0,
        engine.cached_token_cost,
    )


def print_bounds(workload: Workload) -> None:
    """Print what the variants exchange."""
    requests = workload.batch_size * workload.n
    print(
        "an exchange: 24 bytes from each engine, and with tail batching or partial rollouts "
        f"{-(-requests // 64) * 8} more for {requests} requests ({-(-2 * requests // 64) * 8} for "
        "twice as many)"
    )


def sharing_cost(engine: RecordedEngine, workload: Workload, rounds: int) -> None:
    """Print the cost of sharing at equal lengths: rounds of static assignment and of the shared
    queue alternate. Every rank must call it."""
    equal = replace(workload, kind="equal", steps=1)
    results: dict[str, list[Figures]] = {"static": [], "shared": []}
    for number in range(rounds + 1):  # the first is a warm-up
        for name, of_variant in results.items():
            figures, _ = measure(engine, equal, VARIANTS[name])
            of_variant.extend([figures] * (number > 0))
    static, shared = (
        float(np.median([each.seconds for each in results[name]])) for name in results
    )
    waits = float(np.median([each.waits for each in results["shared"]]))
    exchange = float(np.median(engine.exchanges)) * 1e3
    step = float(np.median([seconds for *_, seconds in engine.steps])) * 1e3
    work = [
        float(np.median([each.seconds * (1 - each.idle) for each in results[name]]))
        for name in results
    ]
    if dist.get_rank() == 0:
        print(
            f"equal lengths, medians of {rounds} rounds: static {static:.3f} s, shared "
            f"{shared:.3f} s ({shared / static - 1:+.1%}); work of an engine {work[0]:.3f} and "
            f"{work[1]:.3f} s ({work[1] / work[0] - 1:+.1%}); waiting for clocks {waits:.1%}; a "
            f"step of an engine {step:.2f} ms, an exchange {exchange:.2f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", nargs="*", choices=QUANTILES, default=list(KINDS))
    parser.add_argument("--size", choices=SIZES, default="0.7M", help="of the model")
    parser.add_argument("--limit", type=int, default=2048)
    parser.add_argument(
        "--places", type=int, default=16, help="requests that an engine runs at once"
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5, help="of the comparison at equal lengths")
    parser.add_argument(
        "--costs", type=Path, help="file to write the costs of an engine to, for the simulator"
    )
    args = parser.parse_args()
    init_process_group(600)
    workload = Workload("equal", dist.get_world_size(), args.limit, args.places, steps=args.steps)
    with tempfile.TemporaryDirectory() as directory:
        engine = build_engine(workload, Path(directory), SIZES[args.size])
    if dist.get_rank() == 0:
        print_bounds(workload)
    sharing_cost(engine, workload, args.rounds)
    records: list[dict[str, Any]] = []
    for number, kind in enumerate(args.lengths):
        results: dict[str, tuple[Figures, float]] = {}
        for name, variant in VARIANTS.items():
            results[name] = measure(engine, workload.of_kind(kind), variant)
            of_rank = {"steps": engine.steps, "added": engine.added, "exchanges": engine.exchanges}
            records += gather_objects(of_rank)
        if dist.get_rank() == 0:
            costs = fit_costs(records, engine)
            if args.costs is not None:
                args.costs.write_text(json.dumps(asdict(costs)))
            report(workload.of_kind(kind), results, costs, has_header=number == 0)
    engine.close()
    shut_down()


def report(
    workload: Workload, results: Mapping[str, tuple[Figures, float]], costs: Costs, has_header: bool
) -> None:
    """Print the measured figures, the simulator's time and the time by the clock."""
    if has_header:
        titles, line = HEADER.split("\n")
        print(
            f"{titles} simulated s a step | simulated / measured | s by the clock "
            f"|\n{line}---|---|---|"
        )
    least = bound(workload, costs)
    for name, (figures, wall) in results.items():
        simulated = simulate(workload, VARIANTS[name], costs)
        print(
            f"{row(workload, name, figures, results['static'][0], least)} {simulated.seconds:.2f} "
            f"| {simulated.seconds / figures.seconds:.3f} | {wall:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
