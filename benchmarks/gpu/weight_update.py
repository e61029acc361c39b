"""The weight update of a mixture of experts on one GPU: views made once against views made in each
update.

python benchmarks/gpu/weight_update.py [--layers 4] [--repeats 10] [--small]

The model is Qwen3 30B-A3B with few layers, in bfloat16. "local": one rank copies its weights, all
experts, into vLLM's tensors. "messages": rank 0 of two, with 64 of 128 experts each, packs what the
other lacks, and unpacks as many bytes from a buffer; nothing is sent. Ways: "remade" makes the
views of each expert in each update; "separate" and "stacked" keep them, with experts in memory of
their own, or one after another as in the distributed optimizer's buffer. The ways alternate; all
must write the same bits.

Bound: one copy of the moved bytes on the device, which reads and writes each byte once; the copy is
measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from rlhf_mc import platform
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.json_files import read
from rlhf_mc.planner.published import MODELS
from rlhf_mc.reshard.execute import bind, by_peer
from rlhf_mc.reshard.layout import Layout, Stack
from rlhf_mc.reshard.placement import rollout_layouts, training_layouts
from rlhf_mc.reshard.plan import make_plan
from rlhf_mc.reshard.transfers import RankPlan, Transfer
from rlhf_mc.reshard.transport import Buffers, Messages
from rlhf_mc.rollout.vllm_layout import vllm_layout
from rlhf_mc.topology.mesh import Mesh, rollout_groups

Tensors = Mapping[str, torch.Tensor]
BUCKET = 256 << 20
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "vocab_size": 512,
    "num_experts": 8,
}


class Loopback:
    """A transport that sends nothing: what arrives is what its inbox has."""

    def __init__(self, plan: RankPlan, empty: Callable[[int], torch.Tensor]) -> None:
        self.inbox = empty(
            max((sum(t.numel for t in receives) for _, receives in plan.buckets), default=0)
        )
        self.outbox = empty(plan.outbox_bytes // plan.itemsize)

    def buffers(self, plan: RankPlan, dtype: torch.dtype) -> Buffers:
        return Buffers(self.outbox, self.inbox)

    def exchange(
        self, buffers: Buffers, outgoing: Messages, sizes: Mapping[int, int]
    ) -> dict[int, torch.Tensor]:
        return dict(
            zip(sizes, self.inbox[: sum(sizes.values())].split([*sizes.values()]), strict=True)
        )

    def release(self) -> None:
        pass


def remade_blocks(
    t: Transfer, tensors: Tensors, local: str, offset: Any, step: int
) -> list[torch.Tensor]:
    """Return the views of one side of a transfer; of a stack, of each expert."""
    if isinstance(t.src_local, Stack) or isinstance(t.dst_local, Stack):
        first, *within = offset
        ranges = tuple(slice(a, a + n) for a, n in zip(within, t.extent[1:], strict=True))
        experts = (
            first + n * step + expert for n in range(t.count) for expert in range(t.extent[0])
        )
        if isinstance(local, Stack):
            return [tensors[local.member(expert)][ranges][None] for expert in experts]
        return [tensors[local][expert][ranges][None] for expert in experts]
    tensor = tensors[local]
    strides = tensor.stride()[len(offset) - len(t.extent) :]
    start = tensor.storage_offset() + sum(
        a * stride for a, stride in zip(offset, tensor.stride(), strict=True)
    )
    return [tensor.as_strided((t.count, *t.extent), (step * strides[0], *strides), start)]


def remade_update(
    plan: RankPlan, source: Tensors, target: Tensors, transport: Any, dtype: torch.dtype
) -> None:
    """Update with all views made on the way, those of dense and of strided blocks in the same
    lists."""

    def writes(t: Transfer) -> list[torch.Tensor]:
        return remade_blocks(t, target, t.dst_local, t.dst_offset, t.dst_step)

    def reads(t: Transfer) -> list[torch.Tensor]:
        return remade_blocks(
            t, target if t.forwarded else source, t.src_local, t.src_offset, t.src_step
        )

    def parts(flat: torch.Tensor, blocks: list[torch.Tensor]) -> list[torch.Tensor]:
        split = flat.split([block.numel() for block in blocks])
        return [part.view(block.shape) for part, block in zip(split, blocks, strict=True)]

    for t in plan.copies:
        torch._foreach_copy_(writes(t), reads(t))
    buffers = transport.buffers(plan, dtype)
    for sends, receives in plan.buckets:
        packed: dict[tuple, torch.Tensor] = {}
        filled = 0
        for group in by_peer(sends, lambda t: t.dst_rank).values():
            key = tuple(
                (t.forwarded, t.src_local, t.src_offset, t.extent, t.count, t.src_step)
                for t in group
            )
            if key not in packed:
                packed[key] = buffers.outbox[filled : filled + sum(t.numel for t in group)]
                filled += len(packed[key])
                blocks = [block for t in group for block in reads(t)]
                torch._foreach_copy_(parts(packed[key], blocks), blocks)
        arriving = by_peer(receives, lambda t: t.src_rank)
        sizes = {peer: sum(t.numel for t in group) for peer, group in arriving.items()}
        for peer, flat in transport.exchange(buffers, {}, sizes).items():
            blocks = [block for t in arriving[peer] for block in writes(t)]
            torch._foreach_copy_(blocks, parts(flat, blocks))


def local_tensors(
    layout: Layout, stacked: bool, empty: Callable[[int], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the local tensors of a layout. stacked: the experts of a stack lie one after
    another."""
    found = {}
    for name, size in layout.stacked_shapes.items():
        if not isinstance(name, Stack):
            found[name] = empty(torch.Size(size).numel()).view(size)
            continue
        gap = 0 if stacked else 64
        numel = torch.Size(size[1:]).numel()
        memory = empty(size[0] * (numel + gap * size[0]))
        for expert in range(size[0]):
            start = expert * (numel + gap * expert)  # without a common step where there are gaps
            found[name.member(expert)] = memory[start : start + numel].view(size[1:])
    return found


