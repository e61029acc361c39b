"""NUMA binding: a rank runs on the CPUs next to its GPU. Its page-locked buffers are then there
too, since Linux takes memory from the node of the thread that first writes to it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def bind_to_numa_node(pci_address: str, system: Path = Path("/sys")) -> None:
    """Restrict all threads of this process to the CPUs of the NUMA node of a PCI device, as
    `torchrun --numa-binding node` does, which needs numactl. CPUs that the process was not allowed
    before stay forbidden.

    Do nothing where the system does not name the device's node, or where no allowed CPU belongs to
    it."""
    try:
        node = int((system / "bus/pci/devices" / pci_address / "numa_node").read_text())
        cpus = _parse_cpu_list((system / f"devices/system/node/node{node}/cpulist").read_text())
    except OSError:  # node -1 is not known, and has no file
        return
    if not cpus & os.sched_getaffinity(0):
        return
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # the thread has ended, or may use none of these CPUs
            os.sched_setaffinity(int(thread), cpus & os.sched_getaffinity(int(thread)))


def _parse_cpu_list(text: str) -> set[int]:
    """Return the CPUs of a list such as 0-3,8."""
    ranges = (part.split("-") for part in text.split(",") if part.strip())
    return {
        cpu for first, *last in ranges for cpu in range(int(first), int((last or [first])[0]) + 1)
    }
