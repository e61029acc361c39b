"""The planner's verdict at the start of a run (trainer.planner)."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.schema import Config
from rlhf_mc.machine.facts import available_memory
from rlhf_mc.planner.start import Capacity, check_start
from rlhf_mc.topology.consensus import gather_objects, on_rank_0, ranks_per_node


def check_memory(cfg: Config, shapes: Mapping[str, ModelShape]) -> str | None:
    """Return the verdict in one line, the same on every rank; None if trainer.planner is "off". Raise UserError on
    every rank if the run does not fit and trainer.planner is "refuse". Every rank must call it."""
    if cfg.trainer.planner == "off":
        return None
    cuda = platform.use_cuda()
    smallest = min(gather_objects(platform.device_memory())) if cuda else _smallest_share()
    capacity = Capacity(dist.get_world_size(), smallest, cuda, ranks_per_node())
    return on_rank_0(lambda: check_start(cfg, shapes, capacity))


def _smallest_share() -> int:
    """Return the bytes of host memory that a rank can have: of the node that has least, what is available and what its
    ranks already have, in equal parts. Every rank must call it."""
    found = gather_objects((socket.gethostname(), available_memory(), platform.process_memory()))
    nodes: dict[str, list[tuple[int, int]]] = {}
    for host, available, used in found:
        nodes.setdefault(host, []).append((available, used))
    return min(
        (min(available for available, _ in ranks) + sum(used for _, used in ranks)) // len(ranks)
        for ranks in nodes.values()
    )
