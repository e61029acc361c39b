"""Arenas of host memory: exact sizes, use by several offloads and saves, release, and too little
memory."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_mc import platform
from rlhf_mc.checkpoint.training_blocks import Block
from rlhf_mc.checkpoint.training_tensors import HostBuffers
from rlhf_mc.config.errors import UserError
from rlhf_mc.machine import facts
from rlhf_mc.machine.facts import available_memory
from rlhf_mc.models import offload
from rlhf_mc.models.offload import ALIGNMENT, HostArena, TensorGroup

PAGE = 4096


def mapped(address: int) -> bool:
    """Return whether the address is in this process's memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = line.split()[0].split("-")
        if int(start, 16) <= address < int(end, 16):
            return True
    return False


def test_views_are_exact_aligned_and_apart() -> None:
    arena = HostArena("test")
    sizes = [1, 3 << 20, 0, 129, 128]
    views = arena.views(sizes)
    assert [len(view) for view in views] == sizes
    assert all(view.data_ptr() % ALIGNMENT == 0 for view in views)
    # A power of two would be 4 MiB.
    assert arena.num_bytes == ALIGNMENT * (1 + (3 << 20) // ALIGNMENT + 0 + 2 + 1)
    for number, view in enumerate(views):
        view.fill_(number)
    assert all((view == number).all() for number, view in enumerate(views))


@pytest.mark.slow
def test_memory_is_kept_until_a_larger_one_is_needed() -> None:
    arena = HostArena("test")
    (first,) = arena.views([8 << 20])
    address = first.data_ptr()
    first.fill_(7)
    for sizes in ([8 << 20], [5, 6], [8 << 20]):
        assert arena.views(sizes)[0].data_ptr() == address
    assert (first == 7).all()
    (second,) = arena.views([(8 << 20) + 1])
    assert (first == 7).all() and mapped(address), "a view that is still used keeps its memory"
    del first
    gc.collect()
    assert not mapped(address) and arena.num_bytes == (8 << 20) + ALIGNMENT
    address = second.data_ptr()
    del second
    arena.release()
    gc.collect()
    assert arena.num_bytes == 0 and not mapped(address)


def test_an_offload_takes_its_bytes_and_no_more() -> None:
    tensors = [torch.arange(70_000.0), torch.arange(33).bfloat16(), torch.arange(300_001)]
    wanted = [tensor.clone() for tensor in tensors]
    group = TensorGroup(lambda: tensors)
    for _ in range(2):
        group.offload()
        num_bytes = 70_000 * 4 + 33 * 2 + 300_001 * 8
        assert num_bytes <= group._host.num_bytes < num_bytes + 3 * ALIGNMENT
        address = group._host._bytes.data_ptr()
        group.onload()
        assert all(map(torch.equal, tensors, wanted))
    tensors.append(torch.arange(900_000.0))
    wanted.append(tensors[-1].clone())
    group.offload()
    assert group._host._bytes.data_ptr() != address
    group.onload()
    assert all(map(torch.equal, tensors, wanted))


def test_saves_use_the_same_memory() -> None:
    def blocks(*values: torch.Tensor) -> list[Block]:
        return [
            Block(str(i), tuple(v.shape), tuple((0, n) for n in v.shape), v, True)
            for i, v in enumerate(values)
        ]

    buffers = HostBuffers()
    first = [torch.randn(3, 5), torch.randn(1001).bfloat16(), torch.tensor(2.5)]
    copies = buffers.copies(blocks(*first))
    assert all(map(torch.equal, copies, first))
    assert [copy.dtype for copy in copies] == [value.dtype for value in first]
    addresses = [copy.data_ptr() for copy in copies]
    second = [value + 1 for value in first]
    copies = buffers.copies(blocks(*second))
    assert all(map(torch.equal, copies, second))
    assert [copy.data_ptr() for copy in copies] == addresses
    assert buffers._arena.num_bytes == ALIGNMENT * (1 + 16 + 1)


# ---------------------------------------------------------------- too little memory


def test_too_little_memory_is_one_line() -> None:
    arena = HostArena("actor.megatron.param_offload")
    with pytest.raises(UserError) as caught:
        arena.views([1 << 50])
    message = str(caught.value)
    assert message.startswith(
        f"actor.megatron.param_offload: {1 << 50} bytes of host memory are needed by this rank, "
    )
    assert "available on this node" in message and "\n" not in message
    assert arena.num_bytes == 0 and len(arena.views([10])[0]) == 10


def test_ranks_of_a_node_count_what_the_others_have_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two threads be two ranks of a node with memory for one of them, and the lock take a
    while."""
    left = [150]
    errors: list[UserError] = []

    def lock_pages(memory: torch.Tensor) -> None:
        time.sleep(0.2)
        left[0] -= len(memory)

    def rank() -> None:
        try:
            HostArena("x").views([100])
        except UserError as error:
            errors.append(error)

    monkeypatch.setattr(offload, "available_memory", lambda: left[0])
    monkeypatch.setattr(platform, "lock_pages", lock_pages)
    ranks = [threading.Thread(target=rank) for _ in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    (error,) = errors
    assert "22 are available on this node (more than is available)" in str(error)


def test_available_memory_within_a_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = available_memory()
    assert 0 < before < 1 << 50
    (tmp_path / "groups").write_text("0::/\n")
    monkeypatch.setattr(facts, "PROCESS_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(facts, "CGROUPS", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.stat").write_text("anon 200000\nfile 700000\nshmem 100000\n")
    assert available_memory() == 700_000, "page cache is not used memory"
    (tmp_path / "memory.max").write_text("max\n")
    assert list(facts.memory_limits()) == []
    (tmp_path / "memory.max").write_text("305000\n")
    with pytest.raises(UserError, match=r"x: 6016 bytes .* 5000 are available"):
        HostArena("x").views([6000])
    assert len(HostArena("x").views([4000])[0]) == 4000


# ---------------------------------------------------------------- page-locking


class Driver:
    """A CUDA runtime that records what is registered, since a CPU has none."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address % PAGE == 0 and mapped(address) and mapped(address + size - 1)
        self.calls.append(("register", size))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        assert mapped(address), "unregistered after its release"
        self.calls.append(("unregister", address))
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return "out of memory"


def with_driver(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    gc.collect()  # arenas of the tests before
    cuda = SimpleNamespace(
        cudart=lambda: driver, synchronize=lambda: driver.calls.append(("synchronize", 0))
    )
    monkeypatch.setattr(platform, "use_cuda", lambda: True)
    monkeypatch.setattr(platform.torch, "cuda", cuda)


@pytest.mark.slow
def test_registered_once_and_unregistered_before_its_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    with_driver(monkeypatch, driver)
    arena = HostArena("test")
    arena.views([PAGE, 5])
    arena.views([3])
    assert driver.calls == [("register", PAGE + ALIGNMENT)]
    address = arena.views([1])[0].data_ptr()
    arena.views([3 * PAGE])
    assert driver.calls[1:] == [("synchronize", 0), ("unregister", address), ("register", 3 * PAGE)]
    address = arena.views([1])[0].data_ptr()
    del arena
    gc.collect()
    assert driver.calls[4:] == [("synchronize", 0), ("unregister", address)]
    assert not mapped(address)


def test_memory_that_the_driver_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(code=2)
    with_driver(monkeypatch, driver)
    with pytest.raises(
        UserError, match=r"x: 8192 bytes of host memory .* \(cudaHostRegister: out of memory\)"
    ):
        HostArena("x").views([2 * PAGE])
    assert driver.calls == [("register", 2 * PAGE)], "nothing to unregister"


@pytest.mark.gpu
@pytest.mark.skipif(not platform.use_cuda(), reason="needs a CUDA device")
def test_memory_is_page_locked() -> None:
    arena = HostArena("test")
    views: list[Any] = arena.views([100, 1 << 20])
    assert all(view.is_pinned() for view in views)
    values = torch.arange(1 << 18, device="cuda", dtype=torch.float32)
    views[1].copy_(values.view(torch.uint8), non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(views[1].view(torch.float32), values.cpu())
    arena.release()
    assert not views[1].is_pinned()
