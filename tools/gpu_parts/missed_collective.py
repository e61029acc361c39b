"""A program whose rank 0 waits for a collective that the other ranks do not enter. The part
`timeouts` starts it, since NCCL ends the process that waits.

python missed_collective.py TIMEOUT_SECONDS FILE    (the other ranks wait until FILE exists)
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.topology.rendezvous import init_process_group


def main(timeout: int, done: Path) -> None:
    """Connect the ranks, then enter a collective of a group with this timeout on rank 0 alone."""
    init_process_group(120)
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    ones = torch.ones(1, device=platform.device())
    dist.all_reduce(ones, group=group)
    platform.synchronize()
    if dist.get_rank() == 0:
        print(f"waiting {time.time()}", flush=True)
        dist.all_reduce(ones, group=group)
        platform.synchronize()
        os._exit(0)
    deadline = time.monotonic() + 10 * timeout + 60
    while not done.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
