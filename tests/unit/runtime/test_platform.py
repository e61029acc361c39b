"""Copies to the device, with host memory in the place of a GPU's and of page-locked memory; freed
memory on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch

from rlhf_mc import platform
from rlhf_mc.topology import rendezvous


@pytest.fixture
def gpu_path() -> None:
    with (
        mock.patch.object(platform, "use_cuda", lambda: True),
        mock.patch.object(platform, "device", lambda: torch.device("cpu")),
        mock.patch.object(
            platform, "host_bytes", lambda size: torch.empty(size, dtype=torch.uint8)
        ),
    ):
        yield


TENSORS = [
    torch.arange(7)[None],
    torch.tensor([], dtype=torch.int64),
    torch.tensor([0, 3, 7], dtype=torch.int32),
    torch.tensor(2.5),
    torch.arange(6, dtype=torch.float32).view(2, 3),
    torch.tensor([[True], [False]]),
]


def test_tensors_of_all_types_and_shapes_arrive_in_one_aligned_buffer(gpu_path: None) -> None:
    moved = platform.to_device(TENSORS)
    for before, after in zip(TENSORS, moved, strict=True):
        assert after.dtype == before.dtype and torch.equal(after, before)
        assert after.storage_offset() * after.itemsize % platform._ALIGNMENT == 0
    assert len({tensor.untyped_storage().data_ptr() for tensor in moved}) == 1
    assert platform.to_device([]) == []


def test_a_cpu_copies_nothing() -> None:
    assert all(a is b for a, b in zip(TENSORS, platform.to_device(TENSORS), strict=True))


def test_a_process_leaves_the_default_stream_of_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    def set_stream(stream: Any) -> None:
        calls.append(stream)
        raise InterruptedError

    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "a new stream")
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    with pytest.raises(InterruptedError):
        rendezvous.init_process_group(1.0)
    assert calls == [torch.device("cuda", 1), "a new stream"]


def test_memory_that_vllm_has_released_is_free_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch count segments of vLLM's pools as reserved, a sleeping one as allocated, a trimmed
    one as not."""
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 30, "allocated_size": 20},
        {"segment_pool_id": (0, 1), "total_size": 40, "allocated_size": 40},
        {"segment_pool_id": (0, 2), "total_size": 7, "allocated_size": 0},
    ]
    assert platform.use_cuda() or platform.free_device_memory() is None
    monkeypatch.setattr(platform, "use_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (65, 100))  # 5 besides: the context
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda include_traces: segments)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 77)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 68)
    assert platform.free_device_memory() == (100, 100 - 5 - 28)


FAULTS = """
import resource, sys, torch
from rlhf_mc import platform
if sys.argv[1] == "kept":
    platform.keep_freed_memory()
def fill():
    torch.empty(40 << 20, dtype=torch.uint8).fill_(1)  # malloc never keeps more than 32 MiB by default
for _ in range(20):
    fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""  # noqa: E501


@pytest.mark.slow
def test_freed_memory_is_kept_unless_the_user_chooses() -> None:
    def faults(mode: str, **chosen: str) -> int:
        environment = {**os.environ, "RLHF_MC_DEVICE": "cpu", **chosen}
        command = [sys.executable, "-W", "ignore", "-c", FAULTS, mode]
        return int(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)

    # A kernel that uses huge pages everywhere has 200 faults where one of 4 KiB pages has 102,400.
    assert faults("kept") < 100
    assert faults("returned") > 150
    assert faults("kept", MALLOC_TRIM_THRESHOLD_="131072") > 150
