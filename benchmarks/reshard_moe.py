"""Planning the weight update of mixture-of-experts models on many ranks: time, memory, transfers, and received bytes
against their lower bound, which is computed here by interval arithmetic and not by the planner.

python benchmarks/reshard_moe.py [--models 30B 235B] [--ranks 64 512]

No weights are involved: the plans are as in a run of that size. Each plan is made in a process of its own, whose
memory is measured. The models are Qwen3-30B-A3B and Qwen3-235B-A22B, in bfloat16.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import resource
import subprocess
import sys
import time
from typing import Any

from rlhf_mc.architectures.spec import ModelShape, padded_vocab_size
from rlhf_mc.reshard.placement import rollout_layouts, training_layouts
from rlhf_mc.reshard.plan import make_plan
from rlhf_mc.rollout.vllm_layout import vllm_layout
from rlhf_mc.topology.mesh import Mesh, rollout_groups

_QWEN3 = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "30B": _QWEN3
    | {
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
    },
    "235B": _QWEN3
    | {
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
    },
}
LAYOUTS = {
    ("30B", 64): [(2, 1, 8, 2), (4, 2, 8, 4)],
    ("30B", 512): [(2, 1, 8, 2), (4, 2, 8, 4), (4, 4, 8, 8)],
    ("235B", 64): [(4, 2, 8, 8), (8, 1, 8, 8), (4, 4, 4, 16)],
    ("235B", 512): [(4, 4, 8, 8), (4, 4, 8, 4), (4, 8, 8, 16), (8, 4, 8, 8), (8, 8, 8, 16)],
}
"""(model, ranks) -> (t, p, e, t_g): training tensor, pipeline and expert parallel, rollout tensor parallel."""
BF16 = 2
GB = 1e9
MB = 1e6
NODE = 8
BUCKET = 256 << 20


def make_mesh(shape: ModelShape, ranks: int, t: int, p: int, ep: int) -> Mesh:
    """Return the mesh. If stages cannot be equal, the last one has fewer layers."""
    last = shape.num_layers - (p - 1) * -(-shape.num_layers // p)
    return Mesh(ranks, t, p, ep, last_stage_layers=last if shape.num_layers % p else None)


class Bound:
    """The lower bound of received elements: what a rollout shard needs and the training shard lacks."""

    def __init__(self, shape: ModelShape, mesh: Mesh, rollout_tp: int) -> None:
        self.shape = shape
        self.mesh = mesh
        self.g = rollout_tp
        self._layer = functools.cache(self._count_layer)

    def received(self) -> list[int]:
        """Return the bytes, by rank."""
        place = {r: i for group in rollout_groups(self.mesh, self.g) for i, r in enumerate(group)}
        return [BF16 * self._missing(rank, place[rank]) for rank in range(self.mesh.world)]

    def _missing(self, rank: int, g: int) -> int:
        shape = self.shape
        mesh = self.mesh
        at = mesh.coordinate(rank)
        here = len(mesh.chunk_layers(shape.num_layers, at.pp)[0])
        elsewhere = shape.num_layers - here
        wanted = self._layer(g, None)
        total = elsewhere * wanted + here * (wanted - self._layer(g, at.tp))
        vocab = self._vocab(g, None)
        total += vocab if at.pp else vocab - self._vocab(g, at.tp)
        last = at.pp == mesh.pp - 1
        return total + (vocab - self._vocab(g, at.tp) if last else vocab + shape.hidden_size)

    def _count_layer(self, g: int, t: int | None) -> int:
        """Return the number of elements of a layer that rollout rank g needs; with t, of those that training shard t
        has."""
        shape = self.shape
        tp = self.mesh.tp
        norms = 2 * shape.hidden_size + 2 * shape.head_dim
        router = shape.num_experts * shape.hidden_size
        wide = shape.num_heads * shape.head_dim
        o_proj = _common(_part(g, self.g, wide), None if t is None else _part(t, tp, wide))
        experts = shape.num_experts if t is None else shape.num_experts // self.mesh.ep
        ffn = shape.expert_ffn_hidden_size
        rows = 3 * experts * _common(_part(g, self.g, ffn), None if t is None else _part(t, tp, ffn))
        return norms + router + shape.hidden_size * (o_proj + rows + self._qkv(g, t))

    def _qkv(self, g: int, t: int | None) -> int:
        """Return the number of rows of q, k and v. In training, rows are interleaved ([q of a group; its k; its v] for
        each group) and split evenly."""
        shape = self.shape
        per_group = shape.num_heads // shape.num_kv_heads
        size = shape.head_dim
        heads = range(*_part(g, self.g, shape.num_heads))
        kv_heads = sorted({head // per_group for head in heads})
        starts = [head // per_group * (per_group + 2) + head % per_group for head in heads]
        starts += [kv * (per_group + 2) + per_group + which for kv in kv_heads for which in (0, 1)]
        present = None if t is None else _part(t, self.mesh.tp, (shape.num_heads + 2 * shape.num_kv_heads) * size)
        return sum(_common((start * size, (start + 1) * size), present) for start in starts)

    def _vocab(self, g: int, t: int | None) -> int:
        shape = self.shape
        logical = (0, shape.vocab_size)
        start, end = _part(g, self.g, padded_vocab_size(shape.vocab_size, 1))
        want = (min(start, shape.vocab_size), min(end, shape.vocab_size))
        present = logical if t is None else _part(t, self.mesh.tp, padded_vocab_size(shape.vocab_size, self.mesh.tp))
        return shape.hidden_size * _common(want, present)


def _part(index: int, count: int, size: int) -> tuple[int, int]:
    return size * index // count, size * (index + 1) // count


def _common(wanted: tuple[int, int], present: tuple[int, int] | None) -> int:
    a, b = wanted
    c, d = present or wanted
    return max(0, min(b, d) - max(a, c))


def measure(model: str, ranks: int, t: int, p: int, ep: int, t_g: int) -> dict[str, Any]:
    """Plan one update as a rank would. Must be called once per process: memory is the process's peak."""
    shape = ModelShape.from_hf_config(MODELS[model])
    before = _peak()
    begin = time.perf_counter()
    begin_cpu = time.process_time()
    mesh = make_mesh(shape, ranks, t, p, ep)
    groups = rollout_groups(mesh, t_g)
    plan = make_plan(
        training_layouts(shape, mesh), rollout_layouts(shape, groups, vllm_layout), BF16, BUCKET, NODE, share=True
    )
    part = plan.for_rank(ranks // 2)
    seconds = time.perf_counter() - begin
    cpu = time.process_time() - begin_cpu
    memory = _peak() - before
    bound = Bound(shape, mesh, t_g).received()
    return {
        "seconds": seconds,
        "cpu": cpu,
        "memory": memory,
        "transfers": len(part.copies) + sum(len(sends) + len(receives) for sends, receives in part.buckets),
        "received": sum(plan.received_bytes) / ranks / GB,
        "most": max(plan.received_bytes) / GB,
        "bound": sum(bound) / ranks / GB,
        "exact": list(plan.received_bytes) == bound,
        "imbalance": plan.sender_imbalance,
    }


def _peak() -> float:
    """Return the peak resident memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MB


COLUMNS = (
    "model",
    "ranks",
    "t, p, e → t_g",
    "received, GB: mean (max)",
    "lower bound, mean",
    "each rank receives its bound",
    "sent, max / mean",
    "transfers of a rank",
    "planning, s (CPU)",
    "planning, MB",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*json.loads(args.one))))
        return
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + " ---: |" * len(COLUMNS))
    for model in args.models:
        for ranks in args.ranks:
            for layout in LAYOUTS[model, ranks]:
                one = json.dumps([model, ranks, *layout])
                child = subprocess.run([sys.executable, __file__, "--one", one], check=True, stdout=subprocess.PIPE)
                result = json.loads(child.stdout)
                t, p, ep, t_g = layout
                cells = (
                    model,
                    str(ranks),
                    f"{t}, {p}, {ep} → {t_g}",
                    f"{result['received']:.2f} ({result['most']:.2f})",
                    f"{result['bound']:.2f}",
                    "yes" if result["exact"] else "NO",
                    f"{result['imbalance']:.3f}",
                    str(result["transfers"]),
                    f"{result['seconds']:.2f} ({result['cpu']:.2f})",
                    f"{math.ceil(result['memory'])}",
                )
                print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
