"""Functions that test_sglang.py compares between SGLang and vLLM. vLLM runs them in the workers of
the other tests. SGLang has an environment of its own, in which this file is a program:

python sglang_cases.py DIRECTORY

It reads DIRECTORY/calls.json, a list of (world size, name of a function, its arguments), imports
the libraries once, forks the ranks of each world size, and writes each rank's results.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing as mp
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path += [str(path) for path in (Path(__file__).parents[1], Path(__file__).parents[2] / "tools")]
import forked
import numpy as np
import torch
import torch.distributed as dist
from cases import aliased_params, built_run

from rlhf_mc.config.errors import UserError
from rlhf_mc.data.batch import NOTHING, Generation, Responses
from rlhf_mc.data.responses import exchange_responses
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.patching import replaced
from rlhf_mc.reshard.weight_sync import WeightSync
from rlhf_mc.rollout.base import KV_CACHE, WEIGHTS, Request, RolloutEngine, Sampling
from rlhf_mc.rollout.engine_loop import generate_responses
from rlhf_mc.rollout.work_sharing import VirtualClock
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer import loop, step_state
from rlhf_mc.trainer.pool import generate

LONGEST = 24
STOP = tuple(range(4, 24))
"""End tokens: a response ends after 13 tokens on average."""
KINDS = {
    "greedy": Sampling(0.0, LONGEST, ()),
    "sampled": Sampling(1.0, LONGEST, ()),
    "stopped": Sampling(0.8, LONGEST, STOP),
    "truncated": Sampling(1.2, LONGEST, STOP, top_p=0.9, top_k=20),
}


def as_lists(responses: Responses) -> list[dict[str, Any]]:
    """Return the responses as JSON has them."""
    return [
        {"tokens": r.token_ids, "log_probs": r.log_probs, "finished": r.finished}
        for r in responses.generations()
    ]


def requests_of(partial: Sequence[Generation], **kwargs: Any) -> list[Request]:
    """Return a request of each partial response, whose prompts are random tokens; two are equal,
    and share a prefix with a third."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(4, 260, 3 + 4 * i % 19).astype(np.int32) for i in range(len(partial))]
    prompts[1] = prompts[0]
    prompts[2] = np.concatenate([prompts[0], prompts[2]])
    return [
        Request(i, prompt, 1000 + i, before, **kwargs)
        for i, (prompt, before) in enumerate(zip(prompts, partial, strict=True))
    ]


def respond(engine: RolloutEngine, requests: Sequence[Request], sampling: Sampling) -> Responses:
    """Return the response to each request on every rank."""
    own = generate_responses(engine, requests, sampling, VirtualClock())
    return exchange_responses(own, engine.groups, len(requests))


def in_parts(engine: RolloutEngine, steps: int) -> Responses:
    """Abort the responses after some steps of the engine, and continue them."""
    sampling = KINDS["stopped"]
    engine.add(requests_of([NOTHING] * 12), sampling)
    partial: dict[int, Generation] = {}
    for _ in range(steps):
        partial |= engine.step()
    aborted = engine.abort()
    assert aborted and partial and engine.num_unfinished == 0
    left = dict(sorted(aborted.items()))
    again = [
        Request(number, old.prompt, old.seed, left[old.number])
        for number, old in enumerate(r for r in requests_of([NOTHING] * 12) if r.number in left)
    ]
    engine.weights_updated()  # a cache of the aborted requests would not be discarded
    engine.add(again, sampling)
    while engine.num_unfinished:
        partial |= {list(left)[number]: response for number, response in engine.step().items()}
    return Responses.of([partial[i] for i in range(12)])


def lose_memory_in_sleep(engine: Any, actor: Iterable[torch.Tensor]) -> None:
    """Let a sleep on a CPU lose what torch_memory_saver does on a GPU, all but the actor's memory.
    As there, no part can be paused or resumed twice."""
    scheduler = engine._scheduler
    shared = {param.untyped_storage().data_ptr() for param in actor}
    pool = scheduler.req_to_token_pool.req_to_token
    cache = scheduler.tp_worker.model_runner.token_to_kv_pool
    model = engine._model
    weights = [t.data for t in (*model.parameters(), *model.buffers())]
    lost = {
        WEIGHTS: [t for t in weights if t.untyped_storage().data_ptr() not in shared],
        KV_CACHE: [pool, *cache.k_buffer, *cache.v_buffer],
    }
    paused = set()

    def pause(tag: str) -> None:
        assert tag not in paused
        paused.add(tag)
        for tensor in lost[tag]:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1 << 30)

    saver = SimpleNamespace(pause=pause, resume=paused.remove)
    scheduler.memory_saver_adapter = scheduler.weight_updater.memory_saver_adapter = saver


