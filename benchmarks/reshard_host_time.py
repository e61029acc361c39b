"""Launches and host time of one rank's weight update, with views made once and with views made in
each update.

python benchmarks/reshard_host_time.py [--models qwen3-30b-a3b kimi-k2] [--repeats 3]

The plans are those of the shipped configs, on their nodes of 8 H100; the rank is the one that moves
most blocks. Its tensors have their full sizes, in address space that is never touched, so the views
are those of a run. Each copy is replaced by one of as many pairs of single elements: its time is
torch's dispatch on this CPU, without the bytes. Messages are not sent. The ways alternate in one
process; a time is the median over the repeats.

Launches are those on a GPU: _foreach_copy_ takes 64 pairs and 320 pieces of 65,536 elements in one,
where all pairs are dense and of one type, and else one for each pair. "remade", "separate" and
"stacked": as gpu/weight_update.py has them.

Bounds: an update launches at least one copy for each bucket it sends or receives in. The time on
the wire is the planner's, at 450 GB/s within a node and 50 GB/s between nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import mmap
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from gpu.weight_update import Loopback, local_tensors, remade_update

from rlhf_mc.config.load import load_config
from rlhf_mc.patching import replaced
from rlhf_mc.planner.gpus import GPUS, NETWORK_BANDWIDTH, Machine
from rlhf_mc.planner.published import with_model
from rlhf_mc.planner.rank_layouts import planned_layouts
from rlhf_mc.planner.start import planned_shapes
from rlhf_mc.planner.traffic import weight_update_plans
from rlhf_mc.reshard.execute import bind
from rlhf_mc.reshard.placement import rollout_layouts
from rlhf_mc.reshard.verify import checksum, checksums
from rlhf_mc.rollout.vllm_layout import vllm_layout
from rlhf_mc.topology.mesh import rollout_groups, training_mesh

MODELS = {
    "qwen3-30b-a3b": ("ppo_qwen3_30b_a3b", 2),
    "qwen3-235b-a22b": ("grpo_qwen3_235b_a22b", 16),
    "deepseek-v3": ("grpo_deepseek_v3", 32),
    "kimi-k2": ("grpo_kimi_k2", 64),
    "qwen3-next-80b-a3b": ("grpo_qwen3_next_80b", 4),
}
"""Model -> (config, nodes)."""
CONFIGS = Path(__file__).parents[1] / "configs"
NODE = 8
PAIRS = 64
PIECES = 320
PIECE = 65_536
NORESERVE = 0x4000
"""MAP_NORESERVE of Linux, which Python does not name."""
WAYS = ("remade", "separate", "stacked")
COLUMNS = (
    "model, GPUs",
    "blocks",
    "transfers",
    "buckets",
    "wire, ms",
    *(f"{way}: launches, host ms" for way in WAYS),
)


def untouched(numel: int) -> torch.Tensor:
    """Return a bfloat16 vector in address space without memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    return torch.frombuffer(mmap.mmap(-1, max(2 * numel, 2), flags=flags), dtype=torch.bfloat16)


@contextlib.contextmanager
def copies_replaced(
    copy: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None],
) -> Iterator[None]:
    """Let the body call `copy` in place of torch._foreach_copy_."""
    with replaced(torch, "_foreach_copy_", copy):
        yield


def launches(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> int:
    """Return the launches of a call of _foreach_copy_ on a GPU."""
    pairs = list(zip(targets, sources, strict=True))
    dense = all(
        a.is_contiguous() and b.is_contiguous() and a.stride() == b.stride() and a.dtype == b.dtype
        for a, b in pairs
    )
    pieces = sum(math.ceil(a.numel() / PIECE) for a, _ in pairs)
    return max(math.ceil(len(pairs) / PAIRS), math.ceil(pieces / PIECES)) if dense else len(pairs)


def measure(model: str, repeats: int) -> list[str]:
    """Return the cells of a model's row."""
    config, nodes = MODELS[model]
    path = CONFIGS / f"{config}.yaml"
    cfg = load_config(path, with_model(str(path), [], model))
    shape = planned_shapes(cfg)["actor"]
    world = NODE * nodes
    mesh = training_mesh(cfg.actor.megatron, world)
    training = planned_layouts(shape, mesh)
    plan = weight_update_plans(cfg, shape, world, NODE)[0]
    groups = rollout_groups(mesh, cfg.rollout.tensor_model_parallel_size, NODE)
    rollout = rollout_layouts(shape, groups, vllm_layout)
    machine = Machine(world, NODE, GPUS["h100"].rates, NETWORK_BANDWIDTH)
    wire = sum(machine.seconds(*bucket) for bucket in plan.bucket_maxima())
    rank = max(range(world), key=lambda rank: plan.sent_bytes[rank] + plan.received_bytes[rank])
    part = plan.for_rank(rank)
    target = local_tensors(rollout[rank], True, untouched)
    transport = Loopback(part, untouched)
    sources = {way: local_tensors(training[rank], way == "stacked", untouched) for way in WAYS}
    bound = {way: bind(part, sources[way], target, torch.bfloat16).kept() for way in WAYS[1:]}
    ways = {
        "remade": lambda: remade_update(part, sources["remade"], target, transport, torch.bfloat16),
        **{way: lambda one=one: one.execute(transport) for way, one in bound.items()},
    }
    counts = {}
    for name, way in ways.items():
        found: list[int] = []
        with copies_replaced(lambda *lists, found=found: found.append(launches(*lists))):
            way()
        counts[name] = sum(found)
    seconds = host_seconds(ways, repeats)
    transfers = [*part.copies, *(t for bucket in part.buckets for side in bucket for t in side)]
    blocks = sum(t.count * (t.extent[0] if len(t.extent) == 3 else 1) for t in transfers)
    cells = [f"{counts[way]:,}, {1000 * seconds[way]:.0f}" for way in WAYS]
    head = [
        f"{model}, {world}",
        f"{blocks:,}",
        f"{len(transfers):,}",
        str(len(plan.buckets)),
        f"{1000 * wire:.0f}",
    ]
    return [*head, *cells]


def host_seconds(ways: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Return the median time of each way, with copies of single elements."""
    one = [[torch.zeros(1, dtype=torch.bfloat16)] * (1 << 16) for _ in range(2)]
    original = torch._foreach_copy_

    def copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        original(one[0][: len(targets)], one[1][: len(sources)])

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with copies_replaced(copy):
        for repeat in range(repeats + 1):
            for name, way in ways.items():
                begin = time.process_time()
                way()
                if repeat:
                    seconds[name].append(time.process_time() - begin)
    return {name: statistics.median(times) for name, times in seconds.items()}


def checksum_line() -> str:
    """Return the times of checksums of 1,024 blocks of 16 kB, one by one and together."""
    blocks = [torch.zeros(16, 512, dtype=torch.bfloat16) for _ in range(1024)]
    ways = {
        "one by one": lambda: [checksum([block]) for block in blocks],
        "together": lambda: checksums([[block] for block in blocks]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(5):
        for name, way in ways.items():
            begin = time.process_time()
            way()
            seconds[name].append(time.process_time() - begin)
    times = (
        f"{name} {1e6 * statistics.median(s) / len(blocks):.0f} us a block"
        for name, s in seconds.items()
    )
    return f"checksums of blocks of 16 kB: {', '.join(times)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| " + " | ".join(COLUMNS) + " |\n|" + " ---: |" * len(COLUMNS), flush=True)
    for model in args.models:
        print("| " + " | ".join(measure(model, args.repeats)) + " |", flush=True)
    print(checksum_line())


if __name__ == "__main__":
    main()
