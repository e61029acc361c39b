"""Host time of a decoding step: vLLM's scheduler and output processor, stepped as vLLM does it, and
the rollout engine. A runner that computes nothing replaces the model, and its time is left out.

    OMP_NUM_THREADS=1 python benchmarks/decode_host.py

As on a GPU: asynchronous scheduling, blocks of 16 tokens, log-probs as an array from the runner.
The
garbage collector is off, as in a rollout. Rounds of both variants alternate, and all their tokens
and
log-probs must be equal. Times are of the processor: medians over all steps in which every request
decodes. Bound: a step of N requests yields 8 N bytes, which numpy appends in 0.01 ms at N = 256.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.data.batch import NOTHING, Generation
from rlhf_mc.patching import replaced
from rlhf_mc.rollout.base import Request, Sampling
from rlhf_mc.rollout.draws import Draws
from rlhf_mc.rollout.vllm_engine import VLLMEngine
from rlhf_mc.rollout.vllm_options import sampling_params
from rlhf_mc.rollout.vllm_patches import drawing
from rlhf_mc.rollout.vllm_scheduler import DecodeScheduler
from rlhf_mc.runtime.garbage_collector import without_garbage_collector
from rlhf_mc.topology.groups import shut_down
from rlhf_mc.topology.rendezvous import init_process_group

import vllm  # isort: skip  (vllm_patches sets what it reads)
from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

BLOCK_SIZE = 16
VOCAB = 512


def write_config(
    directory: Path, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int
) -> Any:
    """Write the config.json of a model in Qwen2's shape. Return its tree."""
    tree = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(tree))
    return tree


class NoModel:
    """Stands for vLLM's executor. A token and its log-prob are a function of request and
    position."""

    def __init__(self, stop_token: int | None = None) -> None:
        self.seconds = 0.0
        """Processor time in this class."""
        self._stop_token = stop_token
        """Token that is drawn at one of 64 positions; None: never."""
        self._known: dict[str, int] = {}
        """Tokens that each request had when it was scheduled first, or again."""
        self._first_row: dict[str, int] = {}
        """Place of the first token whose experts are not returned yet."""
        self._output: Any = None

    def execute_model(self, output: Any, non_block: bool = False) -> Any:
        """Take a step's schedule."""
        self._output = output
        return _done(None) if output.num_scheduled_tokens else _done(ModelRunnerOutput([], {}))

    def sample_tokens(self, grammar_output: None, non_block: bool = False) -> Any:
        """Return the step's tokens."""
        start = time.thread_time()
        step = self._output
        cached = step.scheduled_cached_reqs
        places = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in step.scheduled_new_reqs:
            places[new.req_id] = new.num_computed_tokens
            self._known[new.req_id] = len(new.prefill_token_ids or new.prompt_token_ids)
        names = list(step.num_scheduled_tokens)
        ends = np.array([places[name] + step.num_scheduled_tokens[name] for name in names])
        numbers = np.array([int(name.partition("-")[0]) for name in names])
        noise = (numbers + 1) * 7919 + ends * 104729
        tokens = 3 + noise % (VOCAB - 3)
        if self._stop_token is not None:
            tokens[noise % 64 == 0] = self._stop_token
        draws = (ends >= [self._known[name] for name in names]).tolist()
        sampled = [
            [token] if draw else [] for token, draw in zip(tokens.tolist(), draws, strict=True)
        ]
        log_probs = LogprobsLists(
            tokens[:, None], -(1.0 / tokens[:, None]).astype(np.float32), tokens
        )
        output = ModelRunnerOutput(
            names, {name: row for row, name in enumerate(names)}, sampled, log_probs
        )
        if step.aux_output_connector_metadata is not None:
            output.aux_output_connector_output = self._experts(step, names, ends.tolist(), draws)
        self.seconds += time.thread_time() - start
        return _done(output) if non_block else output

    def _experts(
        self, step: Any, names: list[str], ends: list[int], draws: list[bool]
    ) -> dict[str, AuxRequestOutput]:
        """Return a choice of experts for each token up to `ends`: a function of request and
        place."""
        for new in step.scheduled_new_reqs:
            self._first_row[new.req_id] = step.aux_output_connector_metadata.requests[new.req_id]
        outputs = {}
        for name, end, is_drawn in zip(names, ends, draws, strict=True):
            if is_drawn:
                first = self._first_row[name]
                rows = (int(name.partition("-")[0]) + np.arange(first, end)) % 8
                outputs[name] = AuxRequestOutput(first, rows[:, None, None].astype(np.uint8))
                self._first_row[name] = end
        return outputs


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def build_engine(places: int, max_model_len: int, step_tokens: int = 8192) -> VLLMEngine:
    """Build an engine of a small model, for at most `places` requests and step_tokens tokens at
    once."""
    with tempfile.TemporaryDirectory() as directory:
        tree = write_config(Path(directory), 64, 1, 2, 2, 64, VOCAB)
        cfg = RolloutConfig(max_num_seqs=places, max_num_batched_tokens=step_tokens)
        shape = ModelShape.from_hf_config(tree)
        return VLLMEngine(directory, shape, cfg, [[0]], 0, max_model_len, "float32", seed=0)