def generated(config_path: str, overrides: list[str], every_kind: bool = True) -> dict[str, Any]:
    """Generate sampled responses, or of every kind, also with a limit of each response and in
    parts; then with other weights, and with these after a sleep."""
    with built_run(config_path, overrides) as run:
        engine = run.rollout
        generate.update_weights(run, PhaseTimer())
        new = requests_of([NOTHING] * 12)
        kinds = KINDS if every_kind else ("sampled",)
        results = {kind: as_lists(respond(engine, new, KINDS[kind])) for kind in kinds}
        if every_kind:
            short = requests_of([NOTHING] * 12, max_tokens=5)
            results["short"] = as_lists(respond(engine, short, KINDS["sampled"]))
            results["parts"] = as_lists(in_parts(engine, 8))
        for name, param in run.actor.params.items():
            if "norm" not in name:
                param.data.mul_(1.25)
        generate.update_weights(run, PhaseTimer())
        results["changed"] = as_lists(respond(engine, new, KINDS["sampled"]))
        out: dict[str, Any] = {"results": results, "summary": engine.summary}
        out["groups"] = [list(ranks) for ranks in engine.groups]
        out["parameters"] = engine.num_parameters, engine.weight_bytes
        out["cost"] = engine.cached_token_cost
        out["aliased"] = aliased_params(run)
        if run.config.rollout.name == "sglang":  # vLLM's engine for CPUs does not sleep
            lose_memory_in_sleep(engine, run.actor.params.values())
            for parts in (WEIGHTS,), (WEIGHTS, KV_CACHE):
                engine.sleep()
                assert not engine.awake
                for part in parts:
                    engine.wake_up(part)
            # an index of the KV cache: a row of a CUDA graph that no request has reads there
            assert not engine._scheduler.req_to_token_pool.req_to_token[0].any()
            generate.update_weights(run, PhaseTimer())
            results["woken"] = as_lists(respond(engine, new, KINDS["sampled"]))
    return out


def steps(config_path: str, overrides: list[str]) -> list[dict[str, Any]]:
    """Run the steps of the loop. Return the metrics of each, and a digest of its tokens."""
    rows = []
    with built_run(config_path, overrides) as run:
        for number in range(1, run.config.trainer.total_training_steps + 1):
            state = step_state.begin_step(
                number, RankStatus(), (number - 1) * run.config.data.train_batch_size
            )
            batch = loop.one_step(run, state, StopRequests(run.config.trainer))
            digest = hashlib.sha256(batch.tokens.numpy().tobytes()).hexdigest()
            rows.append({"tokens": digest, **state.metrics})
    return rows


def error_of(config_path: str, overrides: list[str]) -> str:
    """Return the message with which the run ends before its first step."""
    try:
        with built_run(config_path, overrides):
            return ""
    except UserError as error:
        return str(error)


@contextlib.contextmanager
def cache_of(num_tokens: int) -> Iterator[None]:
    """Let SGLang's KV cache hold this many tokens."""
    from rlhf_mc.rollout import sglang_engine

    original = sglang_engine.server_arguments

    def arguments(*args: Any) -> dict[str, Any]:
        return original(*args) | {"max_total_tokens": num_tokens}

    with replaced(sglang_engine, "server_arguments", arguments):
        yield


def error_with_small_cache(config_path: str, overrides: list[str]) -> str:
    """Return the message where SGLang's KV cache holds less than a sequence."""
    with cache_of(64):
        return error_of(config_path, overrides)


def crowded(config_path: str, overrides: list[str]) -> dict[str, Any]:
    """Generate responses with a KV cache for few of them. Return them, and how many requests SGLang
    has preempted."""
    with cache_of(100), built_run(config_path, overrides) as run:
        generate.update_weights(run, PhaseTimer())
        engine = run.rollout
        engine.add(requests_of([NOTHING] * 12), KINDS["sampled"])
        states = [state for _, state in engine._requests.values()]
        ended: dict[int, Generation] = {}
        while engine.num_unfinished:
            ended |= engine.step()
        return {
            "results": as_lists(Responses.of([ended[i] for i in range(12)])),
            "preempted": sum(state.retraction_count for state in states),
        }


def part(update_weights: bool) -> tuple[str, str]:
    """Run tools/gpu_check.py's part of SGLang, with or without its weight updates. Return its
    verdict, and the reason where it has failed."""
    sys.path.append(str(Path(__file__).parents[1] / "gpu"))
    import part_cases

    update = WeightSync.run if update_weights else lambda *args: None
    with replaced(WeightSync, "run", update):
        result = part_cases.run("sglang")
    return result.verdict, result.reason


def _rank(variables: dict[str, str], calls: Sequence[tuple[str, Any]], output: Path) -> None:
    from rlhf_mc.topology.rendezvous import init_process_group

    os.environ.update(variables)
    torch.set_num_threads(1)
    init_process_group(300)
    # A cache of rollout.cpu_kvcache_space_gb, 1 at least, is filled with zeros, and stays in memory
    # after its engine.
    with cache_of(1 << 14):
        results = [globals()[name](**kwargs) for name, kwargs in calls]
    output.write_text(json.dumps(results))
    dist.barrier()


def main(directory: Path) -> int:
    """Run the calls. Return the exit code."""
    import rlhf_mc.rollout.sglang_engine  # noqa: F401  (before the ranks are forked)

    calls = json.loads((directory / "calls.json").read_text())
    results: list[Any] = [None] * len(calls)
    for world in sorted({size for size, _, _ in calls}):
        numbers = [number for number, (size, _, _) in enumerate(calls) if size == world]
        outputs = [directory / f"rank_{rank}_of_{world}.json" for rank in range(world)]
        processes = [
            mp.get_context("fork").Process(
                target=_rank, args=(variables, [calls[number][1:] for number in numbers], output)
            )
            for variables, output in zip(forked.rank_variables(world), outputs, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            return 1
        of_ranks = [json.loads(output.read_text()) for output in outputs]
        for number, values in zip(numbers, zip(*of_ranks, strict=True), strict=True):
            results[number] = values
    (directory / "results.json").write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
