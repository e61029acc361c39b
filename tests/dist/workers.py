"""Worker processes for tests on several ranks: started once per world size, connected by gloo, each
running the same function of a test module with the same arguments."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest

TIMEOUT_SECONDS = 300
READY = "ready for the next function"
STACKS = signal.SIGRTMAX - 1
"""Signal at which a rank writes the stacks of its threads."""


def _worker(variables: dict[str, str], pipe: Any, stacks: str) -> None:
    assert "preloaded" in sys.modules
    faulthandler.register(STACKS, open(stacks, "w"), all_threads=True)  # noqa: SIM115
    os.environ.update(variables)
    _write_to_starter()
    import warnings

    import torch

    from rlhf_mc.topology.rendezvous import init_process_group

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    init_process_group(TIMEOUT_SECONDS)
    while True:
        task = pipe.recv()
        if task is None:
            return
        module, function, kwargs = task
        try:
            pipe.send((True, getattr(importlib.import_module(module), function)(**kwargs)))
        except BaseException as error:  # the test decides what a failure means
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))
        _destroy_groups()
        pipe.send(READY)


def _write_to_starter() -> None:
    """Send output to the files of the process that has started this one, where pytest captures it.
    The server's own are those of the first process."""
    starter = mp.parent_process()
    assert starter is not None
    for descriptor in (1, 2):
        file = os.open(f"/proc/{starter.pid}/fd/{descriptor}", os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)


def _destroy_groups() -> None:
    """Destroy the groups that the function has made, which have connections to the other ranks."""
    import preloaded
    import torch.distributed as dist
    from vllm.distributed import parallel_state

    from rlhf_mc.rollout import vllm_patches

    parallel_state.destroy_model_parallel()  # of an engine that the function has not closed
    vllm_patches.destroy_own_world()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    # A group of use_local_synchronization is named by its ranks and the number of groups. One of
    # the next function must have another name: in the store it would read this one's addresses.
    names: Any = dist.distributed_c10d._world.pg_names
    names.update((f"group {n}", "") for n in range(len(names), len(names) + 1000))
    # vLLM counts its groups too, and a rank of another pool has made none.
    for kind in ("tp", "pp"):
        parallel_state._group_name_counter[kind] = len(names) // 1000 * 1000
    del group
    gc.collect()  # its connections end with the last reference to a group
    # What is left is of modules. Each engine of the next functions collects some ten times.
    preloaded.freeze()


class Workers:
    """`world` ranks that run a function together."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.is_usable = True
        context = forked.context()
        self._pipes = []
        self._processes = []
        self._directory = tempfile.TemporaryDirectory()
        self._stacks = [f"{self._directory.name}/rank_{rank}" for rank in range(world)]
        for variables, stacks in zip(forked.rank_variables(world), self._stacks, strict=True):
            mine, theirs = context.Pipe()
            # Not daemons: the checkpoint writer starts processes of its own.
            process = context.Process(target=_worker, args=(variables, theirs, stacks))
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self._pipes.append(mine)
            self._processes.append(process)

    def outcomes(self, function: Callable[..., Any], **kwargs: Any) -> list[tuple[bool, Any]]:
        """Return for each rank (True, result) or (False, (exception's name, its message, stack)).
        A rank that ends is one that raised. A failure may leave ranks that cannot go together any
        more: is_usable is then false."""
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__name__, kwargs))
        call = f"{function.__name__}({kwargs})"
        out = [self._answer(rank, call) for rank in range(self.world)]
        self.is_usable = all(self._answer(rank, call) == READY for rank in range(self.world))
        return out

    def _answer(self, rank: int, call: str) -> Any:
        """Return the next object that the rank sends; of a rank that has ended, a failure."""
        pipe = self._pipes[rank]
        process = self._processes[rank]
        if not pipe.poll(2 * TIMEOUT_SECONDS):
            pytest.exit(f"rank {rank} of {self.world} has not answered: {call}\n{self._dump()}", 3)
        try:
            return pipe.recv()
        except EOFError:
            process.join(10)
            ended = f"the process ended with code {process.exitcode} in {call}"
            return False, ("ProcessEnded", ended, ended)

    def _dump(self) -> str:
        """Return the stacks of all ranks, which do not end."""
        for process in self._processes:
            os.kill(process.pid or 0, STACKS)
        time.sleep(2)
        return "\n".join(Path(path).read_text() for path in self._stacks)

    def run(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Return each rank's result. Fail the test if a rank raised or has ended: with a line for
        each such rank, then their stacks. The ranks are then not used again."""
        outcomes = self.outcomes(function, **kwargs)
        failures = [(rank, value) for rank, (ok, value) in enumerate(outcomes) if not ok]
        if failures:
            self.is_usable = False  # a rank may have left collectives that others have begun
            lines = [f"rank {rank}: {name}: {message}" for rank, (name, message, _) in failures]
            stacks = [f"rank {rank}: {stack}" for rank, (_, _, stack) in failures]
            pytest.fail("\n".join([*lines, *stacks]))
        return [value for _, value in outcomes]

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # a rank that has ended
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