def make_scheduler(
    engine: VLLMEngine, kind: type[Scheduler], cache: KVCacheConfig | None = None
) -> Any:
    """Return a new scheduler of this class, over the engine's own KV cache or another one of blocks
    of BLOCK_SIZE."""
    core = engine._core
    own = core.scheduler
    sizes = (own.block_size, own.hash_block_size) if cache is None else (BLOCK_SIZE, BLOCK_SIZE)
    cache = cache or own.kv_cache_config
    with replaced(core.vllm_config.cache_config, "num_gpu_blocks", cache.num_blocks):
        return kind(core.vllm_config, cache, core.structured_output_manager, *sizes)


def full_attention(engine: VLLMEngine, num_blocks: int) -> KVCacheConfig:
    """Return a KV cache of full attention that takes no memory."""
    dtype = engine._core.vllm_config.model_config.dtype
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=dtype)
    return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])


def drain(engine: VLLMEngine) -> None:
    """Take the steps that vLLM has begun ahead, and the one that tells the runner which requests
    have ended."""
    while engine._core.batch_queue or engine._core.scheduler.has_requests():
        engine._llm.llm_engine.engine_core.get_output()


@contextmanager
def host_only(
    engine: VLLMEngine, scheduler: Any, model: NoModel, asynchronous: bool = True
) -> Iterator[None]:
    """Let the engine step this scheduler over a runner that does nothing, while the body runs."""
    core = engine._core
    queue: deque[Any] | None = deque(maxlen=2) if asynchronous else None
    with (
        replaced(core, "scheduler", scheduler),
        replaced(core, "model_executor", model),
        replaced(core, "batch_queue", queue),
        replaced(core, "batch_queue_size", 2 if asynchronous else 1),
        replaced(core, "async_scheduling", asynchronous),
        replaced(core, "step_fn", core.step_with_batch_queue if asynchronous else core.step),
        replaced(core, "request_block_hasher", hasher(engine)),
    ):
        yield


def hasher(engine: VLLMEngine) -> Any:
    """Return vLLM's hash function of blocks, for prefix caching."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    function = get_hash_fn_by_name(engine._core.vllm_config.cache_config.prefix_caching_hash_algo)
    init_none_hash(function)
    return get_request_block_hasher(BLOCK_SIZE, function)


class VLLMsSteps:
    """Steps of LLMEngine, with a dict and an object for the log-prob of each token."""

    scheduler: type[Scheduler] = AsyncScheduler

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine._llm.llm_engine
        self._requests: dict[int, Request] = {}
        self._draws: Draws | None = None

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    def add(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Add requests, as the engine does."""
        if not platform.use_cuda():  # the trainer draws, as for its own engine
            self._draws = self._draws if self._requests else Draws(sampling)
            self._draws.add(requests)
        for request in requests:
            params = sampling_params(sampling, request, draws_itself=self._draws is None)
            params.logprobs = 0
            params.output_kind = RequestOutputKind.FINAL_ONLY
            prompt = vllm.TokensPrompt(
                prompt_token_ids=[*request.prompt.tolist(), *request.partial.token_ids]
            )
            self._engine.add_request(str(request.number), prompt, params)
            self._requests[request.number] = request

    def step(self) -> dict[int, Generation]:
        """Take a step. Return the responses that have ended."""
        responses = {}
        with nullcontext() if self._draws is None else drawing(self._draws):
            ended = self._engine.step()
        for one in ended:
            responses[int(one.request_id)] = self._response(int(one.request_id), one.outputs[0])
        return responses

    def abort(self) -> dict[int, Generation]:
        """End all requests. Return their tokens sampled so far."""
        states = list(self._engine.output_processor.request_states.items())
        outputs = [
            (int(state.external_req_id), state._new_completion_output([], None, None))
            for _, state in states
        ]
        responses = {number: self._response(number, output) for number, output in outputs}
        self._engine.abort_request([name for name, _ in states], internal=True)
        return responses

    def _response(self, number: int, output: Any) -> Generation:
        begun = self._requests.pop(number).partial
        entries = zip(output.token_ids, output.logprobs, strict=True)
        return Generation(
            [*begun.token_ids, *output.token_ids],
            [*begun.log_probs, *(entry[token].logprob for token, entry in entries)],
            output.finish_reason == "stop",
            output.routed_experts,
        )


