"""Operations that a CPU computes in place of Megatron-Core's give the same values and gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.transformer import attention
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_mc import platform
from rlhf_mc.models import megatron_patches
from rlhf_mc.models.cpu_operations import _GatedSilu, rms_norm, rotary_table, rotate
from rlhf_mc.models.layers import RMSNorm
from rlhf_mc.patching import Patch

(NORM,) = megatron_patches.LOCAL_NORM
ROTARY = next(patch for patch in megatron_patches.ON_CPU if patch.owner is attention)
CONFIG = SimpleNamespace(
    apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False
)


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def angles() -> torch.Tensor:
    """Return the angles [7, 8] of seven tokens."""
    return torch.arange(7.0)[:, None] * torch.logspace(0, -3, 8)


@pytest.fixture
def heads() -> Iterator[torch.Tensor]:
    """Return q [7, 1, 3, 16] as Megatron-Core splits it off: with the strides of q, k and v
    together."""
    whole = torch.randn(7, 1, 3, 24, generator=torch.Generator().manual_seed(0))
    yield whole[..., :16].requires_grad_()


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("mscale", [1.0, 1.25])
def test_rotation_is_megatrons(
    angles: torch.Tensor, heads: torch.Tensor, mscale: float, latent: bool
) -> None:
    config = SimpleNamespace(**{**vars(CONFIG), "multi_latent_attention": latent})
    wanted = ROTARY.original(
        heads, torch.cat((angles, angles), -1)[:, None, None], config, None, mscale, cp_group=0
    )
    found = rotate(heads, rotary_table(angles), config, None, mscale, cp_group=0)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    upstream = torch.randn(wanted.shape)
    grads = [torch.autograd.grad(out, heads, upstream)[0] for out in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)


def test_norm_of_a_gradient_is_megatrons_in_fewer_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, generator=draws) for n in (1, 7, 300, 4096)]
    calls = []
    norm = torch.norm
    monkeypatch.setattr(torch, "norm", lambda x: calls.append(x) or norm(x))
    with megatron_patches.CudaMeansCpu():
        wanted, _ = NORM.original(65536, None, [tensors], False)
        num_calls = len(calls)
        found, _ = NORM.replacement(65536, None, [tensors], False)
    assert found.shape == wanted.shape == (1,) and found.dtype == wanted.dtype
    assert torch.equal(found, wanted)
    assert num_calls == len(calls) == 5, (
        "if Megatron-Core no longer calls it for each tensor, drop the patch"
    )


@pytest.mark.parametrize(
    ("kernel", "patched"), [(NORM.original, True), (lambda *arguments: None, False)]
)
def test_a_gpu_takes_one_norm_of_all_where_there_is_no_kernel(
    kernel: Any, patched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied: list[Any] = []
    monkeypatch.setattr(megatron_patches, "apply", applied.extend)
    monkeypatch.setattr(platform, "use_cuda", lambda: True)
    monkeypatch.setattr(clip_grads, "l2_norm_impl", kernel)
    monkeypatch.setattr(
        megatron_patches,
        "LOCAL_NORM",
        (Patch(clip_grads, NORM.name, NORM.replacement, NORM.reason),),
    )
    megatron_patches._patch.__wrapped__()
    assert [patch.name for patch in applied].count("l2_norm_impl") == patched


def test_megatron_computes_cosines_for_each_tensor(
    angles: torch.Tensor, heads: torch.Tensor
) -> None:
    """If it no longer does, the patch can be dropped."""
    twice = torch.cat((angles, angles), -1)[:, None, None]
    with Operations() as original:
        ROTARY.original(heads, twice, CONFIG, None, cp_group=0)
    table = rotary_table(angles)
    with Operations() as own:
        rotate(heads, table, CONFIG)
    assert original.counts["cos"] == original.counts["sin"] == 1 and original.counts["cat"] == 2
    assert not own.counts.keys() & {"cos", "sin", "cat"}


@pytest.mark.parametrize("shape", [(5, 1, 12), (1, 1, 2)])
def test_gate_is_silu_times_linear(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    gate, linear = x.chunk(2, dim=-1)
    wanted = silu(gate) * linear
    found = _GatedSilu.apply(x)
    assert torch.equal(found, wanted)
    upstream = torch.randn(wanted.shape)
    grads = [torch.autograd.grad(out, x, upstream)[0] for out in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 1, 12), (5, 1, 3, 4), (0, 1, 12)])
def test_norm_is_torchs(shape: tuple[int, ...]) -> None:
    weight = (1.0 + 0.1 * torch.randn(shape[-1])).requires_grad_()
    x = torch.randn(shape).mul_(3.0).requires_grad_()
    wanted = torch.nn.functional.rms_norm(x, weight.shape, weight, 0.01)
    found = rms_norm(x, weight, 0.01)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    upstream = torch.randn(wanted.shape)
    for own, torchs in zip(
        *(torch.autograd.grad(out, (x, weight), upstream) for out in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(own, torchs, rtol=1e-5, atol=1e-5)


def test_norm_of_zeros_is_zero_and_its_gradient_finite() -> None:
    x = torch.zeros(2, 1, 8, requires_grad=True)
    found = rms_norm(x, torch.ones(8), 1e-6)
    assert torch.equal(found, torch.zeros_like(x))
    (grad,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(grad, torch.full_like(x, 1e3))


def test_torch_computes_the_norms_gradient_operation_by_operation() -> None:
    """If it no longer does, rms_norm can be dropped."""
    x = torch.randn(5, 1, 12, requires_grad=True)
    weight = torch.ones(12, requires_grad=True)
    passes = []
    for out in (
        torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6),
        rms_norm(x, weight, 1e-6),
    ):
        with Operations() as counted:
            torch.autograd.grad(out, (x, weight), torch.ones_like(out))
        passes.append(
            sum(
                count
                for name, count in counted.counts.items()
                if not name.endswith(("view", "reshape"))
            )
        )
    assert passes[0] > passes[1] + 4, passes


def test_norms_in_bfloat16_are_torchs() -> None:
    norm = RMSNorm(SimpleNamespace(sequence_parallel=False), 8, eps=1e-5).bfloat16()
    x = torch.randn(3, 1, 8).bfloat16()
    assert torch.equal(norm(x), torch.nn.functional.rms_norm(x, (8,), norm.weight, 1e-5))
