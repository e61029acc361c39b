"""The processes of fake CUDA devices, in which the tests of this folder run their cases."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing as mp
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import fake_cuda
import pytest

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def once(path: Path) -> Iterator[bool]:
    """Yield False where another lane has made the path, or True: the body makes it for all."""
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not path.exists()


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the compiled guard.cpp."""
    if fake_cuda.compiler() is None:
        pytest.skip(
            "no C++ compiler (g++): torch's device guard for fake CUDA devices cannot be built"
        )
    library = tmp_path_factory.getbasetemp() / "fake_cuda_guard.so"
    with once(library) as is_first:
        if is_first:
            fake_cuda.build_guard(library)
    return library


@pytest.fixture(scope="session")
def transformer_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the Python files of the version of Transformer Engine that GPUs get:
    a wheel of 0.7 MB without its libraries. It is nowhere else, because a CPU run would import it.
    Skip where no index is reached."""
    directory = tmp_path_factory.getbasetemp() / "transformer_engine"
    lock = (ROOT / "requirements/gpu.txt").read_text().splitlines()
    (pinned,) = [line for line in lock if line.startswith("transformer-engine==")]
    command = [
        Path(sys.executable).parent / "uv",
        "pip",
        "install",
        "--quiet",
        "--no-config",
        "--no-deps",
    ]
    command += ["--python", sys.executable, "--target", directory, pinned]
    with once(directory) as is_first:
        if is_first:
            done = subprocess.run(command, capture_output=True, text=True, timeout=500)
            if done.returncode:
                pytest.skip(f"{pinned} cannot be installed: {done.stderr.strip()[-200:]}")
    return directory


@pytest.fixture(scope="session")
def on_fake_gpu(guard: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Return call(module, function, *args, transformer_engine=False): run a function in a process
    whose torch has fake CUDA devices."""
    context = mp.get_context("spawn")  # torch must not have been imported
    with contextlib.ExitStack() as stack:
        executors: dict[bool, ProcessPoolExecutor] = {}

        def call(*task: Any, transformer_engine: bool = False) -> Any:
            if transformer_engine not in executors:
                files = (
                    request.getfixturevalue("transformer_engine") if transformer_engine else None
                )
                executor = ProcessPoolExecutor(
                    1, context, initializer=fake_cuda.start, initargs=(guard, files)
                )
                executors[transformer_engine] = stack.enter_context(executor)
            return executors[transformer_engine].submit(fake_cuda.call, *task).result()

        yield call
