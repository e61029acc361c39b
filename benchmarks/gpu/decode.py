"""Decoding on one GPU: vLLM's scheduler and output processor as vLLM steps them, and the rollout
engine, over the same engine and the same requests.

    OMP_NUM_THREADS=1 python benchmarks/gpu/decode.py                                   # 0.5B
    OMP_NUM_THREADS=1 python benchmarks/gpu/decode.py --model 7B --requests 256

The weights are made up, and no response ends before its last token. Rounds of both alternate;
tokens and log-probs of all responses must be equal. Bound of a step: the GPU reads all weights once
(0.99 GB at 0.5B, 15.2 GB at 7B) and the KV cache of each request. GPU: kernel time of the profiler
over the time of a step without it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.append(str(Path(__file__).parents[1]))
from decode_host import VARIANTS, Variant, drain, make_scheduler, requests_of, write_config

from rlhf_mc import platform
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.data.batch import Generation
from rlhf_mc.patching import replaced
from rlhf_mc.rollout.base import Request, Sampling
from rlhf_mc.rollout.vllm_engine import VLLMEngine
from rlhf_mc.runtime.garbage_collector import without_garbage_collector
from rlhf_mc.topology.groups import shut_down
from rlhf_mc.topology.rendezvous import init_process_group

MODELS = {
    "tiny": (64, 2, 2, 2, 128, 512),
    "0.5B": (896, 24, 14, 2, 4864, 151_936),
    "7B": (3584, 28, 28, 4, 18_944, 152_064),
}
"""Hidden size, layers, heads, KV heads, feed-forward size, vocabulary."""
PROMPT_LEN = 64
PROFILED = 20
"""Steps whose kernels are measured."""


def build_engine(model: str, places: int, num_tokens: int) -> VLLMEngine:
    """Build an engine of a model with random weights."""
    with tempfile.TemporaryDirectory() as directory:
        tree = write_config(Path(directory), *MODELS[model])
        cfg = RolloutConfig(max_num_seqs=places, free_cache_engine=False)
        dtype = "bfloat16" if platform.use_cuda() else "float32"
        length = PROMPT_LEN + num_tokens
        engine = VLLMEngine(
            directory, ModelShape.from_hf_config(tree), cfg, [[0]], 0, length, dtype, seed=0
        )
    draw = torch.Generator(platform.device()).manual_seed(0)
    for param in engine.params.values():
        if param.dim() > 1:
            param.normal_(std=0.02, generator=draw)
        else:
            param.fill_(1.0)
    engine.weights_updated()
    return engine


def run_round(
    engine: VLLMEngine,
    variant: Variant,
    requests: Sequence[Request],
    num_tokens: int,
    profiled: bool,
) -> tuple[dict[int, Generation], float, float]:
    """Generate all responses. Return them, seconds of a step in which all requests decode, and
    kernel seconds of such a step if `profiled`."""
    scheduler = make_scheduler(engine, variant.scheduler)
    seconds: list[float] = []
    kernels = 0.0
    responses: dict[int, Generation] = {}
    recorder = profile(activities=[ProfilerActivity.CUDA]) if profiled else None
    with without_garbage_collector(), replaced(engine._core, "scheduler", scheduler):
        steps = variant(engine)
        steps.add(requests, Sampling(1.0, num_tokens, ()))
        while steps.num_unfinished:
            decodes = not scheduler.waiting and not any(
                request.is_prefill_chunk for request in scheduler.running
            )
            if recorder is not None and len(seconds) == 1:
                recorder.start()
            start = time.perf_counter()
            ended = steps.step()
            if decodes and not ended:
                seconds.append(time.perf_counter() - start)
            if recorder is not None and len(seconds) == 1 + PROFILED:
                recorder.stop()
                kernels = (
                    sum(event.self_device_time_total for event in recorder.key_averages())
                    / 1e6
                    / PROFILED
                )
                recorder = None
            responses |= ended
        drain(engine)
    engine._llm.reset_prefix_cache()
    return responses, statistics.mean(seconds[2:]), kernels


def measure(
    engine: VLLMEngine, num: int, num_tokens: int, rounds: int
) -> dict[str, tuple[float, float]]:
    """Return for each variant the median seconds of a decoding step, and its kernels' seconds (0
    without a GPU). Raise RuntimeError if any response differs."""
    requests = requests_of(num, PROMPT_LEN)
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    kernels = {}
    for number in range(rounds + 1):  # the first is a warm-up, and profiled
        responses = []
        for name, variant in VARIANTS.items():
            profiled = number == 0 and platform.use_cuda()
            generated, seconds, kernel_seconds = run_round(
                engine, variant, requests, num_tokens, profiled
            )
            responses.append(generated)
            if number:
                found[name].append(seconds)
            else:
                kernels[name] = kernel_seconds
        if responses[0] != responses[1]:
            raise RuntimeError(f"{num} requests: the two variants draw different responses")
    return {name: (statistics.median(found[name]), kernels[name]) for name in VARIANTS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="0.5B")
    parser.add_argument("--requests", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--tokens", type=int, default=256, help="of a response")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    init_process_group(600)
    engine = build_engine(args.model, max(args.requests), args.tokens)
    print(f"{args.model}: {engine.summary}")
    print(
        "| requests | variant | ms a step | tokens/s | GPU ms a step | GPU "
        "|\n|---|---|---|---|---|---|"
    )
    for num in args.requests:
        for name, (seconds, kernels) in measure(engine, num, args.tokens, args.rounds).items():
            gpu = f"{kernels * 1e3:.2f} | {kernels / seconds:.0%}" if kernels else "– | –"
            print(
                f"| {num} | {name} | {seconds * 1e3:.2f} | {num / seconds:,.0f} | {gpu} |",
                flush=True,
            )
    engine.close()
    shut_down()


if __name__ == "__main__":
    main()
