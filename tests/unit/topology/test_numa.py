"""NUMA binding (topology/numa.py), with files in place of the system's. Each case runs in a process
of its own, whose affinity it changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_mc import platform
from rlhf_mc.topology import rendezvous
from rlhf_mc.topology.numa import _parse_cpu_list

ADDRESS = "0000:1b:00.0"
CODE = """
import os, sys, threading
from pathlib import Path
from rlhf_mc.topology.numa import bind_to_numa_node

threading.Thread(target=threading.Event().wait, daemon=True).start()
os.sched_setaffinity(0, eval(sys.argv[2]))  # the thread above keeps all CPUs
bind_to_numa_node("0000:1b:00.0", Path(sys.argv[1]))
print(*(sorted(os.sched_getaffinity(int(thread))) for thread in sorted(os.listdir("/proc/self/task"), key=int)))
"""  # noqa: E501
CPUS = sorted(os.sched_getaffinity(0))
FIRST = CPUS[0]
NO_CPU = 10**6
"""A CPU that this machine does not have."""


def bound(system: Path, node: str | None, cpus: str, allowed: list[int]) -> str:
    """Return the affinities of a process's two threads after it is bound to a GPU of `node` with
    these CPUs. allowed: the CPUs of the first thread before that."""
    (system / "bus/pci/devices" / ADDRESS).mkdir(parents=True)
    if node is not None:
        (system / "bus/pci/devices" / ADDRESS / "numa_node").write_text(f"{node}\n")
    (system / "devices/system/node/node1").mkdir(parents=True)
    (system / "devices/system/node/node1/cpulist").write_text(f"{cpus}\n")
    command = [sys.executable, "-c", CODE, str(system), repr(set(allowed))]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=100
    ).stdout.strip()


def test_all_threads_run_on_the_cpus_of_the_gpus_node(tmp_path: Path) -> None:
    assert bound(tmp_path, "1", f"{FIRST},{NO_CPU}-{NO_CPU + 7}", CPUS) == f"[{FIRST}] [{FIRST}]"


@pytest.mark.parametrize(
    ("node", "cpus"),
    [("-1", f"{FIRST}"), (None, f"{FIRST}"), ("7", f"{FIRST}"), ("1", f"{NO_CPU}"), ("1", "")],
    ids=[
        "node not known",
        "no such device",
        "no such node",
        "none of its CPUs allowed",
        "node without CPUs",
    ],
)
def test_affinity_stays_where_the_node_has_no_cpu_for_it(
    tmp_path: Path, node: str | None, cpus: str
) -> None:
    assert bound(tmp_path, node, cpus, CPUS) == f"{CPUS} {CPUS}"


@pytest.mark.skipif(len(CPUS) < 2, reason="one CPU")
def test_narrower_affinity_stays(tmp_path: Path) -> None:
    """Check that a user's own binding, as by srun --cpu-bind, is not widened to the rest of the
    node."""
    assert bound(tmp_path, "1", f"0-{max(CPUS)}", [FIRST]) == f"[{FIRST}] {CPUS}"


def test_lists_of_cpus() -> None:
    assert _parse_cpu_list("0-2,4,8-9\n") == {0, 1, 2, 4, 8, 9}
    assert _parse_cpu_list("\n") == set()


def test_each_rank_binds_to_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        pci_domain_id = 0
        pci_bus_id = 0x1B
        pci_device_id = 0

    class Bound(Exception):
        """Ends the start of the rank, which would need a GPU."""

    def bind(pci_address: str) -> None:
        raise Bound(pci_address)

    devices = []
    monkeypatch.setattr(platform, "use_cuda", lambda: True)
    monkeypatch.setattr(platform, "num_devices", lambda: 8)
    monkeypatch.setattr(platform, "set_device", lambda: None)
    monkeypatch.setattr(platform, "enter_stream", lambda: None)
    monkeypatch.setattr(
        platform.torch.cuda, "get_device_properties", lambda gpu: devices.append(gpu) or Properties
    )
    monkeypatch.setattr(rendezvous, "bind_to_numa_node", bind)
    for name, value in {"RANK": "13", "LOCAL_RANK": "5", "WORLD_SIZE": "16"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Bound, match=f"^{ADDRESS}$"):
        rendezvous.init_process_group(10.0)
    assert [device.index for device in devices] == [5]
