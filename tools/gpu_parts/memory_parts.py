"""Parts that move much memory: offload to the host at a full device, and the weight update."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from gpu_parts import measure
from gpu_parts.engines import (
    mesh_groups,
    objective,
    random_engine,
    shared_directory,
    token_batch,
    with_targets,
)
from gpu_parts.report import Report
from gpu_parts.sizes import Sizes
from rlhf_mc import platform
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.health.adjustments import Adjustments
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.models.forward import MicroBatch
from rlhf_mc.models.gpt_model import PackedGPT, uses_transformer_engine
from rlhf_mc.models.offload import GRADS, OPTIMIZER, PARAMS
from rlhf_mc.reshard.layout import split_sizes
from rlhf_mc.reshard.placement import rollout_layouts, training_layouts
from rlhf_mc.reshard.plan import make_plan
from rlhf_mc.reshard.verify import checksum, verify
from rlhf_mc.reshard.weight_sync import WeightSync
from rlhf_mc.rollout.vllm_layout import vllm_layout
from rlhf_mc.topology.mesh import Mesh, rollout_groups
from rlhf_mc.topology.shared_gpu import in_turn
from rlhf_mc.trainer.token_budget import TokenBudget, train_step

GB = 1e9
FULL = 0.95
"""Share of the device memory that is in use when the offload begins."""
BUCKET_BYTES = 256 << 20


def offload(report: Report, sizes: Sizes) -> None:
    """Offload and onload a model with its optimizer on a device that is 95 % full, where other
    tensors use the memory in the meantime. The bits must be the same."""
    settings = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
    with mesh_groups(1, 1) as groups:
        engine = random_engine(sizes.offloaded, groups, **settings)
        engine.load_progress({"optimizer_steps": 1, "schedule_steps": 1})  # allocates the moments
        for part in engine.optimizer_parts():
            for value in part.state.values():
                value.uniform_()
        wanted = _digests(engine)
        with _full_device() as share:
            times = [_offload_once(report, engine) for _ in range(3)]
            report.record(device_in_use=share)
        different = [
            name for name, value in _digests(engine).items() if not torch.equal(value, wanted[name])
        ]
        report.check(
            not different, f"{len(different)} tensors have other bits, {different[:1]} first"
        )
    moved = _moved_bytes(engine)
    first, *others = times
    to_host, to_device = (moved / min(column) for column in zip(*others, strict=True))
    pinned = measure.host_copy_rates(min(sizes.copy_bytes, 1 << 30))
    report.record(moved_gb=moved / GB, first_offload_s=first[0])
    report.record(offload_gb_per_s=to_host / GB, onload_gb_per_s=to_device / GB)
    report.record(pinned_to_host_gb_per_s=pinned[0] / GB, pinned_to_device_gb_per_s=pinned[1] / GB)
    report.summarize(
        f"{moved / GB:.3g} GB, bits equal: {to_host / GB:.3g} GB/s out ({to_host / pinned[0]:.2f} "
        f"of a pinned copy), {to_device / GB:.3g} in ({to_device / pinned[1]:.2f}); the first took "
        f"{first[0]:.2f} s"
    )


def _offload_once(report: Report, engine: ModelEngine) -> tuple[float, float]:
    """Offload all groups, use the memory for something else, and onload them. Return the seconds of
    both ways."""
    before = torch.cuda.memory_allocated() if platform.use_cuda() else 0
    begin = time.perf_counter()
    engine.offload.offload_all_but(())
    platform.synchronize()
    out = time.perf_counter() - begin
    released = engine.offload.offloaded_bytes
    if platform.use_cuda():
        freed = before - torch.cuda.memory_allocated()
        report.check(freed >= released, f"{freed / GB:.2f} GB are released of {released / GB:.2f}")
    other = torch.full((int(0.9 * released),), 255, dtype=torch.uint8, device=platform.device())
    del other
    begin = time.perf_counter()
    engine.offload.onload((PARAMS, GRADS, OPTIMIZER))
    platform.synchronize()
    return out, time.perf_counter() - begin


def _tensors(engine: ModelEngine) -> Iterator[tuple[str, torch.Tensor]]:
    yield from engine.params.items()
    for part in engine.optimizer_parts():
        yield from ((f"{part.local} {key}", value) for key, value in part.state.items())


def _digests(engine: ModelEngine) -> dict[str, torch.Tensor]:
    return {
        name: checksum([tensor.detach().view(1, 1, -1)]).cpu() for name, tensor in _tensors(engine)
    }


def _moved_bytes(engine: ModelEngine) -> int:
    """Return the bytes that an offload copies; gradients are released only."""
    return sum({tensor.data_ptr(): tensor.nbytes for _, tensor in _tensors(engine)}.values())


@contextlib.contextmanager
def _full_device() -> Iterator[float | None]:
    """Fill the device memory up to the share FULL. Yield the share in use; None on a CPU."""
    if not platform.use_cuda():
        yield None
        return
    ballast: list[torch.Tensor] = []

    def fill() -> None:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        num_bytes = max(0, int(free - (1 - FULL) * total))
        ballast.append(torch.empty(num_bytes, dtype=torch.uint8, device=platform.device()))

    in_turn(fill)
    free, total = torch.cuda.mem_get_info()
    yield 1 - free / total
    ballast.clear()


def out_of_memory(report: Report, sizes: Sizes) -> None:
    """Take an update in which the last rank has memory for half of the token budget, and a quarter
    of that. Every rank must repeat it with half the budget, and have released what the first try
    took."""
    with mesh_groups(1, 1) as groups, shared_directory() as root:
        engine = random_engine(sizes.trained, groups, overlap_grad_reduce=False)
        engine.recover_memory()
        replicas = groups.mesh.dp
        lens = (sizes.prompt_lens * replicas, sizes.response_lens * replicas)
        batch = with_targets(engine, token_batch(engine.shape.vocab_size, *lens))
        longest = int(batch.seq_lens.max())
        # one micro-batch, however the replicas share the batch
        whole = int(batch.seq_lens.sum()) // replicas + longest
        half = whole // 2
        token_budget = TokenBudget("actor", 1, whole, longest, Adjustments(root))
        bytes_per_token = (1 << 30) // half
        plain = objective(engine, batch, "token-mean")

        def loss(model: PackedGPT, states: torch.Tensor, micro: MicroBatch) -> Any:
            activations = torch.empty(
                micro.tokens.numel() * bytes_per_token, dtype=torch.uint8, device=platform.device()
            )
            value, stats = plain(model, states, micro)
            del activations
            return value, stats

        train_step(engine, batch, loss, token_budget, 0)  # allocates the optimizer's state
        in_use = torch.cuda.memory_allocated() if platform.use_cuda() else 0
        is_last = groups.rank == groups.mesh.world - 1
        with measure.limited_memory(5 << 28) if is_last else contextlib.nullcontext():
            step = train_step(engine, batch, loss, token_budget, 1)
        kept = (torch.cuda.memory_allocated() if platform.use_cuda() else 0) - in_use
        limit = token_budget.update_limit(1)
        report.check(
            limit == half, f"the budget of the repeated update is {limit} tokens, not {half}"
        )
        report.check(not step.skipped, "the repeated update was skipped")
        report.expect(kept < 1 << 20, f"{kept} bytes of the first try are still in use")
    report.record(kept_bytes=kept)
    report.summarize(
        f"the update was repeated with {limit} tokens a micro-batch instead of {whole}"
    )


def weight_update(report: Report, sizes: Sizes) -> None:
    """Write all weights of 8B models into another engine's parameters, and compare the speed with
    one copy on
    the device. With several ranks: from tensor parallelism over all of them, or as many as the
    heads allow, to engines of half as many."""
    texts = []
    # connects all ranks by a collective: NCCL's first operation cannot be a message
    with mesh_groups(1, 1):
        for name, config in sizes.updated.items():
            with report.case(name):
                texts.append(f"{name} {_update(report, name, config, sizes)}")
    report.summarize("; ".join(texts))


def _update(report: Report, name: str, config: dict[str, Any], sizes: Sizes) -> str:
    shape = ModelShape.from_hf_config(config)
    rank = dist.get_rank()
    world = dist.get_world_size()
    tp = math.gcd(world, min(size for _, size, _ in split_sizes(shape)))
    mesh = Mesh(world, tp, 1)
    groups = rollout_groups(mesh, max(1, tp // 2))
    begin = time.perf_counter()
    training = training_layouts(shape, mesh, uses_transformer_engine())
    rollout = rollout_layouts(shape, groups, vllm_layout)
    plan = make_plan(training, rollout, torch.bfloat16.itemsize, BUCKET_BYTES, share=False)
    sync = WeightSync([plan], rank, "off")
    planned = time.perf_counter() - begin
    draw = torch.Generator(platform.device()).manual_seed(rank)
    empty: dict[str, Any] = {"dtype": torch.bfloat16, "device": platform.device()}
    source = {
        key: torch.empty(size, **empty).normal_(generator=draw)
        for key, size in training[rank].shapes.items()
    }
    for key, tensor in source.items():
        if "norm" in key:
            tensor.fill_(1.0)  # the same on all tensor-parallel ranks
    target = {
        key: torch.full(size, torch.nan, **empty) for key, size in rollout[rank].shapes.items()
    }
    seconds = measure.seconds(lambda: sync.run(source, target))
    begin = time.perf_counter()
    verify(sync.plan, source, target, dist.group.WORLD)  # of the planned blocks
    unwritten = [key for key, tensor in target.items() if bool(tensor.isnan().any())]
    report.check(
        not unwritten,
        f"{name}: {len(unwritten)} tensors are not written completely, {unwritten[:1]} first",
    )
    platform.synchronize()
    verified = time.perf_counter() - begin
    moved = sync.plan.copied_bytes + sync.plan.received_bytes
    transfers = len(sync.plan.copies) + sum(len(receives) for _, receives in sync.plan.buckets)
    source.clear()
    target.clear()
    copy = measure.device_copy_rate(min(moved, sizes.copy_bytes))
    rate = moved / seconds
    report.record(
        **{f"{name}_moved_gb": moved / GB, f"{name}_received_gb": sync.plan.received_bytes / GB}
    )
    report.record(
        **{
            f"{name}_s": seconds,
            f"{name}_gb_per_s": rate / GB,
            f"{name}_share_of_copy": rate / copy,
        }
    )
    report.record(
        **{
            f"{name}_transfers": transfers,
            f"{name}_planning_s": planned,
            f"{name}_verify_s": verified,
        }
    )
    return (
        f"{moved / GB:.3g} GB at {rate / GB:.3g} GB/s ({rate / copy:.2f} of one copy), verified in "
        f"{verified:.2f} s"
    )
