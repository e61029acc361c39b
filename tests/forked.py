"""Processes that start with all libraries imported: forked from one that has done so (importing torch, Megatron-Core
and vLLM takes ten seconds and more), so that tests may start many."""

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
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

TIMEOUT_SECONDS = 280


def context() -> ForkServerContext:
    """For Process, Pipe and Queue. The server starts with the first process, one for the whole test run."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    out = mp.get_context("forkserver")
    out.set_forkserver_preload(["preloaded"])
    return out


def start(
    arguments: list[str],
    stdout: Path,
    stderr: Path,
    env: dict[str, str] | None = None,
    largest_file: int | None = None,
) -> BaseProcess:
    """python ARGUMENTS in a session of its own, as if started from a shell: a program's path or "-m" and a module
    first. env: changes to the environment. largest_file: bytes beyond which the system refuses to write, as a full disk
    does."""
    env = {**os.environ, **(env or {})}  # the server's is that of its start
    process = context().Process(target=_become, args=(arguments, stdout, stderr, env, largest_file))
    process.start()
    return process


def rank_variables(world: int) -> list[dict[str, str]]:
    """For each rank the environment that torchrun gives it, on a free port of this machine."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(s.getsockname()[1])}
    return [{**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def run(arguments: list[str], largest_file: int | None = None) -> subprocess.CompletedProcess[str]:
    """The program's exit code and what it wrote."""
    return _end(arguments, [{}], largest_file)


def run_ranks(world: int, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """The program on several ranks: an exit code other than 0 if there was one, and what they wrote to the same two
    files."""
    return _end(arguments, rank_variables(world))


def _end(
    arguments: list[str], environments: list[dict[str, str]], largest_file: int | None = None
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as directory:
        stdout, stderr = Path(directory) / "stdout", Path(directory) / "stderr"
        processes = [start(arguments, stdout, stderr, env, largest_file) for env in environments]
        deadline = time.monotonic() + TIMEOUT_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [process for process in processes if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        assert not late, f"{arguments} has not ended after {TIMEOUT_SECONDS} s: {stderr.read_text()}"
        code = max((process.exitcode or 0 for process in processes), key=abs)
        return subprocess.CompletedProcess(arguments, code, stdout.read_text(), stderr.read_text())


def _become(arguments: list[str], stdout: Path, stderr: Path, env: dict[str, str], largest_file: int | None) -> None:
    assert "preloaded" in sys.modules  # the server passes over what it cannot import
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
