"""Several ranks on one GPU: their devices, the version of NCCL, variables and refusals, the
planner's share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_parts import catalog

from rlhf_mc import platform
from rlhf_mc.config.errors import NodeError, UserError
from rlhf_mc.config.schema import ResourcePoolsConfig, RolloutConfig
from rlhf_mc.planner.start import Capacity
from rlhf_mc.reshard.layout import Layout
from rlhf_mc.rollout import vllm_limits
from rlhf_mc.setup import build
from rlhf_mc.topology import shared_gpu
from rlhf_mc.topology.shared_gpu import prepare_shared_gpus, shared_gpu_line

NAMES = [*shared_gpu.VARIABLES, "NCCL_MAX_CTAS"]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let two ranks share each GPU, with a new NCCL and no other variable."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(platform, "nccl_version", lambda: (2, 32, 3))
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("RLHF_MC_RANKS_PER_GPU", "2")
    return monkeypatch


def test_neighbouring_ranks_share_a_gpu(shared: pytest.MonkeyPatch) -> None:
    found = []
    for local_rank in range(6):
        shared.setenv("LOCAL_RANK", str(local_rank))
        found.append(platform.device().index)
    assert found == [0, 0, 1, 1, 2, 2]


def test_libraries_get_their_variables_and_the_console_a_line(shared: pytest.MonkeyPatch) -> None:
    prepare_shared_gpus()
    assert [os.environ[name] for name in NAMES] == ["1", "0", "0", "0", "0", "2"]
    line = shared_gpu_line()
    assert line is not None
    assert line.startswith(
        "RLHF_MC_RANKS_PER_GPU=2: ranks share GPUs, over NCCL 2.32.3: a test of communication, and"
    )


@pytest.mark.parametrize("cuda", [True, False])
def test_without_shared_gpus_nothing_is_set_or_printed(
    cuda: bool, shared: pytest.MonkeyPatch
) -> None:
    """Show that the variable has no effect on a CPU, where a command can be tried."""
    shared.setattr(torch.cuda, "is_available", lambda: cuda)
    shared.setattr(platform, "nccl_version", lambda: (2, 29, 7))
    if cuda:
        shared.delenv("RLHF_MC_RANKS_PER_GPU")
    prepare_shared_gpus()
    assert not any(name in os.environ for name in NAMES) and shared_gpu_line() is None


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_a_wrong_number_is_named(text: str, shared: pytest.MonkeyPatch) -> None:
    shared.setenv("RLHF_MC_RANKS_PER_GPU", text)
    with pytest.raises(
        UserError, match=f"RLHF_MC_RANKS_PER_GPU is '{text}'; it must be a number from 1 on"
    ):
        prepare_shared_gpus()


def test_an_old_nccl_is_named_with_what_to_set(shared: pytest.MonkeyPatch) -> None:
    shared.setattr(platform, "nccl_version", lambda: (2, 29, 7))
    with pytest.raises(
        NodeError, match=r"NCCL 2\.30 or later, and 2\.29\.7 is loaded: set LD_PRELOAD to the lib"
    ):
        prepare_shared_gpus()


def test_a_variable_that_forbids_it_is_named(shared: pytest.MonkeyPatch) -> None:
    shared.setenv("NCCL_NVLS_ENABLE", "1")
    with pytest.raises(
        UserError, match="RLHF_MC_RANKS_PER_GPU=2: the environment variable NCCL_NVLS_ENABLE is '1'"
    ):
        prepare_shared_gpus()


def test_the_version_is_that_of_the_library_that_is_loaded(tmp_path: Path) -> None:
    """Preload a library of NCCL's name, in place of the one that torch names."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    source = tmp_path / "nccl.c"
    source.write_text("int ncclGetVersion(int *version) { *version = 23203; return 0; }")
    library = tmp_path / "libother.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", library, source],
        check=True,
    )
    program = """
import torch
from rlhf_mc import platform
torch.cuda.nccl.version = lambda: (2, 29, 7, "suffix")
print(platform.nccl_version())"""
    for preload, wanted in ((str(library), "(2, 32, 3)"), ("", "(2, 29, 7)")):
        env = {**os.environ, "LD_PRELOAD": preload}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True
        )
        assert done.stdout.strip() == wanted, done.stderr


def test_the_planner_divides_a_gpu(shared: pytest.MonkeyPatch) -> None:
    found: list[Capacity] = []
    shared.setattr(platform, "device_memory", lambda: 140 << 30)
    shared.setattr(build, "ranks_per_node", lambda: 4)
    shared.setattr(build.dist, "get_world_size", lambda: 4)
    shared.setattr(build, "check_start", lambda cfg, shapes, capacity: found.append(capacity))
    trainer = SimpleNamespace(planner="refuse")
    cfg: Any = SimpleNamespace(trainer=trainer, resource_pools=ResourcePoolsConfig())
    build._check_memory(cfg, {})
    assert found == [Capacity(4, 70 << 30, True, 4, transformer_engine=False, ranks_per_gpu=2)]


def test_the_kv_cache_is_of_a_ranks_share(shared: pytest.MonkeyPatch) -> None:
    shapes = {"a": (1000, 500), "b": (500,), "router": (10, 1000)}
    layout = Layout(shapes, (), float32=frozenset({"router"}))
    storage = {"b": torch.zeros(1)}
    cfg = RolloutConfig(gpu_memory_utilization=0.5)
    shared.setattr(platform, "device_memory", lambda: 8_000_000)
    assert (
        vllm_limits.kv_cache_share(cfg, layout, torch.bfloat16, storage)
        == (2_000_000 - 1_000_000 - 40_000) // 2
    )
    with pytest.raises(
        UserError,
        match=r"0\.5 gives each of 2 ranks of a GPU 0\.00 GB, and vLLM's weights take 0\.00",
    ):
        vllm_limits.kv_cache_share(cfg, layout, torch.float32, storage)
    shared.delenv("RLHF_MC_RANKS_PER_GPU")
    assert vllm_limits.kv_cache_share(cfg, layout, torch.float32, storage) is None


@pytest.mark.parametrize("name", ["throughput", "step_speed"])
def test_no_part_measures_speed_on_a_shared_gpu(name: str, shared: pytest.MonkeyPatch) -> None:
    assert "ranks share a GPU here" in catalog.missing(catalog.find(name), "cuda", 2)
    assert "ranks share a GPU here" not in catalog.missing(catalog.find(name), "cpu", 2)
    shared.delenv("RLHF_MC_RANKS_PER_GPU")
    assert "ranks share a GPU here" not in catalog.missing(catalog.find(name), "cuda", 2)
