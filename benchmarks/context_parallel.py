"""Context-parallel sizes chosen for each micro-batch (dynamic_context_parallel) against fixed ones,
on long-tailed lengths. Two tables of the time of an update over the shortest of a fixed size:

    OMP_NUM_THREADS=1 python benchmarks/context_parallel.py --processes 2  # updates on CPUs
    python benchmarks/context_parallel.py  # the planner's bounds, Qwen3-8B on H100

Bounds. Work: the FLOPs of all sequences, divided by the ranks: no size changes it. Bytes: with p2p
a rank receives the keys and values of s - 1 others in a layer's forward pass, and of 2 s - 1 in its
backward pass. With size 1 it receives none, so the least time is that of even work without any of
these.

In the planner's table a rank's passes take its products at the peak rate, and the bytes that
attention does not hide. Ranks that share a micro-batch begin it together.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rlhf_mc.architectures.operations import BACKWARD, forward_flops
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.model_schema import MegatronConfig
from rlhf_mc.config.roles import tokens_on_rank
from rlhf_mc.data.balance import Shared, num_sharing_ranks
from rlhf_mc.json_files import read
from rlhf_mc.planner.collectives import Passes, PassTokens
from rlhf_mc.planner.gpus import GPUS, Machine
from rlhf_mc.planner.published import MODELS
from rlhf_mc.topology.mesh import Mesh
from rlhf_mc.trainer.token_budget import micro_batches_by_replica, my_micro_batches

TP = 2
GPUS_PER_NODE = 8
NETWORK = 50e9
"""Bytes per second of a GPU to other nodes."""
PROMPT = 16
"""Tokens of each prompt on CPUs."""
LONGEST = 2048
"""Tokens of the longest sequence on CPUs. A rank may have half of it."""


def long_tailed(count: int, median: int, sigma: float, longest: int) -> list[int]:
    """Return log-normal lengths, the longest of which is `longest`."""
    draw = random.Random(0)
    lens = [
        min(longest, max(PROMPT + 1, int(draw.lognormvariate(0.0, sigma) * median)))
        for _ in range(count - 1)
    ]
    return [longest, *lens]


def planned_seconds(
    lens: Sequence[int], micro_batches: list[list[Shared]], shape: ModelShape, world: int
) -> float:
    """Return the bound of the passes of an update."""
    machine = Machine(world, GPUS_PER_NODE, GPUS["h100"].rates, NETWORK)
    clocks = [0.0] * len(micro_batches)
    for at in range(len(micro_batches[0])):
        for first in range(0, len(clocks)):
            micro = micro_batches[first][at]
            if not micro or first % micro.ranks:
                continue
            block = range(first, first + micro.ranks)
            end = max(clocks[rank] for rank in block) + _micro_batch_seconds(
                [lens[i] for i in micro], micro.ranks, shape, world, machine
            )
            for rank in block:
                clocks[rank] = end
    return max(clocks)


def _micro_batch_seconds(
    lens: Sequence[int], size: int, shape: ModelShape, world: int, machine: Machine
) -> float:
    flops = forward_flops(shape, lens, 0.0)
    rate = machine.rates.bfloat16 * TP * size / (1 + BACKWARD)
    results = (
        sum(lens) * shape.hidden_size * shape.vocab_size * 2 * (1 + BACKWARD + 1) / (1 + BACKWARD)
    )
    seconds = (flops.total - flops.output + results) / rate
    if size == 1:
        return seconds
    megatron = MegatronConfig(TP, context_parallel_size=size, cp_comm_type="p2p", dtype="bfloat16")
    mesh = Mesh(world, TP, 1, cp=size)
    tokens = sum(tokens_on_rank(n, size) for n in lens) * size
    passes = Passes(shape, megatron, mesh, 0, cuda=True).forward_and_backward(
        PassTokens(tokens, sum(lens), 0.0, 1)
    )
    received = [one.received(0, GPUS_PER_NODE) for one in passes if one.name == "context parallel"]
    return seconds + max(
        0.0, sum(machine.seconds(*sizes) for sizes in received) - flops.attention / rate
    )


def bounds() -> None:
    """Print the planner's table."""
    shape = ModelShape.from_hf_config(read(MODELS / "qwen3-8b" / "config.json"))
    for world, sequences, median, longest, budget in (
        (8, 128, 2000, 32768, 8448),
        (64, 512, 4000, 131072, 16384),
    ):
        ranks = world // TP
        lens = long_tailed(sequences, median, 1.2, longest)
        times = {}
        for cp in (1, 2, 4, 8, 16):
            if ranks % cp or tokens_on_rank(longest, cp) > budget:
                continue
            for dynamic in (False, True):
                mesh = Mesh(world, TP, 1, cp=cp, dynamic_cp=dynamic)
                plan = micro_batches_by_replica(lens, mesh, budget, shape.sequence_cost)
                micro_batches = [
                    [Shared(micro, num_sharing_ranks(micro, cp)) for micro in each] for each in plan
                ]
                name = f"{'1 to ' if dynamic else ''}{cp}"
                times[name] = (
                    planned_seconds(lens, micro_batches, shape, world),
                    len(micro_batches[0]),
                )
        best = min(seconds for name, (seconds, _) in times.items() if not name.startswith("1 to"))
        machine = Machine(world, GPUS_PER_NODE, GPUS["h100"].rates, NETWORK)
        least = (
            sum(_micro_batch_seconds([n], 1, shape, world, machine) for n in lens) / ranks / best
        )
        what = f"{sequences} sequences up to {longest} tokens, {budget} on a rank"
        print(f"{world} GPUs, TP {TP}, {what}: least {least:.3f}")
        for name, (seconds, count) in times.items():
            print(
                f"  context parallel {name:<8} {seconds / best:.3f} of the best fixed size, "
                f"{count} micro-batches"
            )


