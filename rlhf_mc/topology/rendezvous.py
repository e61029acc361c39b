"""Rendezvous: each rank registers in torch's store and waits for all others. No Megatron here: the
ranks are connected, and send heartbeats, before the slow imports.
"""

from __future__ import annotations

import datetime
import os
import time

import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.config.errors import JoinError, first_line
from rlhf_mc.patching import apply
from rlhf_mc.topology.numa import bind_to_numa_node
from rlhf_mc.topology.open_files import raise_limit
from rlhf_mc.topology.shared_gpu import prepare_shared_gpus
from rlhf_mc.torch_patches import GLOO_GROUPS

JOIN_SECONDS = 300.0
"""Timeout of the rendezvous, unless the timeout of collectives is shorter. A rank joins after its
import of torch, which is slow on a cold file system."""
MOST_NAMED = 8
"""Maximum number of missing ranks that a message names; the others are counted."""
_LONGEST_PAUSE = 0.5
_ALL, _COUNT, _FAILED, _PRINTER = (
    f"rlhf_mc/join/{name}" for name in ("all", "count", "failed", "printer")
)


def init_process_group(timeout_seconds: float) -> None:
    """Join the world that torchrun or srun describes in the environment. Without such an
    environment the world is this process. timeout_seconds: timeout of its collectives. Raise
    JoinError if not all ranks join in time or this process does not see its GPU, NodeError if it
    may not have enough files open, and what prepare_shared_gpus raises."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost")
        os.environ.setdefault("MASTER_PORT", "0")
    prepare_shared_gpus()
    _check_device()
    platform.set_device()
    platform.enter_stream()
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    raise_limit(world, rank)
    if (address := platform.pci_address()) is not None:
        bind_to_numa_node(address)
    store = _store(rank, world, min(JOIN_SECONDS, timeout_seconds))
    _wait_for_all(store, rank, world, min(JOIN_SECONDS, timeout_seconds))
    timeout = datetime.timedelta(seconds=timeout_seconds)
    store.set_timeout(timeout)
    dist.init_process_group(
        platform.backend(), store=store, rank=rank, world_size=world, timeout=timeout
    )
    if platform.backend() == "gloo":
        apply(GLOO_GROUPS)


def _check_device() -> None:
    """Raise JoinError if this process does not see the GPU of its local rank. The first such rank
    of a node prints it."""
    device = platform.device()
    count = platform.num_devices()
    if device.type == "cpu" or device.index < count:
        return
    local_rank = int(os.environ["LOCAL_RANK"])
    share = platform.ranks_per_gpu()
    ranks = f"{share} ranks ({platform.RANKS_PER_GPU})" if share > 1 else "rank"
    raise JoinError(
        f"LOCAL_RANK is {local_rank}, and this process sees {count} GPU{'s' * (count > 1)}; every "
        f"rank must see all GPUs of its node, of which there must be one for each {ranks}: ask "
        "Slurm for --gpus-per-node and not for --gpus-per-task or --gpu-bind, and see "
        "CUDA_VISIBLE_DEVICES",
        prints=local_rank == count * share,
    )


def _store(rank: int, world: int, seconds: float) -> dist.Store:
    """Return torch's store at MASTER_ADDR, which torchrun's agent hosts, or else rank 0."""
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    timeout = datetime.timedelta(seconds=seconds)
    try:
        return dist.TCPStore(
            host,
            port,
            world,
            is_master=is_host,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        what = "cannot listen" if is_host else f"has not reached rank 0 within {seconds:g} s"
        raise JoinError(
            f"{what} at {host}:{port} (MASTER_ADDR, MASTER_PORT): {first_line(error)}", prints=True
        ) from error


def _wait_for_all(store: dist.Store, rank: int, world: int, seconds: float) -> None:
    """Wait until every rank has joined. Raise JoinError if one has not within the timeout; the
    first rank that notices prints the message for all."""
    try:
        store.set(_joined_key(rank), "")
        if store.add(_COUNT, 1) == world:
            store.set(_ALL, "")
        deadline = time.monotonic() + seconds
        pause = 0.02
        while not store.check([_ALL]):
            if time.monotonic() > deadline and not store.check([_FAILED]):
                missing = [other for other in range(world) if not store.check([_joined_key(other)])]
                if missing:
                    prints = store.add(_PRINTER, 1) == 1
                    store.set(_FAILED, _missing(missing, world, seconds))
                    raise JoinError(_missing(missing, world, seconds), prints)
            if store.check([_FAILED]):
                raise JoinError(store.get(_FAILED).decode(), prints=False)
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
    except JoinError:
        if rank == 0:
            # rank 0 hosts the store, from which the others read the message
            time.sleep(4 * _LONGEST_PAUSE)
        raise
    except RuntimeError as error:
        raise JoinError(
            f"lost contact with rank 0 before all ranks had joined ({first_line(error)})",
            prints=True,
        ) from error


def _joined_key(rank: int) -> str:
    return f"rlhf_mc/join/{rank}"


def _missing(ranks: list[int], world: int, seconds: float) -> str:
    named = ", ".join(map(str, ranks[:MOST_NAMED]))
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return (
        f"{world - len(ranks)} of {world} ranks have joined within {seconds:g} s; missing: rank "
        f"{named}{more}. See their own logs; a node that is down has none"
    )
