"""Does a save on a GPU take host memory and time for clones? Actor and critic with their
optimizers, saved in the background and synchronously, with storages of exact size and with views of
the arena, which Megatron-Core clones. Alternating, the same files:

    python benchmarks/gpu/save.py
    python benchmarks/gpu/save.py --hidden 128 --layers 1 --vocab 512 --rounds 1    # on a CPU

Bounds are printed first: the copy to page-locked memory, and a clone of as many bytes by one
thread.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))

from checkpoint import make_roles, measure_variants, timed

from rlhf_mc import platform
from rlhf_mc.checkpoint.training_blocks import TrainedModel, model_blocks, num_bytes
from rlhf_mc.topology.consensus import gather_objects
from rlhf_mc.topology.rendezvous import init_process_group

_PROBE = 1 << 28
"""Bytes of the copies that measure a rate, at most."""


def print_bounds(roles: list[TrainedModel]) -> None:
    """Print the bytes that a rank saves, and the least time of their copies."""
    size = num_bytes(block for role in roles for block in model_blocks(role))
    probe = min(size, _PROBE)
    device = torch.ones(probe, dtype=torch.uint8, device=platform.device())
    host = platform.host_bytes(probe)

    def stage() -> None:
        host.copy_(device, non_blocking=True)
        platform.synchronize()

    pageable = torch.ones(probe, dtype=torch.uint8)
    staging, cloning = (
        size / probe * min(timed(copy) for _ in range(5)) for copy in (stage, pageable.clone)
    )
    if dist.get_rank() == 0:
        where = "a GPU" if platform.use_cuda() else "the CPU"
        print(f"{dist.get_world_size()} ranks on {where}, {size / 1e6:.0f} MB a rank")
        print(f"bounds: {staging:.3f} s to copy to the arena, {cloning:.3f} s more to clone")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--directory", help="where to write (default: the system's place for temporary files)"
    )
    args = parser.parse_args()
    init_process_group(timeout_seconds=600)
    roles = make_roles(args.hidden, args.layers, "bfloat16", args.vocab)
    print_bounds(roles)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        measure_variants(roles, Path(gather_objects(directory)[0]), args.rounds)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
