"""Time that a checkpoint blocks the training loop: written synchronously against written in the
background. Actor and critic with their optimizers, alternating, the same files, on this machine's
disk:

    OMP_NUM_THREADS=1 python benchmarks/checkpoint.py
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/checkpoint.py

Lower bounds are printed with the times: the bytes at this machine's memory and disk bandwidth. Host
memory that a save takes is printed beside the planner's, with storages of exact size and with views
of the arena, which Megatron-Core clones.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint import training_tensors
from rlhf_mc.checkpoint.directory import digest_file, final_path
from rlhf_mc.checkpoint.training_blocks import TrainedModel, model_blocks, num_bytes
from rlhf_mc.checkpoint.training_state import Save
from rlhf_mc.checkpoint.training_tensors import HostBuffers
from rlhf_mc.config.schema import MegatronConfig, OptimConfig
from rlhf_mc.models.engine import ModelEngine, engine_layouts
from rlhf_mc.models.transformer_engine import uses_transformer_engine
from rlhf_mc.planner.host_memory import saved_bytes
from rlhf_mc.planner.model_state import trained_state
from rlhf_mc.topology.consensus import gather_objects
from rlhf_mc.topology.groups import build_groups
from rlhf_mc.topology.mesh import Mesh
from rlhf_mc.topology.rendezvous import init_process_group


def make_roles(hidden: int, layers: int, dtype: str, vocab_size: int = 32000) -> list[TrainedModel]:
    """Build actor and critic of about 12 x layers x hidden^2 parameters each, with optimizer states
    as after a step."""
    config = {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 2,
        "vocab_size": vocab_size,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    }
    megatron = MegatronConfig(dtype=dtype)  # type: ignore[arg-type]
    groups = build_groups(Mesh(dist.get_world_size(), 1, 1))
    roles = []
    for name, value_head in (("actor", False), ("critic", True)):
        engine = ModelEngine(name, ModelShape.from_hf_config(config, value_head), megatron, groups)
        for param in engine.params.values():
            param.normal_()
        engine.make_trainable(OptimConfig(), total_steps=10)
        engine.load_progress({"optimizer_steps": 1, "schedule_steps": 1})
        roles.append(TrainedModel(engine, engine_layouts(engine)))
    return roles


def timed(action: Callable[[], object]) -> float:
    """Return the seconds from the common start of all ranks to the end of the last."""
    dist.barrier()
    start = time.perf_counter()
    action()
    return max(gather_objects(time.perf_counter() - start))


def memory_bandwidth(size: int) -> float:
    """Return the bytes per second of a copy between two tensors whose pages are mapped."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.ones(size, dtype=torch.uint8)
    return size / min(timed(lambda: target.copy_(source)) for _ in range(5))


