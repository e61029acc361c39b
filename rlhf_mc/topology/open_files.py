"""The limit on the files that a process may have open. Connections are files: gloo connects every
two ranks.

No torch here. docs/internals/open_files.md has the arithmetic.
"""

from __future__ import annotations

import contextlib
import resource

from rlhf_mc.config.errors import NodeError

_GROUPS = 4
"""Connections to other ranks, as multiples of the world: in torch's world, in vLLM's, and in all
training groups of one layout, which have together fewer than twice as many members."""
_SERVERS = 2
"""Servers of rank 0 with a connection from every rank: torch's store and the heartbeats'."""
_OTHERS = 250
"""All else: the engine's groups, libraries, NCCL, devices."""


def needed(world: int, rank: int) -> int:
    """Return about how many files a rank has open. Rank 0 has the most."""
    return (_GROUPS + (_SERVERS if rank == 0 else 0)) * world + _OTHERS


def ranks_allowed(limit: int) -> int:
    """Return about how many ranks a run may have where a process may have `limit` files open."""
    return max(0, limit - _OTHERS) // (_GROUPS + _SERVERS)


def raise_limit(world: int, rank: int) -> None:
    """Raise this process's soft limit to the hard one. Raise NodeError if a run of `world` ranks
    needs more."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    least = needed(world, rank)
    if limit != resource.RLIM_INFINITY and limit < least:
        raise NodeError(
            f"rank {rank} of {world} needs about {least} open files and connections, and a process "
            f"may have {limit} here: raise the hard limit (ulimit -Hn; see docs/cluster.md)"
        )
