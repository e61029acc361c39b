"""Exit codes, and how a rank ends with one. What a failing rank prints is in error_report.py."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from rlhf_mc.config.errors import JoinError, LostProcessError, NodeError, UserError
from rlhf_mc.config.masking import cut
from rlhf_mc.runtime import error_report
from rlhf_mc.runtime.console import write_line
from rlhf_mc.runtime.tool import EXIT_INTERRUPTED, EXIT_UNREAD, is_unread

EXIT_ERROR = 1
"""Any error that is not the user's."""
EXIT_USER_ERROR = 2
"""A mistake in what the user gave: a setting, a file, a function."""
EXIT_REQUEUE = 75
"""The run was asked to stop. Started again, it resumes from its newest checkpoint (EX_TEMPFAIL)."""
MOST_STACK_CHARACTERS = 40_000
"""Length of the stack that is printed: an exception's text may be endless, and is in it."""
END_SECONDS = 120.0
"""Time for the libraries to free what they hold after a run's last file is written."""


class RequeueError(Exception):
    """The run has stopped because it was asked to. Every rank raises it, after the message has been
    printed."""


class CheckError(Exception):
    """No run could start on this machine. It is raised after the report has been printed."""


def exit_code(program: str, action: Callable[[], None]) -> int:
    """Run the action, which is the program of one or several ranks, and return its exit code; 0 is
    success.

    An error is reported once for all ranks: a UserError as one line, any other with its stack."""
    try:
        action()
        return 0
    except RequeueError:
        return EXIT_REQUEUE
    except CheckError:
        return EXIT_ERROR
    except UserError as error:
        line = " ".join(str(error).splitlines())
        error_report.report(
            f"{program}: error: {line}", key=line, of_this_node=isinstance(error, NodeError)
        )
        error_report.wait_for_reports()
        return EXIT_ERROR if isinstance(error, LostProcessError) else EXIT_USER_ERROR
    except JoinError as error:
        line = f"{program}: error on rank {os.environ.get('RANK', '0')}: {error}"
        if error.prints:
            write_line(line)
        error_report.write_torchrun_error_file(line)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BaseException as error:
        # at the entry point: a library's sys.exit(0) is no success either
        if is_unread(error):
            return EXIT_UNREAD
        where = f"{program}: error on rank {os.environ.get('RANK', '0')}: "
        if (lost := error_report.lost_contact(error)) is not None:
            # Each surviving rank has another message (with addresses); one of them is enough.
            error_report.report(where + lost, key="lost contact")
        else:
            line = cut(f"{type(error).__name__}: {error}".splitlines()[0])
            stack = cut(traceback.format_exc(), MOST_STACK_CHARACTERS)
            error_report.report(f"{stack}\n{where}{line}", key=line)
        return EXIT_ERROR


def exit_now(code: int) -> NoReturn:
    """End this process at once, with the code, without waiting for the threads of the rollout
    engine and gloo.

    After an error on one rank those threads would wait for the other ranks. A full disk or a closed
    pipe does not keep the process alive either."""
    with contextlib.suppress(OSError, ValueError):
        write_exit_code(code)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def exit_after(seconds: float, code: int) -> None:
    """End this process with the code if it still runs after `seconds`. Call it when nothing is left
    to be written: NCCL and the rollout engine free communicators and graphs in calls that have no
    timeout."""
    timer = threading.Timer(seconds, exit_now, [code])
    timer.daemon = True
    timer.start()


def write_exit_code(code: int) -> None:
    """Write the exit code to the file that RLHF_MC_EXIT_CODE_FILE names, on rank 0, if the launcher
    has set it.

    torchrun and srun have exit codes of their own. Call it while all ranks still run: when another
    rank ends first, rank 0 may be killed."""
    path = os.environ.get("RLHF_MC_EXIT_CODE_FILE")
    if path and os.environ.get("RANK", "0") == "0":
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"{code}\n")


def exit_from_thread(line: str, code: int = EXIT_ERROR, is_printed: bool = True) -> NoReturn:
    """End this process with an error line, while its main thread may be stuck in a collective.

    The ranks do not agree on one that prints the line: is_printed says whether this rank does."""
    text = f"rlhf_mc: error on rank {os.environ.get('RANK', '0')}: {line}"
    if is_printed:
        write_line(text)
    error_report.write_torchrun_error_file(text)
    exit_now(code)