def measured(shape: ModelShape, ranks: int, repeats: int) -> Iterator[str]:
    """Yield the lines of one case."""
    device = platform.device()
    draw = torch.Generator(device).manual_seed(0)

    def drawn(numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=torch.bfloat16, device=device).normal_(generator=draw)

    def zeros(numel: int) -> torch.Tensor:
        return torch.zeros(numel, dtype=torch.bfloat16, device=device)

    mesh = Mesh(ranks, 1, 1, ep=ranks)
    training = training_layouts(shape, mesh, transformer_engine=True)
    rollout = rollout_layouts(shape, rollout_groups(mesh, 1), vllm_layout)
    plan = make_plan(training, rollout, 2, BUCKET).for_rank(0)
    stacked = local_tensors(training[0], True, drawn)
    separate = local_tensors(training[0], False, zeros)
    for name, tensor in separate.items():
        tensor.copy_(stacked[name])
    target = local_tensors(rollout[0], True, zeros)
    transport = Loopback(plan, drawn)
    kept = {name: bind(plan, source, target, torch.bfloat16).kept() for name, source in
            {"separate": separate, "stacked": stacked}.items()}  # fmt: skip
    ways: dict[str, Callable[[], None]] = {
        "remade": lambda: remade_update(plan, separate, target, transport, torch.bfloat16),
        **{name: lambda bound=bound: bound.execute(transport) for name, bound in kept.items()},
    }
    moved = plan.copied_bytes + plan.sent_bytes + plan.received_bytes
    pair = [zeros(min(moved, 4 << 30) // 2) for _ in range(2)]
    ways["one copy"] = lambda: pair[0].copy_(pair[1])
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    host: dict[str, list[float]] = {name: [] for name in ways}
    wanted: dict[str, torch.Tensor] = {}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            if repeat == 0:
                for tensor in target.values():
                    tensor.zero_()
            platform.synchronize()
            begin = time.perf_counter()
            way()
            launched = time.perf_counter() - begin
            platform.synchronize()
            if repeat:
                host[name].append(launched)
                seconds[name].append(time.perf_counter() - begin)
            elif name == "remade":
                wanted = {key: tensor.clone() for key, tensor in target.items()}
            elif name != "one copy":
                assert all(torch.equal(target[key], tensor) for key, tensor in wanted.items()), name
    bound = statistics.median(seconds["one copy"]) * moved / pair[0].nbytes
    yield (
        f"{'local' if ranks == 1 else 'messages'}: {moved / 1e9:.3g} GB moved; one copy "
        f"{1000 * bound:.2f} ms"
    )
    for name in ("remade", *kept):
        whole = statistics.median(seconds[name])
        share = f"{bound / whole:.2f} of a copy's rate"
        yield (
            f"  {name}: {1000 * whole:.2f} ms, of which the host "
            f"{1000 * statistics.median(host[name]):.2f}; {share}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--small", action="store_true", help="tiny matrices, to try the program on a CPU"
    )
    args = parser.parse_args()
    config = read(MODELS / "qwen3-30b-a3b" / "config.json")
    sizes = {"num_hidden_layers": args.layers, **(SMALL if args.small else {})}
    shape = ModelShape.from_hf_config({**config, **sizes})
    for ranks in (1, 2):
        for line in measured(shape, ranks, args.repeats):
            print(line, flush=True)


if __name__ == "__main__":
    main()
