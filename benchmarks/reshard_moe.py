"""Planning the weight update of published mixtures of experts on many ranks: time, memory,
transfers, and received bytes against their lower bound, which is computed here by interval
arithmetic and not by the planner.

python benchmarks/reshard_moe.py [--models glm-4.5 deepseek-v3] [--ranks 64 512]

No weights are involved: the plans are as in a run of that size, in bfloat16. Each plan is made in a
process of its own, whose memory is measured. Engines split each expert over their ranks (TP), as
runs have it, or hold whole experts (EP).
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
from collections import Counter
from dataclasses import replace
from typing import Any

from rlhf_mc.architectures.attention import Attention
from rlhf_mc.architectures.experts import Experts
from rlhf_mc.architectures.latent_attention import LatentAttention
from rlhf_mc.architectures.spec import ModelShape, padded_vocab_size
from rlhf_mc.json_files import read
from rlhf_mc.planner.published import MODELS
from rlhf_mc.reshard.layout import Layout, Shard, Stack, correction_biases
from rlhf_mc.reshard.placement import rollout_layouts, split_layouts, training_layouts
from rlhf_mc.reshard.plan import make_plan
from rlhf_mc.rollout.vllm_layout import vllm_layout
from rlhf_mc.topology.mesh import Mesh, rollout_groups

LAYOUTS = {
    "qwen3-30b-a3b": {64: [(2, 1, 8, 2), (4, 2, 8, 4)], 512: [(4, 4, 8, 8)]},
    "qwen3-235b-a22b": {64: [(8, 1, 8, 8), (4, 4, 4, 16)], 512: [(4, 4, 8, 4), (8, 8, 8, 16)]},
    "glm-4.5-air": {64: [(2, 2, 16, 8)], 512: [(4, 2, 32, 8)]},
    "glm-4.5": {64: [(4, 4, 4, 16)], 512: [(8, 4, 16, 16)]},
    "mixtral-8x22b": {64: [(2, 8, 4, 8)], 512: [(4, 8, 8, 8)]},
    "gpt-oss-120b": {64: [(1, 4, 16, 8)], 512: [(2, 4, 64, 8)]},
    "deepseek-v3": {64: [(2, 4, 8, 32)], 512: [(4, 1, 128, 64), (8, 8, 8, 64)]},
    "kimi-k2": {64: [(2, 4, 8, 32)], 512: [(4, 1, 128, 64), (8, 8, 8, 32)]},
}
"""Model -> ranks -> (t, p, e, t_g): training tensor, pipeline and expert parallel, ranks of an
engine."""
ENGINES = ("TP", "EP")
BF16 = 2
FLOAT32 = 4
GB = 1e9
MB = 1e6
NODE = 8
BUCKET = 256 << 20


def make_mesh(shape: ModelShape, ranks: int, t: int, p: int, ep: int) -> Mesh:
    """Return the mesh. If stages cannot be equal, the last one has fewer layers."""
    last = shape.num_layers - (p - 1) * -(-shape.num_layers // p)
    return Mesh(ranks, t, p, ep, last_stage_layers=last if shape.num_layers % p else None)


@functools.cache
def expert_parallel_layout(shape: ModelShape, rank: int, size: int) -> Layout:
    """Return the layout of a vLLM rank that holds a range of whole experts; all else is split over
    the ranks."""
    experts = _part(rank, size, shape.num_experts)
    others = vllm_layout(shape, rank, size)
    whole = vllm_layout(shape, 0, 1)

    def held(shard: Shard) -> Shard:
        return replace(shard, box=(experts, *shard.box[1:]))

    stacks = {shard.local for shard in whole.stacked if isinstance(shard.tensor, Stack)}
    shapes = {
        name: (experts[1] - experts[0], *whole.stacked_shapes[name][1:]) if name in stacks else dims
        for name, dims in others.stacked_shapes.items()
    }
    shards = [shard for shard in others.stacked if shard.local not in stacks]
    return Layout(
        shapes,
        (*shards, *(held(shard) for shard in whole.stacked if shard.local in stacks)),
        others.float32,
    )


class Bound:
    """The lower bound of received bytes: what a rollout shard needs and the training shard
    lacks."""

    def __init__(self, shape: ModelShape, mesh: Mesh, size: int, engine: str) -> None:
        self.shape = shape
        self.mesh = mesh
        self.size = size
        self.by_expert = engine == "EP"
        self._layer = functools.cache(self._count_layer)

    def received(self) -> list[int]:
        """Return the bytes, by rank."""
        place = {
            r: i for group in rollout_groups(self.mesh, self.size) for i, r in enumerate(group)
        }
        return [self._missing(rank, place[rank]) for rank in range(self.mesh.world)]

    def _missing(self, rank: int, g: int) -> int:
        shape = self.shape
        mesh = self.mesh
        at = mesh.coordinate(rank)
        here = Counter(
            shape.layer_kinds[layer] for layer in mesh.chunk_layers(shape.num_layers, at.pp)[0]
        )
        total = 0
        for kind, count in Counter(shape.layer_kinds).items():
            total += count * self._layer(kind, g, None) - here[kind] * self._layer(
                kind, g, (at.tp, at.ep)
            )
        vocab = self._vocab(g, None)
        total += vocab if at.pp else vocab - self._vocab(g, at.tp)
        last = at.pp == mesh.pp - 1
        return total + (vocab - self._vocab(g, at.tp) if last else vocab + BF16 * shape.hidden_size)

    def _count_layer(self, kind: int, g: int, at: tuple[int, int] | None) -> int:
        """Return the bytes of a layer that rollout rank g needs; with the tensor- and
        expert-parallel rank `at`, of those that this training rank has."""
        shape = self.shape
        hidden = shape.hidden_size
        t, e = at or (None, None)

        def split(size: int) -> int:
            return _common(
                _part(g, self.size, size), None if t is None else _part(t, self.mesh.tp, size)
            )

        mixer, feed_forward = shape.kinds[kind]
        total = 2 * hidden
        if isinstance(mixer, LatentAttention):
            heads = mixer.num_heads
            latents = mixer.q_lora_rank, mixer.kv_lora_rank
            total += hidden * split(heads * mixer.v_head_dim)
            total += hidden * (sum(latents) + mixer.rope_head_dim) + sum(latents)
            total += (mixer.q_lora_rank or hidden) * split(heads * mixer.head_dim)
            total += latents[1] * split(
                heads * (mixer.head_dim - mixer.rope_head_dim + mixer.v_head_dim)
            )
        else:
            assert isinstance(mixer, Attention), mixer
            total += mixer.qk_norm * 2 * mixer.head_dim + mixer.sinks * split(mixer.num_heads)
            total += hidden * (split(mixer.num_heads * mixer.head_dim) + mixer.o_bias)
            total += (hidden + mixer.qkv_bias) * self._qkv(mixer, g, t)
        if not isinstance(feed_forward, Experts):
            return BF16 * (total + 3 * hidden * split(feed_forward.active_size()))
        experts = feed_forward.num_experts
        ffn = feed_forward.expert_ffn_hidden_size
        total += experts * (hidden + feed_forward.mlp_bias)
        total += 3 * hidden * split(feed_forward.shared_ffn_hidden_size)
        held = None if e is None else _part(e, self.mesh.ep, experts)
        wanted = _part(g, self.size, experts) if self.by_expert else (0, experts)
        rows = split(ffn)
        if self.by_expert:
            rows = _common((0, ffn), None if t is None else _part(t, self.mesh.tp, ffn))
        # vLLM adds the bias of an expert's outputs on one rank.
        biases = feed_forward.mlp_bias * (2 * rows + (self.by_expert or g == 0) * hidden)
        total += _common(wanted, held) * (3 * hidden * rows + biases)
        return BF16 * total + FLOAT32 * feed_forward.sigmoid_router * experts

    def _qkv(self, mixer: Attention, g: int, t: int | None) -> int:
        """Return the number of rows of q, k and v. In training, rows are interleaved ([q of a
        group; its k; its v] for each group) and split evenly."""
        per_group = mixer.num_heads // mixer.num_kv_heads
        size = mixer.head_dim
        heads = range(*_part(g, self.size, mixer.num_heads))
        kv_heads = sorted({head // per_group for head in heads})
        starts = [head // per_group * (per_group + 2) + head % per_group for head in heads]
        starts += [kv * (per_group + 2) + per_group + which for kv in kv_heads for which in (0, 1)]
        rows = (mixer.num_heads + 2 * mixer.num_kv_heads) * size
        present = None if t is None else _part(t, self.mesh.tp, rows)
        return sum(_common((start * size, (start + 1) * size), present) for start in starts)

    def _vocab(self, g: int, t: int | None) -> int:
        """Return the bytes of the embedding, or of the output layer."""
        shape = self.shape
        logical = (0, shape.vocab_size)
        start, end = _part(g, self.size, padded_vocab_size(shape.vocab_size, 1))
        want = (min(start, shape.vocab_size), min(end, shape.vocab_size))
        present = (
            logical
            if t is None
            else _part(t, self.mesh.tp, padded_vocab_size(shape.vocab_size, self.mesh.tp))
        )
        return BF16 * shape.hidden_size * _common(want, present)


def _part(index: int, count: int, size: int) -> tuple[int, int]:
    return size * index // count, size * (index + 1) // count


def _common(wanted: tuple[int, int], present: tuple[int, int] | None) -> int:
    a, b = wanted
    c, d = present or wanted
    return max(0, min(b, d) - max(a, c))


def measure(
    model: str, ranks: int, t: int, p: int, ep: int, t_g: int, engine: str
) -> dict[str, Any]:
    """Plan one update as a rank would. Must be called once per process: memory is the process's
    peak."""
    shape = ModelShape.from_hf_config(read(MODELS / model / "config.json"))
    layout = vllm_layout if engine == "TP" else expert_parallel_layout
    before = _peak()
    begin = time.perf_counter()
    begin_cpu = time.process_time()
    mesh = make_mesh(shape, ranks, t, p, ep)
    biases = correction_biases(shape)
    source = split_layouts(training_layouts(shape, mesh, transformer_engine=True), biases)
    target = split_layouts(rollout_layouts(shape, rollout_groups(mesh, t_g), layout), biases)
    plans = [
        make_plan(source[0], target[0], BF16, BUCKET, NODE),
        make_plan(source[1], target[1], FLOAT32, BUCKET, NODE),
    ]
    parts = [plan.for_rank(ranks // 2) for plan in plans]
    seconds = time.perf_counter() - begin
    cpu = time.process_time() - begin_cpu
    memory = _peak() - before
    received = [
        sum(counts) for counts in zip(*(plan.received_bytes for plan in plans), strict=True)
    ]
    bound = Bound(shape, mesh, t_g, engine).received()
    return {
        "seconds": seconds,
        "cpu": cpu,
        "memory": memory,
        "transfers": sum(
            len(part.copies) + sum(len(sends) + len(receives) for sends, receives in part.buckets)
            for part in parts
        ),
        "received": sum(received) / ranks / GB,
        "most": max(received) / GB,
        "bound": sum(bound) / ranks / GB,
        "exact": received == bound,
        "imbalance": plans[0].sender_imbalance,
    }


def _peak() -> float:
    """Return the peak resident memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MB


COLUMNS = (
    "model",
    "ranks",
    "t, p, e → engine",
    "received, GB: mean (max)",
    "lower bound, mean",
    "each rank receives its bound",
    "sent, max / mean",
    "transfers of a rank",
    "planning, s (CPU)",
    "planning, MB",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*json.loads(args.one))))
        return
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + " ---: |" * len(COLUMNS))
    plans = [
        (model, ranks, *layout, engine)
        for model in args.models
        for ranks in args.ranks
        for layout in LAYOUTS[model][ranks]
        for engine in ENGINES
    ]
    for one in plans:
        command = [sys.executable, __file__, "--one", json.dumps(one)]
        result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        model, ranks, t, p, ep, t_g, engine = one
        cells = (
            model,
            str(ranks),
            f"{t}, {p}, {ep} → {engine} {t_g}",
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
