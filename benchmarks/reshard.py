"""The weight update compared with two baselines, on real processes and a real vLLM model.

python benchmarks/reshard.py [--world 2 4] [--hidden 768] [--layers 12] [--repeats 5]

For each layout, per rank: received bytes against the lower bound (computed here by interval
arithmetic, not by the planner), and seconds of (ours) the update, (a) gathering each full tensor
over pipeline and tensor parallel groups and calling vLLM's load_weights, and (b) one memcpy of the
bytes that the update receives and copies. The three alternate; a figure is the median over the
repeats of the slowest rank. "not shared": share_weights is false. Peak extra memory is the rise of
the process's high-water mark during an update, plus the shared-memory outbox.

The bounds: a rank receives at least what it needs and lacks; an update takes at least one memcpy of
the bytes that it moves, on one machine, where a message is a copy.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlhf_mc.architectures.parameters import model_params
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.reshard.execute import aliased_views, execute
from rlhf_mc.reshard.layout import Layout, logical_shapes
from rlhf_mc.reshard.placement import rollout_layouts, training_layouts
from rlhf_mc.reshard.plan import make_plan
from rlhf_mc.reshard.shared_memory import host_transport
from rlhf_mc.reshard.transport import PointToPoint
from rlhf_mc.rollout.vllm_layout import vllm_layout
from rlhf_mc.topology.mesh import Mesh, rollout_groups

LAYOUTS = {
    2: [
        (2, 1, 1, True),
        (2, 1, 2, True),
        (2, 1, 2, False),
        (1, 2, 1, True),
        (1, 1, 1, True),
        (1, 1, 2, True),
    ],
    4: [
        (4, 1, 1, True),
        (4, 1, 2, True),
        (4, 1, 4, True),
        (4, 1, 4, False),
        (2, 2, 1, True),
        (2, 2, 2, True),
        (2, 2, 4, True),
        (2, 1, 2, True),
        (2, 1, 4, True),
        (1, 4, 2, True),
    ],
}
"""World size -> (training TP, PP, rollout TP, share_weights)."""
DTYPE = torch.bfloat16
BUCKET_MB = 64
COLUMNS = (
    "ranks: TP x PP x DP → rollout TP",
    "received, MB",
    "/ lower bound",
    "copied, MB",
    "shared, MB",
    "ours, s",
    "(a) gather + load_weights, s",
    "(a) / ours",
    "(b) memcpy, s",
    "ours / (b)",
    "peak extra, buckets: shared memory, sockets",
    "verify, s",
)


def model_config(hidden: int, layers: int) -> dict[str, Any]:
    """Return the config.json of a qwen2 that every layout above can split."""
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


def lower_bound(shape: ModelShape, mesh: Mesh, groups: list[list[int]], rank: int) -> int:
    """Return the bytes that the rank's rollout shard needs and its training shard lacks. Every
    tensor is split along at most one dimension, so a shard is an interval of fractions: tensor
    parallel rank r of n holds [r/n, (r+1)/n)."""
    at = mesh.coordinate(rank)
    layers = mesh.chunk_layers(shape.num_layers, at.pp)[0]
    group = next(g for g in groups if rank in g)
    missing = Fraction(0)
    for name, size in logical_shapes(shape).items():
        numel = 1
        for length in size:
            numel *= length
        is_split = "norm" not in name
        part = group.index(rank)
        parts = len(group)
        if "k_proj" in name or "v_proj" in name:
            (kv_heads,) = {param.kv_heads for param in model_params(shape)} - {0}
            parts = min(parts, kv_heads)
            part = group.index(rank) * parts // len(group)
        want = (
            (Fraction(part, parts), Fraction(part + 1, parts))
            if is_split
            else (Fraction(0), Fraction(1))
        )
        have = (
            (Fraction(at.tp, mesh.tp), Fraction(at.tp + 1, mesh.tp))
            if is_split
            else (Fraction(0), Fraction(1))
        )
        if name.startswith("model.layers."):
            is_here = int(name.split(".")[2]) in layers
        else:
            is_here = at.pp == (0 if "embed" in name else mesh.pp - 1)
        both = max(Fraction(0), min(want[1], have[1]) - max(want[0], have[0])) if is_here else 0
        missing += (want[1] - want[0] - both) * numel
    assert missing.denominator == 1
    return int(missing) * DTYPE.itemsize


class Gatherer:
    """The baseline without a plan: every rank gathers every full tensor, and vLLM splits it."""

    def __init__(
        self,
        shape: ModelShape,
        mesh: Mesh,
        layouts: list[Layout],
        params: dict[str, torch.Tensor],
        model: Any,
    ) -> None:
        self.sizes = logical_shapes(shape)
        self.mesh = mesh
        self.layouts = layouts
        self.params = params
        self.model = model
        self.rank = dist.get_rank()
        self.tp_ranks = self._group_ranks(lambda c: (c.dp, c.pp))
        self.pp_ranks = self._group_ranks(lambda c: (c.dp, c.tp))
        self.tp_group = self._new_groups(lambda c: (c.dp, c.pp))
        self.pp_group = self._new_groups(lambda c: (c.dp, c.tp))

    def _group_ranks(self, key: Callable[[Any], Any]) -> list[int]:
        own_key = key(self.mesh.coordinate(self.rank))
        return [r for r in range(self.mesh.world) if key(self.mesh.coordinate(r)) == own_key]

    def _new_groups(self, key: Callable[[Any], Any]) -> Any:
        own_key = key(self.mesh.coordinate(self.rank))
        own_group = None
        for value in sorted({key(self.mesh.coordinate(r)) for r in range(self.mesh.world)}):
            group = dist.new_group(
                [r for r in range(self.mesh.world) if key(self.mesh.coordinate(r)) == value]
            )
            own_group = group if value == own_key else own_group
        return own_group

    def update(self) -> None:
        """Fill vLLM's parameters."""
        self.model.load_weights(self._full_tensors())

    def _full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for stage in range(self.mesh.pp):
            owner = self.pp_ranks[stage]
            column = [r for r in range(self.mesh.world) if self.mesh.coordinate(r).pp == stage]
            shards_of = [
                next(r for r in column if self.mesh.coordinate(r).tp == t)
                for t in range(self.mesh.tp)
            ]
            for local, size in self.layouts[owner].shapes.items():
                shard = self.params[local] if owner == self.rank else torch.empty(size, dtype=DTYPE)
                if self.mesh.pp > 1:
                    dist.broadcast(shard, owner, self.pp_group)
                shards = [shard]
                if self.mesh.tp > 1 and "norm" not in local:
                    shards = [torch.empty_like(shard) for _ in range(self.mesh.tp)]
                    dist.all_gather(shards, shard, self.tp_group)
                yield from self._join(local, shards, [self.layouts[r] for r in shards_of])

    def _join(
        self, local: str, shards: list[torch.Tensor], layouts: list[Layout]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        full: dict[str, torch.Tensor] = {}
        for tensor, layout in zip(shards, layouts, strict=False):
            for shard in layout.shards:
                if shard.local == local:
                    out = full.setdefault(
                        shard.tensor, torch.empty(self.sizes[shard.tensor], dtype=DTYPE)
                    )
                    box = tuple(slice(a, b) for a, b in shard.box)
                    there = tuple(
                        slice(o, o + b - a)
                        for o, (a, b) in zip(shard.offset, shard.box, strict=True)
                    )
                    out[box] = tensor[there]
        yield from full.items()


def high_water_mark(action: Callable[[], Any]) -> int:
    """Return the bytes by which the peak of the process's resident memory rises during the
    action."""
    ctypes.CDLL(None).malloc_trim(0)  # or the allocator reuses free memory of the last update
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    action()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    line = next(
        x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key + ":")
    )
    return int(line.split()[1]) * 1024


