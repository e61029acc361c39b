"""Functions that a rank runs in test_decode.py: vLLM's own scheduler and output processor beside
the rollout engine's, over the same requests."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rollout_cases import built_engine
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import input_processor
from vllm.v1.worker.cpu_worker import CPUWorker

from rlhf_mc.data.batch import Generation
from rlhf_mc.patching import replaced
from rlhf_mc.rollout.base import Request, Sampling
from rlhf_mc.rollout.vllm_engine import VLLMEngine
from rlhf_mc.rollout.vllm_scheduler import DecodeScheduler

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "gpu")]

STOP = 2
MAX_MODEL_LEN = 160


def _number(name: str) -> int:
    return int(name.partition("-")[0])


def _schedule(output: Any) -> dict[str, Any]:
    """Return a step's schedule, with numbers in place of vLLM's names."""
    cached = output.scheduled_cached_reqs
    return {
        "new": [
            (
                _number(new.req_id),
                new.prompt_token_ids,
                new.prefill_token_ids,
                new.block_ids,
                new.num_computed_tokens,
            )
            for new in output.scheduled_new_reqs
        ],
        "cached": [_number(name) for name in cached.req_ids],
        "resumed": sorted(map(_number, cached.resumed_req_ids)),
        "tokens": {_number(name): tokens for name, tokens in cached.all_token_ids.items()},
        "lists": (
            cached.new_token_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
        ),
        "scheduled": [
            (_number(name), count) for name, count in output.num_scheduled_tokens.items()
        ],
        "total": output.total_num_scheduled_tokens,
        "finished": sorted(map(_number, output.finished_req_ids)),
        "preempted": sorted(map(_number, output.preempted_req_ids or ())),
        "zeroed": output.new_block_ids_to_zero,
        "copied": [vars(copy) for copy in output.kv_cache_block_copies or ()],
        "experts": output.aux_output_connector_metadata
        and {
            _number(name): first
            for name, first in output.aux_output_connector_metadata.requests.items()
        },
    }


def _state(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's state, blocks of the cache included, with numbers in place of vLLM's
    names."""
    pool = scheduler.kv_cache_manager.block_pool
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    return {
        "running": [_number(request.request_id) for request in scheduler.running],
        "waiting": [_number(request.request_id) for request in scheduler.waiting],
        "requests": {
            _number(name): (
                request.status,
                list(request.all_token_ids),
                list(request.output_token_ids),
                list(request.block_hashes),
                request.num_computed_tokens,
                request.num_output_placeholders,
                request.num_in_flight_tokens,
                request.num_stale_output_tokens,
                request.is_prefill_chunk,
            )
            for name, request in scheduler.requests.items()
        },
        "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        "hashes": [(block.block_hash, block.ref_cnt) for block in pool.blocks],
        "blocks": {
            _number(name): [b.block_id for b in blocks]
            for name, blocks in manager.req_to_blocks.items()
        },
        "num_cached": {_number(name): count for name, count in manager.num_cached_block.items()},
    }


