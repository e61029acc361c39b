"""Checksums of a plan's blocks in one process. Between ranks: tests/dist/test_layouts.py."""

from __future__ import annotations

import functools

import pytest
import torch

from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard import verify as verify_module
from rlhf_mc.reshard.execute import aliased_views, execute
from rlhf_mc.reshard.layout import Layout, Shard, whole_layout
from rlhf_mc.reshard.plan import make_plan
from rlhf_mc.reshard.verify import CHUNK_BYTES, checksum, checksums, verify

EXPERTS = Layout(
    {"all": (2, 3, 4)}, tuple(Shard(f"e{i}", ((0, 3), (0, 4)), "all", (i, 0, 0)) for i in (0, 1))
)
SEPARATE = whole_layout({"e0": (3, 4), "e1": (3, 4)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [8, 40, 1 << 20])
def test_checksum_detects_every_change(dtype: torch.dtype, chunk: int) -> None:
    checksum = functools.partial(verify_module.checksum, chunk_bytes=chunk)
    blocks = torch.randn(3, 4, 5).to(dtype)
    wanted = checksum([blocks])
    assert torch.equal(checksum([blocks.transpose(0, 1).contiguous().transpose(0, 1)]), wanted), (
        "strides matter"
    )
    assert torch.equal(checksum([block[None] for block in blocks]), wanted), (
        "the experts of a stack, one by one"
    )
    for index in [(0, 0, 0), (2, 3, 4), (1, 2, 3)]:
        other = blocks.clone()
        other[index] = -other[index]
        assert not torch.equal(checksum([other]), wanted)
    swapped = blocks.clone()
    swapped[0] = blocks[2]
    swapped[2] = blocks[0]
    assert not torch.equal(checksum([swapped]), wanted), "blocks in another order"
    assert not torch.equal(checksum([torch.zeros_like(blocks)]), wanted)


@pytest.mark.parametrize(
    ("dtype", "values", "distance"),
    [
        (torch.bfloat16, (1.01, 3.05), 1 << 18),
        (torch.bfloat16, (1.0, -1.0), 1 << 11),
        (torch.float32, (1.0, 2.0), 1 << 10),
        (torch.int64, (1 << 40, ~(1 << 40)), 1),
    ],
    ids=str,
)
def test_checksum_detects_exchanges_far_apart(
    dtype: torch.dtype, values: tuple[float, float], distance: int
) -> None:
    """Exchange the values of two elements in each place of a word of 8 bytes, alone and among
    others."""
    places = 8 // dtype.itemsize
    others = torch.randn(distance + 8).to(dtype)
    for rest in (torch.zeros_like(others), torch.ones_like(others), others):
        for first in range(places):
            pair = [first, first + distance]
            blocks = rest.clone()
            blocks[pair] = torch.tensor(values, dtype=dtype)
            other = rest.clone()
            other[pair] = torch.tensor(values[::-1], dtype=dtype)
            assert not torch.equal(checksum([blocks[None]]), checksum([other[None]])), first


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (2, 7, 3), (3, 4, 5), (2, 129, 64), (1, 1000)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.slow
def test_checksum_does_not_depend_on_the_chunks(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Chunks differ between CPUs and GPUs. Rows that are no multiple of 8 bytes must be summed
    alike."""
    blocks = torch.randint(-100, 100, shape).to(dtype)
    inside = torch.zeros(shape[0], shape[1] + 1, *(n + 3 for n in shape[2:]), dtype=dtype)
    view = inside[:, 1:, 2:-1] if len(shape) == 3 else inside[:, 1:]  # strided and unaligned
    view.copy_(blocks)
    content = blocks.reshape(-1).view(torch.uint8)
    words = torch.cat([content, content.new_zeros(-len(content) % 8)]).view(torch.int64).tolist()
    wanted = [sum(words), sum(n * (word + (word >> 33)) for n, word in enumerate(words, 1))]
    for found in (blocks, view):
        for chunk in (8, 16, 40, 1 << 10, *CHUNK_BYTES.values()):
            sums = [checksum([found], chunk).tolist(), checksum([*found], chunk).tolist()]
            # Among transfers of the same and of other sizes, with which they are summed.
            transfers = [
                [blocks + 1],
                [found],
                [*found],
                [blocks.repeat(2, *[1] * (len(shape) - 1))],
            ]
            sums += checksums(transfers, chunk_bytes=chunk)[1:3].tolist()
            for one in sums:
                assert [(a - b) % 2**64 for a, b in zip(one, wanted, strict=True)] == [0, 0], chunk


def test_checksums_are_copied_to_the_host_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the copies: one for each block would wait for the GPU each time."""
    shapes = {f"w{n}": (3, 4) for n in range(5)}
    plan = make_plan([whole_layout(shapes)], [whole_layout(shapes)], 4, 1000).for_rank(0)
    tensors = {name: torch.randn(3, 4) for name in shapes}
    copies: list[torch.Tensor] = []
    original = torch.Tensor.cpu
    monkeypatch.setattr(
        torch.Tensor, "cpu", lambda tensor: copies.append(tensor) or original(tensor)
    )
    monkeypatch.setattr(torch, "equal", None)  # waits too
    verify(plan, tensors, {name: tensor.clone() for name, tensor in tensors.items()}, None)
    assert len(plan.copies) == 5 and [tuple(t.shape) for t in copies] == [(5, 2), (5, 2)]


def test_checksum_uses_operations_that_exist_for_int64_on_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch.dot and torch.matmul have no CUDA kernels for integers, so a GPU's first weight update
    would fail."""
    blocks = torch.arange(1, 9, dtype=torch.int64).reshape(1, 2, 4)
    for name in ("dot", "vdot", "inner", "matmul", "mm", "mv"):
        monkeypatch.setattr(torch, name, None)
    assert checksum([blocks]).tolist() == [36, sum(n * n for n in range(1, 9))]


def test_stacked_experts_are_filled_and_verified() -> None:
    """Use offsets that begin with a fixed index, in the target and in the source."""
    tensors = {"e0": torch.randn(3, 4), "e1": torch.randn(3, 4)}
    plan = make_plan([SEPARATE], [EXPERTS], 4, 1000, share=True).for_rank(0)
    stacked = {"all": torch.zeros(2, 3, 4)}
    execute(plan, tensors, stacked, transport=None)
    assert torch.equal(stacked["all"], torch.stack(list(tensors.values())))
    verify(plan, tensors, stacked, None)
    stacked["all"][1, 2, 0] = 7.0
    with pytest.raises(
        UserError,
        match=r"all\[1, 0:3, 0:4\] on rank 0 differs from e1\[0:3, 0:4\] on rank 0 \(1 of",
    ):
        verify(plan, tensors, stacked, None)
    back = make_plan([EXPERTS], [SEPARATE], 4, 1000).for_rank(0)
    separate = {"e0": torch.zeros(3, 4), "e1": torch.zeros(3, 4)}
    execute(back, stacked, separate, transport=None)
    assert torch.equal(torch.stack(list(separate.values())), stacked["all"])


def test_lost_aliasing_is_detected() -> None:
    plan = make_plan([SEPARATE], [SEPARATE], 4, 1000, share=True).for_rank(0)
    tensors = {"e0": torch.randn(3, 4), "e1": torch.randn(3, 4)}
    views = aliased_views(plan, tensors)
    execute(plan, tensors, views, transport=None)
    verify(plan, tensors, views, None)
    with pytest.raises(AssertionError, match="e1 does not alias its source"):
        execute(plan, tensors, views | {"e1": tensors["e1"].clone()}, transport=None)
    with pytest.raises(UserError, match="e1 on rank 0 does not alias its source"):
        verify(plan, tensors, views | {"e1": tensors["e1"].clone()}, None)
