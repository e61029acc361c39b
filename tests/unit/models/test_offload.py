"""Offload and onload of tensors on this machine's device: values, views and aliases. Whole models:
tests/dist/test_offload_schedule.py."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_mc import platform
from rlhf_mc.config.errors import UserError
from rlhf_mc.models.offload import HostArena, Offload, TensorGroup, tensors_besides

DEVICE = platform.device()


def numbers(count: int) -> torch.Tensor:
    return torch.arange(float(count), device=DEVICE)


def test_values_and_views_survive_offload() -> None:
    flat = numbers(25)
    single = numbers(7)
    other = numbers(33).bfloat16()
    views = [flat[3:9].view(2, 3), flat[20:], single, other[1:]]
    wanted = [view.clone() for view in views]
    group = TensorGroup(lambda: views)
    for _ in range(2):
        group.offload()
        assert group.offloaded_bytes == 25 * 4 + 7 * 4 + 33 * 2
        assert all(view.untyped_storage().nbytes() == 0 for view in views)
        group.offload()  # a second offload changes nothing
        group.onload()
        assert group.offloaded_bytes == 0 and all(map(torch.equal, views, wanted))
        flat += 1.0  # visible through its views, also after the next offload
        wanted = [view.clone() for view in views]
    assert torch.equal(views[1], flat[20:])


def test_offload_copies_before_its_memory_is_reused() -> None:
    """Cover GPUs, where the copy to the host may still run when the caller allocates again."""
    values = torch.zeros(1 << 22, device=DEVICE)
    group = TensorGroup(lambda: [values])
    for step in range(1, 4):
        values.add_(1.0)  # still running when the copy starts
        group.offload()
        others = [torch.full((1 << 22,), torch.nan, device=DEVICE) for _ in range(2)]
        group.onload()
        assert torch.equal(values, torch.full_like(values, step))
        del others


def test_group_may_grow_between_offloads() -> None:
    tensors = [numbers(3)]
    group = TensorGroup(lambda: tensors)
    group.offload()
    group.onload()
    tensors.append(numbers(100))
    group.offload()
    assert group.offloaded_bytes == 103 * 4
    group.onload()
    assert torch.equal(tensors[0], numbers(3)) and torch.equal(tensors[1], numbers(100))


def test_values_not_kept_take_no_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        HostArena, "_allocate", lambda arena, size: pytest.fail("host memory was taken")
    )
    grads = torch.ones(10, device=DEVICE)
    group = TensorGroup(lambda: [grads], keep_values=False)
    group.offload()
    assert grads.untyped_storage().nbytes() == 0
    group.onload()
    assert grads.zero_().shape == (10,)


def test_storage_not_allocated_by_torch_is_rejected() -> None:
    group = TensorGroup(lambda: [torch.from_numpy(np.zeros(4))])
    with pytest.raises(AssertionError, match="memory that is not its own"):
        group.offload()


def test_optimizer_tensors_exclude_parameter_shards() -> None:
    flat = torch.zeros(8, device=DEVICE)
    moment = torch.zeros(4, device=DEVICE)
    assert [t.data_ptr() for t in tensors_besides([flat[4:], moment], [flat[:2]])] == [
        moment.data_ptr()
    ]


def test_offloaded_group_cannot_be_used() -> None:
    params = torch.zeros(3, device=DEVICE)
    moments = torch.zeros(3, device=DEVICE)
    model = Offload(
        "critic",
        {"params": TensorGroup(lambda: [params]), "optimizer": TensorGroup(lambda: [moments])},
    )
    model.require("params", "grads", "optimizer")
    assert not model.differs_from(("params", "optimizer"))
    model.offload_all_but(("params",))
    model.require("params", "grads")
    assert (
        model.offloaded_bytes == 12
        and model.differs_from(())
        and not model.differs_from(("params", "grads"))
    )
    with pytest.raises(RuntimeError, match="the optimizer of critic are offloaded"):
        model.require("params", "optimizer")
    model.onload(("optimizer",))
    model.require("optimizer")


def test_rank_with_an_empty_group_reports_the_same_placement() -> None:
    """Check that a rank without tensors agrees with the others on what to move: all ranks enter the
    same phases."""
    empty = Offload("actor", {"optimizer": TensorGroup(lambda: [])})
    assert empty.differs_from(())
    empty.offload_all_but(())
    assert (
        not empty.differs_from(())
        and empty.differs_from(("optimizer",))
        and empty.offloaded_bytes == 0
    )
    empty.onload(("optimizer",))
    assert not empty.differs_from(("optimizer",))


@pytest.fixture
def host_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the file by which the ranks of a node wait for one another."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"rlhf_mc_host_memory_{os.getuid()}"


def test_file_that_ranks_of_a_node_lock_is_private(host_lock: Path) -> None:
    HostArena("trainer.async_save").views([8])
    assert host_lock.stat().st_mode & 0o777 == 0o600
    host_lock.write_text("content")
    HostArena("trainer.async_save").views([8])
    assert host_lock.read_text() == "content"


@pytest.mark.parametrize("planted", ["link", "owner"])
def test_file_of_another_user_is_refused(
    host_lock: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    victim = host_lock.with_name("victim")
    victim.write_text("content")
    if planted == "link":
        host_lock.symlink_to(victim)
    else:
        victim.rename(host_lock)
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        host_lock = host_lock.rename(host_lock.with_name(f"rlhf_mc_host_memory_{uid + 1}"))
    with pytest.raises(
        UserError, match=rf"^trainer.async_save: {host_lock}: .*; remove it, or set TMPDIR"
    ):
        HostArena("trainer.async_save").views([8])
    assert host_lock.read_text() == "content"
