"""The pre-flight's checks of one node (launch/node_checks.py), with stand-ins for the machine's
facts."""

from __future__ import annotations

import math
import os
import resource
from collections import namedtuple
from pathlib import Path

import inputs_70b
import pytest

from launch import node_checks, plan_checks, preflight
from launch.node_checks import Job
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.load import load_config
from rlhf_mc.machine import facts
from rlhf_mc.machine.facts import Driver, InfinibandPort, InstalledGpu
from rlhf_mc.reshard.layout import logical_shapes

ROOT = Path(__file__).parents[3]
H100 = InstalledGpu("H100", 81559, 4, (9, 0))
DRIVER = facts.driver
"""Not the stand-in."""
Stats = namedtuple("Stats", "isup")
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    """Return the overrides with which configs/ppo_70b.yaml names files that exist."""
    inputs_70b.write_inputs(tmp_path)
    # the test of the planner sets it
    inner = [f"trainer.default_local_dir={tmp_path}/run/ppo", "trainer.planner=off"]
    return [*inputs_70b.overrides(tmp_path), *inner]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Give this machine no GPUs, two interfaces and no adapters."""
    for name in (
        "CUDA_VISIBLE_DEVICES",
        "RLHF_MC_DEVICE",
        "SLURM_GPUS_ON_NODE",
        "RANK",
        "NCCL_IB_HCA",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in (
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "RLHF_MC_SOCKET_IFNAME",
        "NCCL_IB_DISABLE",
        "RLHF_MC_CONTAINER",
        "RLHF_MC_CACHE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(facts, "driver", Driver)
    monkeypatch.setattr(facts, "gpu_device_files", list)
    interfaces = {"lo": Stats(True), "eth0": Stats(True), "ib0": Stats(False), "ib1": Stats(True)}
    monkeypatch.setattr(node_checks.psutil, "net_if_stats", lambda: interfaces)
    return monkeypatch


def found(overrides: list[str], nodes: int = 8, ranks: int = 8, node_rank: int = 0) -> list[str]:
    cfg = load_config(str(ROOT / "configs/ppo_70b.yaml"), overrides)
    return list(node_checks.problems(Job(cfg, nodes, ranks, node_rank)))


def test_node_without_problems_has_no_line(
    machine: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    machine.setattr(facts, "driver", lambda: Driver("580", (13, 0), [H100] * 8))
    machine.setenv("GLOO_SOCKET_IFNAME", "eth0")
    machine.setenv("NCCL_SOCKET_IFNAME", "=eth0,ib0")
    assert found(overrides) == []


def test_layout_and_files_are_checked_by_the_runs_own_rules(
    machine: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    (line,) = found(overrides, nodes=7)
    assert "= 32 does not divide the 56 processes of this run" in line and line.endswith(
        "(7 nodes x 8 ranks)"
    )
    (line,) = found([*overrides, "data.val_files=none.parquet"])
    assert line == "data.val_files none.parquet: no such file"
    machine.setenv("RLHF_MC_CONTAINER", "pyxis")
    (line,) = found([*overrides, "model.path=/none"])
    assert line.startswith(
        "model.path /none: no such directory; in the container are only the repository and [contai"
    )


GPU_CASES = {
    "fewer than NPROC": ([H100] * 7, {}, "NPROC is 8, and the job may use 7 GPUs: ask for more"),
    "hidden": (
        [H100] * 8,
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        "NPROC is 8, and the job may use 2 GPUs: ask for more",
    ),
    "not equal": (
        [*[H100] * 7, InstalledGpu("H200", 143771, 4, (9, 0))],
        {},
        "equal: 7 x H100, 80 GiB; 1 x H200, 140 GiB",
    ),
    "used": (
        [*[H100] * 7, InstalledGpu("H100", 81559, 40960, (9, 0))],
        {},
        "other processes use 40 GiB of GPU 7: end them, or",
    ),
    "none": (
        [],
        {"SLURM_GPUS_ON_NODE": "8"},
        "nvidia-smi does not list the job's GPUs: there is no nvidia-smi; leave",
    ),
    "not used": ([H100], {"RLHF_MC_DEVICE": "cpu", "SLURM_GPUS_ON_NODE": "8"}, ""),
}


@pytest.mark.parametrize("case", GPU_CASES)
def test_gpus(machine: pytest.MonkeyPatch, overrides: list[str], case: str) -> None:
    gpus, variables, expected = GPU_CASES[case]
    machine.setattr(facts, "driver", lambda: Driver("580", (13, 0), gpus) if gpus else Driver())
    for name, value in variables.items():
        machine.setenv(name, value)
    lines = found(overrides)
    assert len(lines) == bool(expected) and all(expected in line for line in lines)


def test_driver_that_does_not_answer_is_reported(
    machine: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    machine.setattr(facts, "driver", lambda: Driver(error="nvidia-smi has not ended after 30 s"))
    machine.setattr(facts, "gpu_device_files", lambda: ["/dev/nvidia0"])
    (line,) = found(overrides)
    assert line.startswith(
        "nvidia-smi does not list the job's GPUs: nvidia-smi has not ended after 30 s; leave the "
        "node"
    )


NVIDIA_SMI = """#!/bin/sh
echo "$*" >> {calls}
case "$*" in
--query-gpu=*) for gpu in 0 1 2 3 4 5 6 7; do echo "H100, 81559, 4, 9.0, 580.1"; done ;;
*) echo "CUDA Version: 13.0" ;;
esac
"""


def test_pre_flight_asks_nvidia_smi_once(
    machine: pytest.MonkeyPatch, overrides: list[str], tmp_path: Path
) -> None:
    """Give the pre-flight of the job's first node a stand-in that lists 8 GPUs: one start for them,
    one for CUDA."""
    calls = tmp_path / "calls"
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(NVIDIA_SMI.format(calls=calls))
    program.chmod(0o755)
    machine.setenv("PATH", str(program.parent), prepend=":")
    machine.setenv("NPROC", "8")
    machine.setenv("SLURM_JOB_NUM_NODES", "8")
    machine.setattr(facts, "driver", DRIVER)
    DRIVER.cache_clear()
    found = preflight.probe(
        [str(ROOT / "configs/ppo_70b.yaml"), *overrides, "trainer.planner=warn"]
    )
    DRIVER.cache_clear()
    assert found["GPUs"] == "8 x H100, 80 GiB" and found["problems"] == [] and "planner" in found
    assert [line.partition("=")[0] for line in calls.read_text().splitlines()] == [
        "--query-gpu",
        "",
    ]


def test_run_that_does_not_fit(machine: pytest.MonkeyPatch, overrides: list[str]) -> None:
    """Check the lines of the job's first node: by its GPUs, then by its memory where the run is on
    CPUs."""
    machine.setenv("SLURM_JOB_NUM_NODES", "8")
    machine.setenv("NPROC", "8")
    machine.setattr(facts, "memory", lambda: (10**12, 10**12))
    arguments = [str(ROOT / "configs/ppo_70b.yaml"), *overrides, "trainer.planner=refuse"]
    machine.setattr(
        facts,
        "driver",
        lambda: Driver("580", (13, 0), [InstalledGpu("small", 8192, 4, (9, 0))] * 8),
    )
    (line,) = preflight.probe(arguments)["problems"]
    assert line.startswith("does not fit: phase ") and "GB of 8.6" in line
    machine.setattr(facts, "driver", Driver)
    machine.setattr(facts, "memory", lambda: (8 << 30, 8 << 30))
    (line,) = preflight.probe(arguments)["problems"]
    assert (
        line.startswith("does not fit: phase ")
        and "on ranks 0 to 7" in line
        and "GB of 8.6" in line
    )
    found = preflight.probe([*arguments, "trainer.planner=warn"])
    assert found["problems"] == [] and found["warnings"] == [line]


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        (
            "GLOO_SOCKET_IFNAME",
            "eth1",
            "GLOO_SOCKET_IFNAME is eth1, and no such interface is up; up are eth0, ",
        ),
        ("GLOO_SOCKET_IFNAME", "ib0", "GLOO_SOCKET_IFNAME is ib0, and no such interface is up"),
        ("NCCL_SOCKET_IFNAME", "ib", ""),
        ("NCCL_SOCKET_IFNAME", "=ib", "NCCL_SOCKET_IFNAME is =ib, and no such interface is up"),
        ("NCCL_SOCKET_IFNAME", "^docker", ""),
        (
            "RLHF_MC_SOCKET_IFNAME",
            "eth1",
            "RLHF_MC_SOCKET_IFNAME is eth1, and no such interface is up",
        ),
        ("NCCL_IB_HCA", "mlx5", ""),
        ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1", ""),
        (
            "NCCL_IB_HCA",
            "=mlx5_0,mlx5_7",
            "NCCL_IB_HCA names mlx5_7, and /sys/class/infiniband has mlx5_0, mlx5_1",
        ),
        (
            "NCCL_IB_HCA",
            "bnxt",
            "NCCL_IB_HCA is bnxt, and /sys/class/infiniband has mlx5_0, mlx5_1",
        ),
        ("NCCL_IB_HCA", "^mlx5_1", ""),
    ],
)
def test_interfaces_and_adapters(
    machine: pytest.MonkeyPatch,
    overrides: list[str],
    tmp_path: Path,
    variable: str,
    value: str,
    expected: str,
) -> None:
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / "infiniband" / name).mkdir(parents=True)
    machine.setattr(facts, "INFINIBAND", tmp_path / "infiniband")
    machine.setenv(variable, value)
    assert [line[: len(expected)] for line in found(overrides)] == [expected] * bool(expected)
    if variable == "NCCL_IB_HCA":
        machine.setenv("NCCL_IB_DISABLE", "1")
        assert found(overrides) == []


def test_locked_memory_is_checked_where_nccl_uses_adapters(
    machine: pytest.MonkeyPatch, overrides: list[str], tmp_path: Path
) -> None:
    machine.setattr(facts, "driver", lambda: Driver("580", (13, 0), [H100] * 8))
    machine.setattr(facts, "locked_memory_limit", lambda: 2**23)
    assert found(overrides) == []  # no adapters
    machine.setattr(
        facts,
        "infiniband",
        lambda: [InfinibandPort("mlx5_0", "active", "400 Gb/sec", "InfiniBand")],
    )
    (line,) = found(overrides)
    assert line.startswith(
        "only 8 MiB may be locked in memory (ulimit -l), and NCCL registers more with mlx5_0: set"
    )
    machine.setattr(facts, "locked_memory_limit", lambda: None)
    assert found(overrides) == []
    machine.setattr(facts, "locked_memory_limit", lambda: 2**16)
    machine.setenv("NCCL_IB_DISABLE", "1")
    assert found(overrides) == []
    machine.delenv("NCCL_IB_DISABLE")
    machine.setenv("RLHF_MC_DEVICE", "cpu")
    assert found(overrides) == []


def test_folder_of_compiled_kernels_is_this_users(
    machine: pytest.MonkeyPatch, overrides: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "rlhf_mc_0/123"
    machine.setenv("RLHF_MC_CACHE", str(folder))
    assert found(overrides) == [] and folder.stat().st_mode & 0o777 == 0o700
    machine.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    (line,) = found(overrides)
    assert line.startswith(f"RLHF_MC_CACHE {folder} belongs to another user, or cannot be written")
    (tmp_path / "file").touch()
    machine.setenv("RLHF_MC_CACHE", str(tmp_path / "file/cache"))
    (line,) = found(overrides)
    assert "RLHF_MC_CACHE, the folder of compiled kernels: [Errno 20] Not a directory" in line


def test_open_files_are_checked_for_the_nodes_first_rank(
    machine: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    machine.setattr(resource, "getrlimit", lambda kind: (400, 400))
    machine.setattr(resource, "setrlimit", lambda kind, limits: None)
    (line,) = found(overrides)
    assert line.startswith(
        "rank 0 of 64 needs about 634 open files and connections, and a process may have 400"
    )
    machine.setattr(resource, "getrlimit", lambda kind: (510, 510))
    assert found(overrides, node_rank=1) == []


@pytest.mark.parametrize("planner", ["refuse", "warn", "off"])
def test_space_and_host_memory_are_compared_with_the_plan(
    machine: pytest.MonkeyPatch, overrides: list[str], tmp_path: Path, planner: str
) -> None:
    """Check the lines on nodes that have too little: 2 checkpoints of 14 bytes for each parameter,
    and an export."""
    machine.setattr(facts, "driver", lambda: Driver("580", (13, 0), [H100] * 8))
    machine.setattr(plan_checks.shutil, "disk_usage", lambda path: Usage(0, 0, 10**5))
    machine.setattr(facts, "memory", lambda: (10**12, 10**12))
    machine.setenv("SLURM_JOB_NUM_NODES", "8")
    machine.setenv("NPROC", "8")
    settings = [*overrides, f"trainer.planner={planner}", "trainer.max_ckpt_to_keep=1"]
    (tmp_path / "run/ppo/global_step_1").mkdir(parents=True)
    (tmp_path / "run/ppo/global_step_1/a").write_bytes(bytes(1000))
    nodes = []
    for rank, megabytes in enumerate(["0", "50", "0"]):
        machine.setenv("SLURM_NODEID", str(rank))
        machine.setenv("SLURMD_NODENAME", "abc"[rank])
        machine.setenv("SLURM_MEM_PER_NODE", megabytes)
        nodes.append(preflight.probe([str(ROOT / "configs/ppo_70b.yaml"), *settings]))
    assert nodes[1]["host memory"] == 50 << 20
    complaints = preflight.compare(nodes, 3)
    lines = {"refuse": complaints, "warn": preflight.with_nodes(nodes, "warnings"), "off": []}[
        planner
    ]
    assert complaints == (lines if planner == "refuse" else [])
    if planner == "off":
        return
    shape = ModelShape.from_hf_config(inputs_70b.MODEL)
    actor = sum(math.prod(size) for size in logical_shapes(shape).values())
    # a value head in place of the logits
    critic = actor - (shape.vocab_size - 1) * shape.hidden_size
    checkpoint = 14 * (actor + critic)
    space = next(line for line in lines if "default_local_dir" in line)
    assert space.startswith("node a: ") and "has 0.0 GB free, and 2 checkpoints of 0.0 GB" in space
    memory = next(line for line in lines if "host memory" in line)
    assert (
        memory.startswith("node b: host memory: the job may use 0 GB, and the run takes about 5")
        and len(lines) == 2
    )
    needed = 2 * checkpoint + 2 * actor - 1000
    for free in (needed - 1, needed):
        machine.setattr(plan_checks.shutil, "disk_usage", lambda path, free=free: Usage(0, 0, free))
        machine.setenv("SLURM_NODEID", "0")
        found_lines = preflight.probe([str(ROOT / "configs/ppo_70b.yaml"), *settings])[
            nodes[0]["planner"]
        ]
        assert len(found_lines) == (free < needed)
    # the earlier checkpoint is moved, not deleted
    anew = [*settings, "trainer.resume_mode=disable"]
    assert (
        len(preflight.probe([str(ROOT / "configs/ppo_70b.yaml"), *anew])[nodes[0]["planner"]]) == 1
    )


def test_equal_problems_of_nodes_are_one_line(tmp_path: Path) -> None:
    nodes = [
        {"node": name, "GPUs": "8 x H100", "problems": ["p"] if name != "b" else ["q"]}
        for name in "abc"
    ]
    nodes[2]["GPUs"] = "8 x H200"
    assert preflight.compare(nodes, 3) == [
        "nodes a, c: p",
        "node b: q",
        "GPUs differs on node c: 8 x H200; on 2 other nodes: 8 x H100",
    ]
