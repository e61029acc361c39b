"""trainer.deterministic: the process-wide settings on a CPU, and the environment on a GPU. Whole
runs: tests/system/test_deterministic.py."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from rlhf_mc import platform
from rlhf_mc.config.errors import UserError
from rlhf_mc.runtime.determinism import VARIABLES, use_deterministic_algorithms


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unset the variables, and restore everything afterwards."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


def test_on_a_cpu_torch_alone_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "use_cuda", lambda: False)
    use_deterministic_algorithms()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not VARIABLES.keys() & os.environ.keys()
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))


def test_environment_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "use_cuda", lambda: True)
    monkeypatch.setenv("NCCL_ALGO", "tree")
    use_deterministic_algorithms()
    assert {name: os.environ[name] for name in VARIABLES} == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "NCCL_ALGO": "tree",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "0",
    }


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("NCCL_ALGO", "NVLS", "Ring or Tree"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", "0"),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", ":4096:8 or :16:8"),
    ],
)
def test_environment_that_demands_the_opposite(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, right: str
) -> None:
    monkeypatch.setattr(platform, "use_cuda", lambda: True)
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        use_deterministic_algorithms()
    assert str(caught.value) == (
        f"trainer.deterministic: the environment variable {name} is {value!r}; unset it, or set it "
        f"to {right}"
    )
    assert not torch.are_deterministic_algorithms_enabled()
