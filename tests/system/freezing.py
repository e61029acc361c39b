"""Ranks that freeze or dawdle at a chosen place, for test_stuck_ranks.py. What a run imports is imported once: each
rank is forked from a process that has done it."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRELOADED = ["rlhf_mc.trainer.ppo", "rlhf_mc.trainer.setup", "rlhf_mc.observability.watchdog", "freezing"]
STEP = 2
"""From which step on the victim is stuck."""


def start_ranks(argv: list[str], victim: int, place: str, logs: Path, world: int = 2) -> list[Any]:
    """The processes of a run; what rank r says goes to logs/rank<r>."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    ranks = [
        context.Process(target=_rank, args=(r, world, port, argv, place if r == victim else "", str(logs)))
        for r in range(world)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def _rank(rank: int, world: int, port: int, argv: list[str], place: str, logs: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="localhost", MASTER_PORT=str(port)
    )
    descriptor = os.open(f"{logs}/rank{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    from rlhf_mc.__main__ import run
    from rlhf_mc.observability.failures import exit_code, leave

    if place:
        _prepare(place, Path(logs) / "stuck_since")
    leave(exit_code("rlhf_mc", lambda: run(argv)))


def _prepare(place: str, note: Path) -> None:
    """Has this process get stuck at `place` in its first call there from STEP on."""
    import megatron.core.tensor_parallel.mappings as mappings
    from vllm.distributed.parallel_state import GroupCoordinator

    from rlhf_mc.trainer import experience, ppo

    at: dict[str, int] = {"step": 0}
    begin_step = ppo.begin_step

    def begin(step: int, *args: Any) -> Any:
        at["step"] = step
        return begin_step(step, *args)

    def stuck(original: Callable[..., Any], stop: Callable[[], None]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if at["step"] >= STEP:
                time.sleep(0.5)  # its last report is of here
                note.write_text(str(time.time()))
                stop()
            return original(*args, **kwargs)

        return call

    ppo.begin_step = begin
    freeze = lambda: os.kill(os.getpid(), signal.SIGSTOP)  # noqa: E731
    if place == "in vLLM's group":
        GroupCoordinator.all_reduce = stuck(GroupCoordinator.all_reduce, freeze)  # type: ignore[method-assign]
    elif place == "in Megatron's group":
        mappings._reduce = stuck(mappings._reduce, freeze)
    else:
        assert place == "in code of its own"
        experience.compute_advantages = stuck(experience.compute_advantages, dawdle)


def dawdle() -> None:
    """Alive, and getting nowhere."""
    while True:
        time.sleep(0.1)
