"""A program whose ranks exchange sums on the device, with the heartbeats of a run, until one of
them is lost. The part `lost_ranks` starts it, and kills or stops a rank.

python -m gpu_parts.lost_rank HEARTBEAT_TIMEOUT_SECONDS
"""

from __future__ import annotations

import os
import sys
import time

from rlhf_mc.runtime.exit_codes import exit_code, exit_now

MOST_SECONDS = 600.0
"""Time after which a rank ends where none is lost."""


def main(timeout: float) -> None:
    """Add tensors over all ranks. Print a line after the first sum."""
    import torch
    import torch.distributed as dist

    from rlhf_mc import platform
    from rlhf_mc.observability.metrics import PhaseTimer
    from rlhf_mc.runtime.heartbeat import heartbeats
    from rlhf_mc.runtime.rank_status import RankStatus
    from rlhf_mc.topology.rendezvous import init_process_group

    init_process_group(MOST_SECONDS)
    status = RankStatus()
    tensor = torch.ones(1 << 16, device=platform.device())
    with (
        heartbeats(status, dist.get_rank(), timeout, timeout),
        PhaseTimer(status=status).phase("sums"),
    ):
        deadline = time.monotonic() + MOST_SECONDS
        dist.all_reduce(tensor)
        platform.synchronize()
        print("running", flush=True)
        while time.monotonic() < deadline:
            dist.all_reduce(tensor)
            platform.synchronize()


if __name__ == "__main__":
    # Only heartbeats end the ranks, as in a run that waits in NCCL.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    exit_now(exit_code("lost_rank", lambda: main(float(sys.argv[1]))))
