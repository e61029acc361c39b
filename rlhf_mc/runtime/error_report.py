"""The report of an error: printed once for all ranks that have the same one, and handed to
torchrun."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path

from rlhf_mc.config.masking import masked
from rlhf_mc.runtime.console import write_line

REPORT_SECONDS = 5.0
"""Time that rank 0 waits for the other ranks' reports of a mistake that all of them have found."""

_LOST = re.compile(
    "(closed|reset) by peer|broken pipe|connection refused|timed out|timeout|remote process "
    "exited|communicator was aborted",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL and torch's store about a lost rank; they have no exception type of their
own for it."""


def report(text: str, key: str, of_this_node: bool = False) -> None:
    """Print the text, whose last line is the message, once for all ranks that report the same key.

    of_this_node: the error is about this node's files, so other nodes may not have it."""
    # A key of torch's store may be neither long nor other than UTF-8, nor may the name of a file.
    if _is_first_to_report(hashlib.sha256(key.encode(errors="replace")).hexdigest(), of_this_node):
        write_line(text)
    write_torchrun_error_file(text.splitlines()[-1])


def write_torchrun_error_file(line: str) -> None:
    """Write the line to torchrun's error file: torchrun shows it in the summary that it prints
    after the ranks' end."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    line = masked(line)
    if path:
        info = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": line, "extraInfo": info}}, file)


def lost_contact(error: BaseException) -> str | None:
    """Return one line if the error says that the connection to another rank is lost, else None.

    The other rank's own report, if it could make one, has the cause."""
    from torch import distributed as dist

    first = str(error).partition("\n")[0]
    if not isinstance(error, RuntimeError) or not (
        isinstance(error, dist.DistError) or "gloo" in first
    ):
        return None
    if _LOST.search(first) is None:
        return None
    notes = getattr(error, "__notes__", ["in phase unknown"])
    known = [note for note in notes if note and not note.startswith("in phase ")]  # heartbeat.py's
    # "[gloo's source file:line] Connection closed by peer [address]. General advice."
    reason = re.sub(r"^\[[^\]]*\]\s*", "", first).partition(". ")[0]
    return "; ".join([f"lost contact with another rank {notes[0]} ({reason})", *known])


def wait_for_reports() -> None:
    """Keep the process group's store, which ends with rank 0, until every rank has reported,
    REPORT_SECONDS at most.

    Every rank calls it. Under torchrun its agent keeps the store, and this returns at once."""
    if "torch" not in sys.modules or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    from torch import distributed as dist

    if not dist.is_initialized():
        return
    with contextlib.suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        deadline = time.monotonic() + REPORT_SECONDS
        reported = store.add("rlhf_mc/reported", 1)
        while (
            dist.get_rank() == 0
            and reported < dist.get_world_size()
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
            reported = store.add("rlhf_mc/reported", 0)


def _is_first_to_report(key: str, of_this_node: bool) -> bool:
    """Return whether no other rank has reported the key.

    If the ranks are not connected and there is no torchrun agent to ask, rank 0 counts as the
    first, since all ranks have the same error. If the error is about this node, the node's first
    rank counts as the first too."""
    if "torch" in sys.modules and (first := _is_first_in_store(key)) is not None:
        return first
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # Not simply rank 0: torchrun ends all ranks as soon as one has failed, perhaps before rank
        # 0 reports.
        if (
            os.environ.get("GROUP_WORLD_SIZE") == "1"
            and (first := _is_first_on_node(key)) is not None
        ):
            return first
        return _is_first_at_agent(key)
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID"))
    return os.environ.get("RANK", "0") == "0" or (of_this_node and local_rank == "0")


def _is_first_in_store(key: str) -> bool | None:
    """Ask the process group's store. Return None if there is no process group."""
    from torch import distributed as dist

    if not dist.is_initialized():
        return None
    try:
        return int(dist.distributed_c10d._get_default_store().add(f"rlhf_mc/error/{key}", 1)) == 1
    except RuntimeError:  # the store ended with the rank that held it
        return True


def _is_first_on_node(key: str) -> bool | None:
    """Ask the file system, without importing torch: the error files of one torchrun's ranks are in
    one directory.

    Return None if that fails."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return None
    try:
        Path(path).parents[1].joinpath(f"reported_{key}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return None
    return True


def _is_first_at_agent(key: str) -> bool:
    """Ask the store of torchrun's agent."""
    from torch import distributed as dist

    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(
            address, port, is_master=False, timeout=datetime.timedelta(seconds=10)
        )
        return int(store.add(f"rlhf_mc/error/{key}", 1)) == 1
    except RuntimeError:  # the agent has ended
        return True