def disk_bandwidth(directory: Path, size: int) -> float:
    """Return the bytes per second of one rank, until they are synced to disk, while all ranks
    write."""
    data = memoryview(torch.ones(size, dtype=torch.uint8).numpy())

    def write() -> None:
        with open(directory / f"speed{dist.get_rank()}", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    seconds = statistics.median(timed(write) for _ in range(3))
    (directory / f"speed{dist.get_rank()}").unlink()
    return size / seconds


def matmul_rate(seconds: float, until: Callable[[], bool]) -> float:
    """Compute matrix products for `seconds` or until `until` is true. Return the products per
    second."""
    a = torch.randn(384, 384)
    start = time.perf_counter()
    count = 0
    while time.perf_counter() - start < seconds and not until():
        a @ a
        count += 1
    return count / (time.perf_counter() - start)


STORAGES = {"exact": training_tensors.with_exact_storage, "views": lambda tensor: tensor}
"""Variant -> the function that makes what Megatron-Core writes from a block on the host."""
VARIANTS = tuple(itertools.product(STORAGES, ("background", "synchronous")))


def peak_host_memory() -> int:
    """Return the largest host memory of this process since `reset_peak`, in bytes."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) << 10


def reset_peak() -> int:
    """Begin a new peak of this process's host memory. Return the bytes that it has now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return platform.process_memory()


def measure_variants(
    roles: list[TrainedModel], root: Path, rounds: int
) -> dict[tuple[str, str], tuple[float, int]]:
    """Save in each variant, alternating, and report. Return by variant the median of the seconds
    that the loop is blocked until the write has begun (synchronous: has ended), and the host memory
    that the save takes in bytes. The files of all variants have the same bytes. The first round is
    a warm-up, in which the arenas are allocated."""
    arenas = {storages: HostBuffers() for storages in STORAGES}
    seconds: dict[tuple[str, str], list[float]] = {variant: [] for variant in VARIANTS}
    memory = dict.fromkeys(VARIANTS, 0)
    digests = set()
    for step, variant in enumerate(VARIANTS * (rounds + 1)):
        storages, kind = variant
        buffers = arenas[storages] if kind == "background" else None
        saves: list[Save] = []

        def begin(
            step: int = step, buffers: HostBuffers | None = buffers, saves: list[Save] = saves
        ) -> None:
            saves.append(Save(root, step, roles, {}, {}, {}, "run", buffers))

        with mock.patch.object(training_tensors, "with_exact_storage", STORAGES[storages]):
            before = reset_peak()
            seconds[variant].append(timed(begin))
            saves[0].commit()
            memory[variant] = max(memory[variant], max(gather_objects(peak_host_memory() - before)))
        digests.add(digest_file(final_path(root, step) / f"__{dist.get_rank()}_0.distcp").sha256)
    assert len(digests) == 1, "the variants have written different bytes"
    result = {
        variant: (statistics.median(seconds[variant][1:]), memory[variant]) for variant in VARIANTS
    }
    report_variants(roles, result)
    return result


def planned_bytes(role: TrainedModel) -> float:
    """Return the planner's bytes of an asynchronous save of this rank's part of a model."""
    engine = role.engine
    megatron = MegatronConfig(dtype=engine.dtype)  # type: ignore[arg-type]
    mesh = engine.groups.mesh
    layout = role.layouts[engine.groups.rank]
    stage = engine.groups.coordinate.pp
    state = trained_state(
        layout, megatron, mesh, stage, (), uses_transformer_engine(), engine.shape.shares_embeddings
    )
    return saved_bytes(state.params, state.optimizer, mesh)


def report_variants(
    roles: list[TrainedModel], result: dict[tuple[str, str], tuple[float, int]]
) -> None:
    """Print the variants on rank 0."""
    if dist.get_rank() != 0:
        return
    planned = sum(map(planned_bytes, roles))
    print(f"{'storages':10}{'save':14}{'blocked s':>10}{'host memory MB':>16}{'planned MB':>12}")
    for (storages, kind), (seconds, taken) in result.items():
        row = planned if kind == "background" else 0
        print(f"{storages:10}{kind:14}{seconds:10.3f}{taken / 1e6:16.0f}{row / 1e6:12.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--directory", help="where to write (default: the system's place for temporary files)"
    )
    args = parser.parse_args()
    init_process_group(timeout_seconds=600)
    roles = make_roles(args.hidden, args.layers, args.dtype)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        root = Path(gather_objects(directory)[0])
        measure_variants(roles, root / "variants", args.rounds)
        measure(roles, root, args.rounds)
        dist.barrier()
    dist.destroy_process_group()


def measure(roles: list[TrainedModel], root: Path, rounds: int) -> None:
    """Save synchronously and in the background in each round, and report. The first round is a
    warm-up."""
    size = num_bytes(block for role in roles for block in model_blocks(role))
    buffers = HostBuffers()
    blocked: dict[str, list[float]] = {
        "synchronous": [],
        "background": [],
        "commit": [],
        "written after": [],
    }
    speed: dict[str, list[float]] = {"alone": [], "during save": []}
    for number in range(rounds + 1):
        save: list[Save] = []
        step = 2 * number

        def begin(step: int, background: bool, save: list[Save] = save) -> None:
            save.append(Save(root, step, roles, {}, {}, {}, "run", buffers if background else None))

        synchronous = timed(lambda: begin(step, False)) + timed(lambda: save[-1].commit())  # noqa: B023
        started = time.perf_counter()
        begun = timed(lambda: begin(step + 1, True))  # noqa: B023
        speed["during save"].append(matmul_rate(60, save[-1]._writing.is_done))
        while not save[-1].is_written():
            time.sleep(0.01)
        after = time.perf_counter() - started
        committed = timed(lambda: save[-1].commit())  # noqa: B023
        speed["alone"].append(matmul_rate(1.0, lambda: False))
        for name, value in zip(blocked, (synchronous, begun, committed, after), strict=True):
            blocked[name].append(value)
    report(
        size,
        blocked,
        speed,
        memory_bandwidth(min(size, 1 << 28)),
        disk_bandwidth(root, min(size, 1 << 28)),
    )


def report(
    size: int,
    blocked: dict[str, list[float]],
    speed: dict[str, list[float]],
    copy: float,
    disk: float,
) -> None:
    """Print the medians on rank 0."""
    if dist.get_rank() != 0:
        return
    sync, begun, committed, after = (statistics.median(values[1:]) for values in blocked.values())
    device = "a GPU" if platform.use_cuda() else "the CPU"
    print(
        f"{dist.get_world_size()} ranks on {device}, {size / 1e6:.0f} MB a rank, "
        f"medians of {len(blocked['commit']) - 1}"
    )
    print(
        f"synchronous:              blocked for {sync:.3f} s "
        f"(bound: {size / disk:.3f} s at {disk / 1e9:.2f} GB/s of disk)"
    )
    print(
        f"background:               blocked for {begun + committed:.3f} s: {begun:.3f} s to copy "
        f"(bound: {size / copy:.3f} s at {copy / 1e9:.2f} GB/s of memory), {committed:.3f} s to "
        "commit"
    )
    print(f"ratio:                    {(begun + committed) / sync:.1%}")
    print(
        f"first in background:      {blocked['background'][0]:.3f} s to copy, into newly allocated "
        "memory"
    )
    slow = statistics.median(speed["during save"]) / statistics.median(speed["alone"])
    print(
        f"written after {after:.2f} s, during which the rank computes at {slow:.0%} of its usual "
        "speed"
    )


if __name__ == "__main__":
    main()