def measure(directory: str, rounds: int) -> None:
    """Take updates of a small model with each size, in turn, on every rank."""
    from gpu_parts.engines import make_engine, mesh_groups, objective, token_batch

    from rlhf_mc.config.schema import OptimConfig
    from rlhf_mc.data.batch import RaggedBatch

    dist.init_process_group("gloo")
    world = dist.get_world_size()
    lens = long_tailed(64, 96, 1.0, LONGEST)
    seconds: dict[str, list[float]] = {}
    settings = [(cp, dynamic) for cp in (2, 4) if world % cp == 0 for dynamic in (False, True)]
    engines: dict[str, Any] = {}
    for cp, dynamic in settings:
        with mesh_groups(1, 1, cp=cp, dynamic_cp=dynamic) as groups:
            engine = make_engine(directory, "actor", groups)
            engine.make_trainable(OptimConfig(), total_steps=1)
            engines[f"{'1 to ' if dynamic else ''}{cp}"] = engine
    batch: RaggedBatch = token_batch(250, [PROMPT] * len(lens), [n - PROMPT for n in lens])
    for round_number in range(rounds + 1):
        for name, engine in engines.items():
            scores = batch.rollout_log_probs
            mini = batch.with_fields(
                advantages=scores + 1, old_log_probs=scores, ref_log_probs=scores
            )
            micro_batches = my_micro_batches(engine, mini, LONGEST // 2)
            dist.barrier()
            start = time.perf_counter()
            engine.train_step(mini, micro_batches, objective(engine, mini, "token-mean"))
            dist.barrier()
            if round_number:
                seconds.setdefault(name, []).append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        best = min(value for name, value in medians.items() if not name.startswith("1 to"))
        for name, value in medians.items():
            print(
                f"  context parallel {name:<8} {value / best:.3f} of the best fixed size "
                f"({value:.2f} s)"
            )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--processes", type=int, default=0, help="measure on this many processes")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if not arguments.processes:
        bounds()
        return
    from workload import SIZES, make_model

    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory), SIZES["0.7M"], 0.0)
        launch = LaunchConfig(
            1,
            1,
            arguments.processes,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
        )
        elastic_launch(launch, measure)(directory, arguments.rounds)


if __name__ == "__main__":
    main()