def timed(action: Callable[[], Any]) -> float:
    """Return the seconds until the slowest rank is done."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def largest(value: float) -> float:
    """Return the maximum over all ranks."""
    maximum = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(maximum, dist.ReduceOp.MAX)
    return float(maximum)


def measure(
    directory: str, shape: ModelShape, mesh: Mesh, rollout_tp: int, share: bool, repeats: int
) -> list[str]:
    """Return the cells of one line of the table."""
    from rlhf_mc.reshard.verify import verify
    from rlhf_mc.rollout.vllm_engine import VLLMEngine

    rank = dist.get_rank()
    world = mesh.world
    groups = rollout_groups(mesh, rollout_tp)
    cfg = RolloutConfig(
        tensor_model_parallel_size=rollout_tp, max_num_seqs=8, max_num_batched_tokens=64
    )
    engine = VLLMEngine(
        directory, shape, cfg, groups, rank, max_model_len=64, dtype="bfloat16", seed=0
    )
    training = training_layouts(shape, mesh)
    rollout = rollout_layouts(shape, groups, vllm_layout)
    plan = make_plan(training, rollout, DTYPE.itemsize, BUCKET_MB << 20, share=share)
    part = plan.for_rank(rank)
    # As in training: equal on data-parallel replicas; norms are equal on all tensor-parallel ranks
    # too.
    torch.manual_seed(mesh.coordinate(rank).tp + mesh.tp * mesh.coordinate(rank).pp)
    params = {
        name: torch.ones(size, dtype=DTYPE) if "norm" in name else torch.randn(size).to(DTYPE)
        for name, size in training[rank].shapes.items()
    }
    target = engine.params | aliased_views(part, params)
    gatherer = Gatherer(shape, mesh, training, params, engine._model)
    moved = part.received_bytes + part.copied_bytes
    here, there = (torch.zeros(max(1, moved), dtype=torch.uint8) for _ in range(2))
    assert dist.group.WORLD is not None
    transport = host_transport(part.outbox_bytes, dist.group.WORLD)
    sockets = PointToPoint(dist.group.WORLD)
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: execute(part, params, target, transport),
        "gather": gatherer.update,
        "memcpy": lambda: there.copy_(here),
        "verify": lambda: verify(part, params, target, dist.group.WORLD),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            elapsed = timed(way)
            if repeat:
                seconds[name].append(elapsed)
    bucket = BUCKET_MB << 20
    peak = largest((high_water_mark(ways["ours"]) + part.outbox_bytes) / bucket)
    by_sockets = largest(high_water_mark(lambda: execute(part, params, target, sockets)) / bucket)
    ours, gather, memcpy, check = (statistics.median(seconds[name]) for name in ways)
    bound = [lower_bound(shape, mesh, groups, r) for r in range(world)]
    is_minimal = list(plan.received_bytes) == bound
    ratio = (
        f"{sum(plan.received_bytes) / sum(bound):.3f}"
        if sum(bound)
        else f"{sum(plan.received_bytes)} of 0"
    )
    engine.close()
    return [
        (
            f"{world}: {mesh.tp} x {mesh.pp} x {mesh.dp} → "
            f"{rollout_tp}{'' if share else ', not shared'}"
        ),
        f"{max(plan.received_bytes) / 1e6:.1f}",
        ratio if is_minimal else f"{ratio} NOT MINIMAL",
        f"{max(plan.copied_bytes) / 1e6:.1f}",
        f"{max(plan.shared_bytes) / 1e6:.1f}",
        f"{ours:.3f}",
        f"{gather:.3f}",
        f"{gather / ours:.1f}",
        f"{memcpy:.3f}" if largest(moved) else "-",
        f"{ours / memcpy:.1f}" if largest(moved) else "-",
        f"{peak:.2f}, {by_sockets:.2f}",
        f"{check:.3f}",
    ]


def worker(
    rank: int, world: int, port: int, directory: str, config: dict[str, Any], repeats: int
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    import warnings

    from rlhf_mc.topology.rendezvous import init_process_group

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    init_process_group(600)
    shape = ModelShape.from_hf_config(config)
    for tp, pp, rollout_tp, share in LAYOUTS[world]:
        cells = measure(directory, shape, Mesh(world, tp, pp), rollout_tp, share, repeats)
        if rank == 0:
            print("| " + " | ".join(cells) + " |", flush=True)
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4], choices=sorted(LAYOUTS))
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    config = model_config(args.hidden, args.layers)
    sizes = logical_shapes(ModelShape.from_hf_config(config))
    count = sum(torch.Size(size).numel() for size in sizes.values())
    print(
        f"qwen2 of {count / 1e6:.0f} M parameters, bf16; buckets of {BUCKET_MB} MiB; the worst "
        "rank's figures\n"
    )
    print("| " + " | ".join(COLUMNS) + " |\n|" + " ---: |" * len(COLUMNS), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        for world in args.world:
            with socket.socket() as s:
                s.bind(("localhost", 0))
                port = s.getsockname()[1]
            mp.spawn(worker, args=(world, port, directory, config, args.repeats), nprocs=world)


if __name__ == "__main__":
    main()
