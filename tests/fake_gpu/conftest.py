"""The process of fake CUDA devices, in which the tests of this folder run their cases."""

from __future__ import annotations

import fcntl
import multiprocessing as mp
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import fake_cuda
import pytest


@pytest.fixture(scope="session")
def on_fake_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Return call(module, function, *args): run a function in a process whose torch has fake CUDA devices."""
    if fake_cuda.compiler() is None:
        pytest.skip("no C++ compiler (g++): torch's device guard for fake CUDA devices cannot be built")
    library = tmp_path_factory.getbasetemp() / "fake_cuda_guard.so"
    with open(library.with_suffix(".lock"), "w") as lock:  # the first lane that needs it builds it for all
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            fake_cuda.build_guard(library)
    context = mp.get_context("spawn")  # torch must not have been imported
    with ProcessPoolExecutor(1, context, initializer=fake_cuda.start, initargs=(library,)) as executor:
        yield lambda *task: executor.submit(fake_cuda.call, *task).result()
