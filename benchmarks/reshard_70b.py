"""The weight update of a 70B model, from real plans of its real shapes: bytes per rank beside HybridFlow's table
(arXiv 2409.19256, table 2), what crosses nodes, how even the senders are, and how long planning takes.

python benchmarks/reshard_70b.py [--ranks 64 512]

That table's peak is M for DS-Chat and HybridFlow-V and M/t_g for HybridFlow, its redundancy M/(t p d), M/(t p) and 0.
Here "held twice" is the redundancy, and "peak" a rank's weights while it generates: the rollout's and those held twice.
No weights and no processes: the plans are those that a run of that size would execute. Volumes are in GB per rank.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.reshard.layout import logical_shapes
from rlhf_mc.reshard.placement import rollout_layouts, training_layouts
from rlhf_mc.reshard.plan import make_plan
from rlhf_mc.topology.mesh import Mesh, rollout_groups

LLAMA3_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
LAYOUTS = [(8, 1, 4), (8, 4, 8), (8, 1, 8), (4, 2, 2)]
"""(t, p, t_g): training tensor and pipeline parallel, rollout tensor parallel."""
BF16, GB, NODE = 2, 1e9, 8
BUCKET = 256 << 20


@dataclass(frozen=True)
class Row:
    """One layout on so many ranks; GB."""

    ranks: int
    t: int
    p: int
    t_g: int
    received: list[float]
    across_nodes: list[float]
    shared: list[float]
    twice: list[float]
    """Held by training and by rollout in memory of their own."""
    rollout: float
    """A rank's rollout weights."""
    imbalance: float
    seconds: float
    """For one rank: layouts, the plan, and its own part of it."""


def measure(shape: ModelShape, ranks: int, t: int, p: int, t_g: int) -> Row:
    """Plans one update as a rank would."""
    begin = time.perf_counter()
    mesh = Mesh(ranks, t, p)
    training = training_layouts(shape, mesh)
    rollout = rollout_layouts(shape, rollout_groups(mesh, t_g))
    plan = make_plan(training, rollout, BF16, BUCKET, NODE, share=True)
    plan.for_rank(ranks // 2)
    seconds = time.perf_counter() - begin

    def gigabytes(counts: tuple[int, ...]) -> list[float]:
        return [count / GB for count in counts]

    held = {sum(size) for size in zip(plan.shared_bytes, plan.copied_bytes, plan.received_bytes, strict=True)}
    return Row(
        ranks,
        t,
        p,
        t_g,
        gigabytes(plan.received_bytes),
        gigabytes(plan.received_from_other_nodes),
        gigabytes(plan.shared_bytes),
        gigabytes(plan.copied_bytes),
        max(held) / GB,
        plan.sender_imbalance,
        seconds,
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


COLUMNS = (
    "ranks",
    "t, p → t_g",
    "DS-Chat (tpd-1)/tpd·M",
    "HybridFlow-V (tp-1)/tp·M",
    "HybridFlow (tp-t_g)/(t_g·tp)·M",
    "received",
    "of it across nodes",
    "rollout weights (M/t_g)",
    "of them training's memory",
    "held twice",
    "peak",
    "busiest sender / mean",
    "planning, s",
)


def cells(row: Row, model: float) -> list[str]:
    """One line of the table; model: M in GB."""
    both = row.t * row.p

    def spread(values: list[float]) -> str:
        return f"{mean(values):.2f} ({max(values):.2f})"

    return [
        str(row.ranks),
        f"{row.t}, {row.p} → {row.t_g}",
        f"{(row.ranks - 1) / row.ranks * model:.2f}",
        f"{(both - 1) / both * model:.2f}",
        f"{(both - row.t_g) / (row.t_g * both) * model:.2f}",
        spread(row.received),
        spread(row.across_nodes),
        f"{row.rollout:.2f} ({model / row.t_g:.2f})",
        spread(row.shared),
        spread(row.twice),
        f"{row.rollout + max(row.twice):.2f}",
        f"{row.imbalance:.3f}",
        f"{row.seconds:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512])
    args = parser.parse_args()
    shape = ModelShape.from_hf_config(LLAMA3_70B)
    model = sum(math.prod(dims) for dims in logical_shapes(shape).values()) * BF16 / GB
    print(f"Llama-3 70B, bf16: M = {model:.1f} GB; GB per rank, mean over ranks (max); nodes of {NODE} ranks\n")
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + " ---: |" * len(COLUMNS))
    for ranks in args.ranks:
        for t, p, t_g in LAYOUTS:
            print("| " + " | ".join(cells(measure(shape, ranks, t, p, t_g), model)) + " |", flush=True)


if __name__ == "__main__":
    main()
