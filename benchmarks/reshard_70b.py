"""The weight update of a 70B model, from the plans of its real shapes: bytes per rank beside
HybridFlow's table
(arXiv 2409.19256, table 2), bytes between nodes, balance of the senders, and planning time.

python benchmarks/reshard_70b.py [--ranks 64 512]

That table's peak is M for DS-Chat and HybridFlow-V and M/t_g for HybridFlow, its redundancy M/(t p
d), M/(t p) and 0. Here "redundant copy" is the redundancy, and "peak" a rank's weights during
generation: the rollout weights and the redundant copy. No weights and no processes: the plans are
as in a run of that size. Volumes are in GB per rank.
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
from rlhf_mc.rollout.vllm_layout import vllm_layout
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
BF16 = 2
GB = 1e9
NODE = 8
BUCKET = 256 << 20


@dataclass(frozen=True)
class Row:
    """One layout on a number of ranks; volumes in GB."""

    ranks: int
    t: int
    p: int
    t_g: int
    received: list[float]
    across_nodes: list[float]
    shared: list[float]
    redundant: list[float]
    """Weights that both training and rollout hold, in separate memory."""
    rollout: float
    """A rank's rollout weights."""
    imbalance: float
    seconds: float
    """Time of one rank for layouts, the plan, and the rank's part of it."""


def measure(shape: ModelShape, ranks: int, t: int, p: int, t_g: int) -> Row:
    """Plan one update as a rank would."""
    begin = time.perf_counter()
    mesh = Mesh(ranks, t, p)
    training = training_layouts(shape, mesh)
    rollout = rollout_layouts(shape, rollout_groups(mesh, t_g), vllm_layout)
    plan = make_plan(training, rollout, BF16, BUCKET, NODE, share=True)
    plan.for_rank(ranks // 2)
    seconds = time.perf_counter() - begin

    def gigabytes(counts: tuple[int, ...]) -> list[float]:
        return [count / GB for count in counts]

    sums = {
        sum(size)
        for size in zip(plan.shared_bytes, plan.copied_bytes, plan.received_bytes, strict=True)
    }
    return Row(
        ranks,
        t,
        p,
        t_g,
        gigabytes(plan.received_bytes),
        gigabytes(plan.received_from_other_nodes),
        gigabytes(plan.shared_bytes),
        gigabytes(plan.copied_bytes),
        max(sums) / GB,
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
    "of which across nodes",
    "rollout weights (M/t_g)",
    "of which aliased",
    "redundant copy",
    "peak",
    "sent, max / mean",
    "planning, s",
)


def cells(row: Row, model: float) -> list[str]:
    """Return the cells of one line of the table; model: M in GB."""
    both = row.t * row.p

    def mean_and_max(values: list[float]) -> str:
        return f"{mean(values):.2f} ({max(values):.2f})"

    return [
        str(row.ranks),
        f"{row.t}, {row.p} → {row.t_g}",
        f"{(row.ranks - 1) / row.ranks * model:.2f}",
        f"{(both - 1) / both * model:.2f}",
        f"{(both - row.t_g) / (row.t_g * both) * model:.2f}",
        mean_and_max(row.received),
        mean_and_max(row.across_nodes),
        f"{row.rollout:.2f} ({model / row.t_g:.2f})",
        mean_and_max(row.shared),
        mean_and_max(row.redundant),
        f"{row.rollout + max(row.redundant):.2f}",
        f"{row.imbalance:.3f}",
        f"{row.seconds:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512])
    args = parser.parse_args()
    shape = ModelShape.from_hf_config(LLAMA3_70B)
    model = sum(math.prod(dims) for dims in logical_shapes(shape).values()) * BF16 / GB
    print(
        f"Llama-3 70B, bf16: M = {model:.1f} GB; GB per rank, mean over ranks (max); nodes of "
        f"{NODE} ranks\n"
    )
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + " ---: |" * len(COLUMNS))
    for ranks in args.ranks:
        for t, p, t_g in LAYOUTS:
            print(
                "| " + " | ".join(cells(measure(shape, ranks, t, p, t_g), model)) + " |", flush=True
            )


if __name__ == "__main__":
    main()