def _requests(rng: random.Random, count: int) -> list[Request]:
    """Return requests of which some share a prompt, are begun already, or would exceed the model's
    length."""
    prompts = [rng.choices(range(3, 250), k=rng.randrange(1, 70)) for _ in range(count // 3)]
    out = []
    for number in range(count):
        num_begun = rng.choice([0, 0, 5, 17])
        begun = Generation(
            rng.choices(range(3, 250), k=num_begun), [-0.5] * num_begun, finished=False
        )
        prompt = np.array(rng.choice(prompts), np.int32)
        out.append(
            Request(number, prompt, number, begun, num_begun + rng.choice([1, 2, 40, 70, 100]))
        )
    return out


class Case(NamedTuple):
    """Random requests, and settings of the scheduler."""

    seed: int
    num_blocks: int
    """Of the KV cache, 16 tokens each; a request has up to 10."""
    asynchronous: bool = True
    """A step is scheduled before the result of the last one, as on a GPU."""
    v2: bool = True
    """The schedule is for the GPU's model runner."""
    caching: bool = True
    """Requests share blocks of equal prefixes."""
    experts: bool = False
    """Responses have the experts of their tokens."""


def host_steps(cases: Sequence[Case]) -> list[dict[str, int]]:
    """Step vLLM's scheduler and the rollout engine's through the same requests, over a runner that
    computes nothing. Compare schedule, states and responses of each step. Return for each case how
    often what happened."""
    import decode_host

    engine = decode_host.build_engine(8, MAX_MODEL_LEN, step_tokens=MAX_MODEL_LEN)
    counts = []
    try:
        for case in cases:
            vllms: Counter[str] = Counter()
            ours: Counter[str] = Counter()
            wanted = _trace(engine, decode_host.VLLMsSteps, case, vllms)
            found = _trace(engine, decode_host.EngineSteps, case, ours)
            assert len(wanted) == len(found), case
            for place, (one, other) in enumerate(zip(wanted, found, strict=True)):
                differs = {
                    key: (one[key], other.get(key)) for key in one if one[key] != other.get(key)
                }
                assert one == other, (case, place, differs)
            assert {**vllms, "fast": ours["fast"]} == ours
            counts.append(dict(ours))
    finally:
        engine.close()
    return counts


def _trace(
    engine: VLLMEngine, variant: Any, case: Case, counts: Counter[str]
) -> list[dict[Any, Any]]:
    """Return what a variant does in each step."""
    import decode_host

    rng = random.Random(case.seed)
    trace: list[dict[Any, Any]] = []
    with replaced(engine._core.vllm_config.cache_config, "enable_prefix_caching", case.caching):
        cache = decode_host.full_attention(engine, case.num_blocks)
        scheduler = decode_host.make_scheduler(engine, variant.scheduler, cache)
        scheduler.use_v2_model_runner = case.v2
    if case.experts:
        scheduler.aux_output_connector = AuxOutputSchedulerConnector()
    schedule = scheduler.schedule
    vllms_schedule = AsyncScheduler.schedule

    def recorded(*args: Any) -> Any:
        counts["fast"] += 1
        output = schedule(*args)
        counts["steps"] += 1
        counts["preempted"] += len(output.preempted_req_ids or ())
        counts["stale"] += sum(
            request.num_stale_output_tokens > 0 for request in scheduler.requests.values()
        )
        counts["shared"] += sum(new.num_computed_tokens > 0 for new in output.scheduled_new_reqs)
        trace.append(_schedule(output))
        return output

    def by_vllm(*args: Any) -> Any:
        counts["fast"] -= 1
        return vllms_schedule(*args)

    numbers = itertools.count()
    with (
        # vLLM frees aborted requests in the order of a set of their names, which it draws.
        replaced(input_processor, "random_uuid", lambda: f"{next(numbers):08}"),
        nullcontext() if case.caching else replaced(decode_host, "hasher", lambda engine: None),
        decode_host.host_only(engine, scheduler, decode_host.NoModel(STOP), case.asynchronous),
        replaced(scheduler, "schedule", recorded),
        replaced(AsyncScheduler, "schedule", by_vllm),
        replaced(engine, "_expert_layers", [0] if case.experts else []),
    ):
        steps = variant(engine)
        left = _requests(rng, 40)
        while left or steps.num_unfinished:
            if left and rng.random() < 0.2:
                steps.add(left[:3], Sampling(1.0, 120, (1, STOP)))
                del left[:3]
            ended = steps.step() if steps.num_unfinished else {}
            aborted = steps.abort() if rng.random() < 0.01 else {}
            if aborted:
                decode_host.drain(engine)
            left += [
                Request(
                    number, np.array([number + 3], np.int32), number, one, len(one.token_ids) + 9
                )
                for number, one in sorted(aborted.items())
            ]
            trace += [_state(scheduler), _comparable(ended), _comparable(aborted)]
            counts["ended"] += len(ended)
            counts["stopped"] += sum(one.finished for one in ended.values())
            counts["aborted"] += len(aborted)
        decode_host.drain(engine)
    return trace


def _comparable(responses: dict[int, Generation]) -> dict[int, Any]:
    return {
        n: (
            one.token_ids,
            one.log_probs,
            one.finished,
            None if one.experts is None else one.experts.tolist(),
        )
        for n, one in responses.items()
    }


def model_steps(
    checkpoint: str, temperatures: Sequence[float], kv_cache_bytes: int
) -> list[tuple[list[Generation], list[Generation], int]]:
    """Generate responses of each temperature by vLLM's model runner, with vLLM's own scheduler and
    output processor and then with the rollout engine's. Return both, and how many requests vLLM has
    preempted."""
    with (
        replaced(CPUWorker, "determine_available_memory", lambda worker: kv_cache_bytes),
        built_engine(
            checkpoint, 1, MAX_MODEL_LEN, max_num_seqs=8, max_num_batched_tokens=MAX_MODEL_LEN
        ) as engine,
    ):
        return [
            _steps_of_model(engine, Sampling(temperature, 120, (1, STOP)))
            for temperature in temperatures
        ]


def _steps_of_model(
    engine: VLLMEngine, sampling: Sampling
) -> tuple[list[Generation], list[Generation], int]:
    import decode_host

    requests = _requests(random.Random(3), 24)
    found = []
    num_preempted = 0
    for variant, kind in (
        (decode_host.VLLMsSteps, Scheduler),
        (decode_host.EngineSteps, DecodeScheduler),
    ):
        scheduler = decode_host.make_scheduler(engine, kind)
        preempt = scheduler._preempt_request

        def counted(*args: Any, preempt: Any = preempt, **kwargs: Any) -> None:
            nonlocal num_preempted
            num_preempted += 1
            preempt(*args, **kwargs)

        with (
            replaced(engine._core, "scheduler", scheduler),
            replaced(scheduler, "_preempt_request", counted),
        ):
            steps = variant(engine)
            steps.add(requests, sampling)
            responses: dict[int, Generation] = {}
            while steps.num_unfinished > 4:
                responses |= steps.step()
            responses |= steps.abort()
            decode_host.drain(engine)
        found.append([responses[number] for number in range(len(requests))])
    return found[0], found[1], num_preempted


def benchmarks() -> tuple[dict[str, tuple[float, ...]], dict[str, tuple[float, float]]]:
    """Return the results of benchmarks/decode_host.py and benchmarks/gpu/decode.py for a few
    requests."""
    import decode
    import decode_host

    engine = decode_host.build_engine(8, 64)
    try:
        host = decode_host.compare(engine, 6, 20, rounds=1)
    finally:
        engine.close()
    engine = decode.build_engine("tiny", 8, 24)
    try:
        return host, decode.measure(engine, 6, 24, rounds=1)
    finally:
        engine.close()