class EngineSteps:
    """Steps of the rollout engine."""

    scheduler: type[Scheduler] = DecodeScheduler

    def __init__(self, engine: VLLMEngine) -> None:
        self.add = engine.add
        self.step = engine.step
        self.abort = engine.abort
        self._engine = engine

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not ended."""
        return self._engine.num_unfinished


class VLLMsSchedule(DecodeScheduler):
    """The engine's scheduler as it is with sliding windows or linear attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._has_one_cache = False


class EngineStepsOfVLLMsSchedule(EngineSteps):
    """Steps of the rollout engine for a model with several kinds of KV cache."""

    scheduler = VLLMsSchedule


Variant = type[VLLMsSteps] | type[EngineSteps]
VARIANTS: dict[str, Variant] = {"as vLLM does it": VLLMsSteps, "rollout engine": EngineSteps}
HOST_VARIANTS = VARIANTS | {"rollout engine, vLLM's schedule": EngineStepsOfVLLMsSchedule}


@dataclass
class Times:
    """Milliseconds of each decoding step."""

    step: list[float] = field(default_factory=list)
    schedule: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)

    def medians(self) -> tuple[float, float, float, float]:
        """Return the median step, schedule, update, and what is left: outputs and the step's own
        code."""
        step, schedule, update = (
            statistics.median(each) for each in (self.step, self.schedule, self.update)
        )
        return step, schedule, update, step - schedule - update


def requests_of(num: int, prompt_len: int) -> list[Request]:
    """Return requests with prompts of their own."""
    return [
        Request(i, np.full(prompt_len, 3 + i % (VOCAB - 3), np.int32), 1000 + i, NOTHING)
        for i in range(num)
    ]


def run_round(
    engine: VLLMEngine, variant: Variant, requests: Sequence[Request], num_tokens: int, times: Times
) -> dict[int, Generation]:
    """Generate responses of num_tokens tokens. Add the times of the steps in which all requests
    decode. Return the responses."""
    scheduler = make_scheduler(engine, variant.scheduler, full_attention(engine, 1 << 16))
    scheduler.use_v2_model_runner = True
    model = NoModel()
    spent = [0.0, 0.0]

    def timed(index: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.thread_time()
            result = function(*args)
            spent[index] += time.thread_time() - start
            return result

        return run

    responses: dict[int, Generation] = {}
    with (
        without_garbage_collector(),
        host_only(engine, scheduler, model),
        replaced(scheduler, "schedule", timed(0, scheduler.schedule)),
        replaced(scheduler, "update_from_output", timed(1, scheduler.update_from_output)),
    ):
        steps = variant(engine)
        steps.add(requests, Sampling(1.0, num_tokens, (1, 2)))
        while steps.num_unfinished:
            decodes = not scheduler.waiting and len(scheduler.running) == len(requests)
            decodes &= not any(request.is_prefill_chunk for request in scheduler.running)
            spent[:] = 0.0, 0.0
            model.seconds = 0.0
            start = time.thread_time()
            ended = steps.step()
            seconds = time.thread_time() - start - model.seconds
            if decodes and not ended:
                for into, value in zip(
                    (times.step, times.schedule, times.update), (seconds, *spent), strict=True
                ):
                    into.append(value * 1e3)
            responses |= ended
        drain(engine)
    return responses


def compare(
    engine: VLLMEngine, num: int, num_tokens: int, rounds: int
) -> dict[str, tuple[float, float, float, float]]:
    """Return the medians of each variant. Raise RuntimeError if any response differs."""
    requests = requests_of(num, 32)
    times = {name: Times() for name in HOST_VARIANTS}
    for _ in range(rounds):
        responses = [
            run_round(engine, variant, requests, num_tokens, times[name])
            for name, variant in HOST_VARIANTS.items()
        ]
        if any(each != responses[0] for each in responses):
            raise RuntimeError(f"{num} requests: the variants draw different responses")
    return {name: each.medians() for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--tokens", type=int, default=200, help="of a response")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    init_process_group(600)
    assert dist.get_world_size() == 1
    engine = build_engine(max(args.requests), 32 + args.tokens)
    print(
        "| requests | variant | ms a step | schedule | update | outputs and the rest | of vLLM's |"
    )
    print("|---|---|---|---|---|---|---|")
    for num in args.requests:
        results = compare(engine, num, args.tokens, args.rounds)
        whole = next(iter(results.values()))[0]
        for name, medians in results.items():
            cells = " | ".join(f"{each:.2f}" for each in medians)
            print(f"| {num} | {name} | {cells} | {medians[0] / whole:.2f} |", flush=True)
    engine.close()
    shut_down()


if __name__ == "__main__":
    main()
