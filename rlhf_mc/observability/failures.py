"""How a program ends: an exit code, and what a failing rank says, once for all ranks."""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable

from rlhf_mc.config.errors import UserError

USER_ERROR, OTHER_ERROR = 2, 1
"""Exit codes: something the user gave is wrong; anything else."""

_LOST = re.compile(
    "(closed|reset) by peer|broken pipe|connection refused|timed out|timeout|remote process exited|"
    "communicator was aborted",
    re.IGNORECASE,
)
"""What gloo, NCCL and torch's store write where another rank is gone; they have no exception of its own for it."""


def exit_code(program: str, action: Callable[[], None]) -> int:
    """Runs the action of a program of one or several ranks; says what went wrong, in one line if it is the user's."""
    try:
        action()
        return 0
    except UserError as error:
        _report(f"{program}: error: {error}", str(error))
        return USER_ERROR
    except Exception as error:  # at the entry point: whatever it is, say it once and end with a code
        where = f"{program}: error on rank {os.environ.get('RANK', '0')}: "
        if (lost := _lost_contact(error)) is not None:
            # Each survivor words it in its own way (addresses); one of them is enough.
            _report(where + lost, "lost contact")
        else:
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            _report(f"{traceback.format_exc()}\n{where}{line}", line)
        return OTHER_ERROR


def leave(code: int) -> None:
    """Ends this process at once: after an error on one rank, threads of vLLM and gloo would otherwise keep it waiting
    for the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _lost_contact(error: Exception) -> str | None:
    """One line where the error says that another rank is gone: its own report, if it lived to make one, tells why."""
    from torch import distributed as dist

    first = str(error).partition("\n")[0]
    if not isinstance(error, RuntimeError) or not (isinstance(error, dist.DistError) or "gloo" in first):
        return None
    if _LOST.search(first) is None:
        return None
    phase = getattr(error, "__notes__", ["in phase unknown"])[0]
    # "[gloo's source file:line] Connection closed by peer [address]. General advice."
    reason = re.sub(r"^\[[^\]]*\]\s*", "", first).partition(". ")[0]
    return f"lost contact with another rank {phase} ({reason})"


def _report(text: str, key: str) -> None:
    """Prints the text, once for all ranks that report the same key; its last line is the message.

    torchrun prints a summary of its own after the ranks have ended; the error file gives it our line to show."""
    if _is_first_to_say(key):
        print(text, file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        line = text.splitlines()[-1]
        info = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": line, "extraInfo": info}}, file)


def _is_first_to_say(key: str) -> bool:
    """Whether no other rank has reported under this key. Where the ranks are not connected yet and no agent of
    torchrun keeps a store for them, all have the same to say, and rank 0 says it."""
    from torch import distributed as dist

    store: dist.Store
    try:
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
        elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # Not rank 0 alone: torchrun ends the others as soon as one has failed, so it may never come to it.
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=10))
        else:
            return int(os.environ.get("RANK", "0")) == 0
        return int(store.add(f"rlhf_mc/error/{key}", 1)) == 1
    except RuntimeError:  # the store went with the rank that held it
        return True
