"""Parts that need torch alone, and no model: the machine, checksums, process groups, timeouts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from gpu_parts import measure
from gpu_parts.processes import free_port
from gpu_parts.report import Report
from gpu_parts.sizes import Sizes
from rlhf_mc import platform
from rlhf_mc.reshard.transport import send_and_receive
from rlhf_mc.reshard.verify import checksum
from rlhf_mc.topology.consensus import gather_objects, sum_over_ranks

GB = 1e9
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int64)
ENDS_WITHIN_SECONDS = 120
"""Time after the timeout of a collective within which its process must have ended: NCCL's watchdog
waits 60 s for its records to be written first (ProcessGroupNCCL.cpp, Watchdog::runLoop)."""
PRODUCT_BOUND = 0.01
"""Largest error of a bfloat16 product relative to its norm. Rounding the result alone gives
0.002."""
LARGEST_BY_DEFINITION = 10_000_000
"""Number of bytes of the largest tensor whose checksum is also computed by its definition, with
numpy."""


def machine(report: Report, sizes: Sizes) -> None:
    """Record the device, its software, and its rates: the denominators of later parts. A product
    and a copy to the host and back must be right."""
    report.record(torch=torch.__version__, cpu_threads=torch.get_num_threads())
    name = "CPU"
    if platform.use_cuda():
        properties = torch.cuda.get_device_properties(platform.device())
        name = properties.name
        nccl = ".".join(map(str, platform.nccl_version()))
        report.record(
            gpus=torch.cuda.device_count(),
            compute_capability=f"{properties.major}.{properties.minor}",
            memory_gib=round(properties.total_memory / 2**30, 1),
            cuda=torch.version.cuda,
            nccl=nccl,
        )
    _check_product(report, sizes.matmul)
    _check_copies(report)
    rate = measure.matmul_rate(sizes.matmul)
    copy = measure.device_copy_rate(sizes.copy_bytes)
    to_host, to_device = measure.host_copy_rates(min(sizes.copy_bytes, 1 << 30))
    report.record(
        name=name,
        matmul_tflops=rate / 1e12,
        data_sheet_tflops=None if (peak := measure.data_sheet_flops()) is None else peak / 1e12,
        device_copy_gb_per_s=copy / GB,
        to_host_gb_per_s=to_host / GB,
        to_device_gb_per_s=to_device / GB,
    )
    report.summarize(
        f"{name}: bf16 product {rate / 1e12:.3g} TFLOP/s, copies {copy / GB:.3g} GB/s on the "
        f"device, {to_host / GB:.3g} to and {to_device / GB:.3g} from the host"
    )


def _check_product(report: Report, size: int) -> None:
    """Compare a product of bfloat16 matrices [64, size] x [size, 64] with the CPU's in float64."""
    draw = torch.Generator(platform.device()).manual_seed(0)
    a = torch.randn(64, size, generator=draw, device=platform.device()).bfloat16()
    b = torch.randn(size, 64, generator=draw, device=platform.device()).bfloat16()
    wanted = a.cpu().double() @ b.cpu().double()
    error = float((torch.mm(a, b).cpu().double() - wanted).norm() / wanted.norm())
    report.record(matmul_error=error)
    report.check(error < PRODUCT_BOUND, f"a bfloat16 product is off by {error:.1e} of its norm")


