"""How a program ends: an exit code, and what a failing rank says, once for all ranks."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from rlhf_mc.config.errors import JoinError, NodeError, UserError
from rlhf_mc.runtime.console import write_line

EXIT_USER_ERROR, EXIT_ERROR, EXIT_REQUEUE, EXIT_INTERRUPTED = 2, 1, 75, 130
"""Exit codes: something the user gave is wrong; anything else; the run was asked to stop, and resumes from its
checkpoint when it is started again (EX_TEMPFAIL); it was interrupted and has saved nothing (128 + SIGINT). 0 means that
the action came to its end."""

REPORT_SECONDS = 5.0
"""Time that rank 0 waits for the other ranks' reports of a mistake that all of them have found."""

_LOST = re.compile(
    "(closed|reset) by peer|broken pipe|connection refused|timed out|timeout|remote process exited|"
    "communicator was aborted",
    re.IGNORECASE,
)
"""What gloo, NCCL and torch's store write where another rank is gone; they have no exception of its own for it."""


class RequeueError(Exception):
    """The run was asked to stop, and has. What there is to say has been said; every rank raises it."""


def exit_code(program: str, action: Callable[[], None]) -> int:
    """Runs the action of a program of one or several ranks; says what went wrong, in one line if it is the user's."""
    try:
        action()
        return 0
    except RequeueError:
        return EXIT_REQUEUE
    except UserError as error:
        line = " ".join(str(error).splitlines())
        _report(f"{program}: error: {line}", line, of_this_node=isinstance(error, NodeError))
        _wait_for_reports()
        return EXIT_USER_ERROR
    except JoinError as error:
        line = f"{program}: error on rank {os.environ.get('RANK', '0')}: {error}"
        if error.speaks:
            write_line(line)
        _tell_torchrun(line)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BaseException as error:  # at the entry point: whatever it is, sys.exit(0) in a library too, is no success
        where = f"{program}: error on rank {os.environ.get('RANK', '0')}: "
        if (lost := _lost_contact(error)) is not None:
            # Each survivor words it in its own way (addresses); one of them is enough.
            _report(where + lost, "lost contact")
        else:
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            _report(f"{traceback.format_exc()}\n{where}{line}", line)
        return EXIT_ERROR


def leave(code: int) -> NoReturn:
    """Ends this process at once: after an error on one rank, threads of vLLM and gloo would otherwise keep it waiting
    for the others.

    Nothing that fails on the way, a full disk or a closed pipe, keeps it alive."""
    with contextlib.suppress(OSError, ValueError):
        note_exit_code(code)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def note_exit_code(code: int) -> None:
    """torchrun and srun end with codes of their own. A launcher that wants to know the program's names a file for it in
    RLHF_MC_EXIT_CODE_FILE, and rank 0 writes it there; before the ranks part, where another one that ends first could
    have this one killed."""
    path = os.environ.get("RLHF_MC_EXIT_CODE_FILE")
    if path and os.environ.get("RANK", "0") == "0":
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"{code}\n")


def end_from_a_thread(line: str, code: int = EXIT_ERROR, say: bool = True) -> NoReturn:
    """Ends this process while its loop may be stuck anywhere, so without asking the other ranks who speaks."""
    text = f"rlhf_mc: error on rank {os.environ.get('RANK', '0')}: {line}"
    if say:
        write_line(text)
    _tell_torchrun(text)
    leave(code)


def _lost_contact(error: BaseException) -> str | None:
    """One line where the error says that another rank is gone: its own report, if it lived to make one, tells why."""
    from torch import distributed as dist

    first = str(error).partition("\n")[0]
    if not isinstance(error, RuntimeError) or not (isinstance(error, dist.DistError) or "gloo" in first):
        return None
    if _LOST.search(first) is None:
        return None
    notes = getattr(error, "__notes__", ["in phase unknown"])
    known = [note for note in notes if note and not note.startswith("in phase ")]  # heartbeat.py's
    # "[gloo's source file:line] Connection closed by peer [address]. General advice."
    reason = re.sub(r"^\[[^\]]*\]\s*", "", first).partition(". ")[0]
    return "; ".join([f"lost contact with another rank {notes[0]} ({reason})", *known])


def _report(text: str, key: str, of_this_node: bool = False) -> None:
    """Prints the text, once for all ranks that report the same key; its last line is the message."""
    if _is_first_to_say(key, of_this_node):
        write_line(text)
    _tell_torchrun(text.splitlines()[-1])


def _tell_torchrun(line: str) -> None:
    """torchrun prints a summary of its own after the ranks have ended; the error file gives it our line to show."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        info = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": line, "extraInfo": info}}, file)


def _is_first_to_say(key: str, of_this_node: bool) -> bool:
    """Whether no other rank has reported under this key. Where the ranks are not connected yet and no agent of
    torchrun is there to ask, all have the same to say, and rank 0 says it; of a node's files, the node's first rank."""
    if "torch" in sys.modules and (first := _is_first_in_store(key)) is not None:
        return first
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # Not rank 0 alone: torchrun ends the others as soon as one has failed, so it may never come to it.
        if os.environ.get("GROUP_WORLD_SIZE") == "1" and (first := _is_first_on_node(key)) is not None:
            return first
        return _is_first_at_agent(key)
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID"))
    return os.environ.get("RANK", "0") == "0" or (of_this_node and local_rank == "0")


def _is_first_in_store(key: str) -> bool | None:
    """Ask the store of the process group; None where the ranks are not connected."""
    from torch import distributed as dist

    if not dist.is_initialized():
        return None
    try:
        return int(dist.distributed_c10d._get_default_store().add(f"rlhf_mc/error/{key}", 1)) == 1
    except RuntimeError:  # the store went with the rank that held it
        return True


def _wait_for_reports() -> None:
    """Keep the store of the process group, which ends with rank 0, until every rank has asked it who speaks, for
    REPORT_SECONDS at most. Every rank calls it; torchrun's agent keeps the store itself."""
    if "torch" not in sys.modules or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    from torch import distributed as dist

    if not dist.is_initialized():
        return
    with contextlib.suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        deadline = time.monotonic() + REPORT_SECONDS
        reported = store.add("rlhf_mc/reported", 1)
        while dist.get_rank() == 0 and reported < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(0.05)
            reported = store.add("rlhf_mc/reported", 0)


def _is_first_on_node(key: str) -> bool | None:
    """Ask the file system, for which torch need not be imported: the ranks of one torchrun have their error files in
    one directory. None where that does not work."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return None
    name = f"said_{hashlib.sha256(key.encode(errors='replace')).hexdigest()}"
    try:
        os.close(os.open(os.path.join(os.path.dirname(os.path.dirname(path)), name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        return None
    return True


def _is_first_at_agent(key: str) -> bool:
    """Ask the store of torchrun's agent."""
    from torch import distributed as dist

    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=10))
        return int(store.add(f"rlhf_mc/error/{key}", 1)) == 1
    except RuntimeError:  # the agent has gone
        return True
