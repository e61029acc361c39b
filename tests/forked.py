"""Processes that start with all libraries imported, so that tests can start many: a server imports
torch, Megatron-Core and vLLM once (10 seconds and more) and forks for each start."""

from __future__ import annotations

import multiprocessing as mp
import os
import resource
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 900
_reserved: list[socket.socket] = []


def context() -> ForkServerContext:
    """Return the context for Process, Pipe and Queue. The first call starts the server."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    out = mp.get_context("forkserver")
    out.set_forkserver_preload(["preloaded"])
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    # the server does not take sys.path over
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):
        forkserver._forkserver.ensure_running()
    return out


def _share_server() -> None:
    """Use the server of the process from which this one was forked. Only its parent can ask the
    kernel for its state, as ensure_running does."""
    if forkserver._forkserver._forkserver_pid is not None:
        forkserver._forkserver.ensure_running = lambda: None


os.register_at_fork(after_in_child=_share_server)


def start(
    arguments: list[str],
    stdout: Path,
    stderr: Path,
    env: dict[str, str] | None = None,
    largest_file: int | None = None,
) -> BaseProcess:
    """Start `python ARGUMENTS` in a session of its own, as from a shell. The arguments begin with a
    program's path, or with "-m" and a module. env: changes to the environment. largest_file: bytes
    beyond which a write fails, as on a full disk."""
    env = {**os.environ, **(env or {})}  # the server has the environment of its own start
    process = context().Process(target=_become, args=(arguments, stdout, stderr, env, largest_file))
    process.start()
    return process


def free_port() -> int:
    """Return a port that only a program which names it gets: this process keeps a socket bound to
    it, beside which a server can listen. The kernel gives it to no other process."""
    _reserved.append(socket.socket())
    _reserved[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _reserved[-1].bind(("localhost", 0))
    return int(_reserved[-1].getsockname()[1])


def rank_variables(world: int) -> list[dict[str, str]]:
    """Return for each rank the environment that torchrun gives it, with a free port of this
    machine."""
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def run(arguments: list[str], largest_file: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run the program. Return its exit code and output."""
    return _run(arguments, [{}], largest_file)


def run_ranks(world: int, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the program on several ranks. Return the exit code of largest magnitude and the joint
    output."""
    return _run(arguments, rank_variables(world))


def _run(
    arguments: list[str], environments: list[dict[str, str]], largest_file: int | None = None
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as directory:
        stdout = Path(directory) / "stdout"
        stderr = Path(directory) / "stderr"
        processes = [start(arguments, stdout, stderr, env, largest_file) for env in environments]
        deadline = time.monotonic() + TIMEOUT_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        running = [process for process in processes if process.is_alive()]
        for process in running:
            process.kill()
            process.join()
        assert not running, (
            f"{arguments} has not ended after {TIMEOUT_SECONDS} s: {stderr.read_text()}"
        )
        code = max((process.exitcode or 0 for process in processes), key=abs)
        return subprocess.CompletedProcess(arguments, code, stdout.read_text(), stderr.read_text())


def _become(
    arguments: list[str], stdout: Path, stderr: Path, env: dict[str, str], largest_file: int | None
) -> None:
    assert "preloaded" in sys.modules  # the server ignores a module that it cannot import
    os.setsid()
    os.environ.update(env)
    for descriptor, path in ((1, stdout), (2, stderr)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