def _check_copies(report: Report) -> None:
    """Copy bytes to page-locked memory, to the device, on the device and back, and compare them."""
    wanted = torch.randint(
        256, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    locked = platform.host_bytes(len(wanted)).copy_(wanted)
    device = torch.empty_like(locked, device=platform.device()).copy_(locked, non_blocking=True)
    back = platform.host_bytes(len(wanted)).copy_(device.clone(), non_blocking=True)
    platform.synchronize()
    report.check(torch.equal(back, wanted), "bytes copied to the device and back are other bytes")


def checksums(report: Report, sizes: Sizes) -> None:
    """Compare checksums of the same bits on the device and on the CPU: of vectors, of matrices, of
    every second row. Those of small tensors are compared with the definition too; a changed bit
    must change the checksum."""
    draw = torch.Generator().manual_seed(0)
    num = 0
    for dtype in DTYPES:
        for size in sizes.checksum_elements:
            num_bytes = size * dtype.itemsize
            bits = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=draw)
            host = bits.view(dtype)
            blocks = [host[None]]
            if size > 100:
                matrix = host[: size // 50 * 50].view(-1, 50)
                blocks += [matrix[None], matrix[::2, 10:40][None]]
            for number, block in enumerate(blocks):
                wanted = checksum([block])
                if block.nbytes <= LARGEST_BY_DEFINITION:
                    of = f"{dtype} {tuple(block.shape)}"
                    report.check(
                        torch.equal(wanted, _by_definition(block)),
                        f"{of}: not the sums of its 8-byte words",
                    )
                there = (
                    block.to(platform.device())
                    if number < 2
                    else matrix.to(platform.device())[::2, 10:40][None]
                )
                num += 1
                report.check(
                    torch.equal(checksum([there]).cpu(), wanted),
                    f"{dtype} {tuple(block.shape)}: not the CPU's",
                )
    changed = bits.clone()
    changed[len(bits) // 3] ^= 1
    both = [checksum([x.view(1, 1, -1).to(platform.device())]) for x in (bits, changed)]
    report.check(not torch.equal(*both), "one changed bit does not change the checksum")
    device = bits.to(platform.device()).view(1, 1, -1)
    rate = len(bits) / measure.seconds(lambda: checksum([device]))
    report.record(compared=num, gb_per_s=rate / GB)
    report.summarize(f"{num} tensors agree with the CPU, {rate / GB:.1f} GB/s")


def _by_definition(block: torch.Tensor) -> torch.Tensor:
    """Return the sum of the block's 8-byte words, padded with zeros, and the sum of mixed words,
    weighted by position, both modulo 2^64: [2] int64."""
    data = block.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(data + bytes(-len(data) % 8), dtype=np.int64)
    positions = np.arange(1, 1 + len(words), dtype=np.int64)
    return torch.tensor([int(words.sum()), int(((words + (words >> 33)) * positions).sum())])


def process_groups(report: Report, sizes: Sizes) -> None:
    """Use every kind of communication of a run: objects, sums, groups of a layout, point-to-point
    messages in which not every rank takes part."""
    from rlhf_mc.topology.groups import barrier, build_role_groups, set_timeout_of_all_groups
    from rlhf_mc.topology.mesh import Mesh

    rank = dist.get_rank()
    world = dist.get_world_size()
    everyone = list(range(world))
    gathered = gather_objects({"rank": rank, "text": "x" * 10_000 * rank})
    report.check(
        [item["rank"] for item in gathered] == everyone,
        "gather_objects: not in the order of the ranks",
    )
    barrier()
    numbers = torch.zeros(world + 1)
    numbers[rank] = rank + 0.5
    numbers[world] = 1.0
    wanted = torch.tensor([r + 0.5 for r in everyone] + [float(world)])
    report.check(torch.equal(sum_over_ranks(numbers), wanted), "sum_over_ranks: another sum")
    tp = 2 if world % 2 == 0 else 1
    meshes = {"actor": Mesh(world, tp, 1), "critic": Mesh(world, 1, tp), "ref": Mesh(world, 1, 1)}
    groups = build_role_groups(meshes, 120)
    for role, of_role in groups.items():
        for name in ("tp", "pp", "dp", "mp", "cp", "tp_dp_cp", "expt_dp"):
            group = getattr(of_role.collection, name)
            ones = torch.ones(1, device=platform.device())
            dist.all_reduce(ones, group=group)
            report.check(
                int(ones) == group.size(), f"{role}.{name}: the sum of ones is {int(ones)}"
            )
    if rank == 0:  # alone: such a group is made by its own rank
        alone = dist.new_group([0], use_local_synchronization=True)
        dist.all_reduce(torch.ones(1, device=platform.device()), group=alone)
    set_timeout_of_all_groups(120)
    report.record(
        backend=str(dist.get_backend()),
        ranks=world,
        groups=len(dist.distributed_c10d._world.pg_map),
    )
    report.summarize(f"{world} rank(s), {platform.backend()}")
    if world > 1:
        _messages(report, rank)
        rate = _all_reduce_rate(sizes.copy_bytes // 16)
        report.record(all_reduce_gb_per_s=rate / GB)
        report.summarize(f"{world} ranks, {platform.backend()}; all-reduce {rate / GB:.1f} GB/s")


def _messages(report: Report, rank: int) -> None:
    """Exchange a message between ranks 0 and 1 alone, then around the ring of all ranks."""
    assert dist.group.WORLD is not None
    world = dist.get_world_size()
    message = torch.full((1000,), float(rank), device=platform.device())
    for peers in ({0: 1, 1: 0}, {r: (r + 1) % world for r in range(world)}):
        to = peers.get(rank)
        source = next((r for r, target in peers.items() if target == rank), None)
        outgoing = {} if to is None else {to: message}
        incoming = {} if source is None else {source: torch.empty_like(message)}
        send_and_receive(outgoing, incoming, dist.group.WORLD)
        for sender, got in incoming.items():
            report.check(
                bool((got == sender).all()), f"message of rank {sender} to {rank}: other values"
            )


def _all_reduce_rate(num_bytes: int) -> float:
    """Return the bytes per second of an all-reduce: those that each rank sends, 2 (n - 1) / n of
    the tensor."""
    tensor = torch.ones(num_bytes // 4, device=platform.device())
    world = dist.get_world_size()
    return 2 * (world - 1) / world * num_bytes / measure.seconds(lambda: dist.all_reduce(tensor))


def timeouts(report: Report, sizes: Sizes) -> None:
    """Start further processes of all ranks, of which the first waits for a collective that the
    others do not enter. It must end by the timeout of its process group."""
    timeout = sizes.timeout_seconds
    port, done = gather_objects((str(free_port()), f"{tempfile.mkdtemp()}/done"))[0]
    command = [
        sys.executable,
        str(Path(__file__).with_name("missed_collective.py")),
        str(timeout),
        done,
    ]
    start = time.monotonic()
    ended = subprocess.run(
        command, env={**os.environ, "MASTER_PORT": port}, capture_output=True, text=True
    )
    seconds = time.monotonic() - start
    print(ended.stdout, ended.stderr)
    if dist.get_rank() != 0:
        return
    Path(done).touch()
    waited = [
        float(line.split()[1]) for line in ended.stdout.splitlines() if line.startswith("waiting ")
    ]
    report.check(bool(waited), "the process ended before it waited")
    report.check(ended.returncode != 0, "the collective that the other ranks missed has returned")
    took = time.time() - waited[0] if waited else seconds
    report.expect(
        took < timeout + ENDS_WITHIN_SECONDS, f"ended {took:.0f} s after it began to wait"
    )
    report.check(
        took > 0.8 * timeout, f"ended after {took:.1f} s, before its timeout of {timeout} s"
    )
    report.record(timeout_s=timeout, ended_after_s=took, exit_code=ended.returncode)
    report.summarize(
        f"ended {took:.1f} s after it began to wait, timeout {timeout} s, exit code "
        f"{ended.returncode}"
    )
