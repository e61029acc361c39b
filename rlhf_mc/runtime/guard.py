"""A guard around a process that runs a user's code: when the process ends, or the guard's parent
does, the guard ends all processes that the code has started, those that have detached themselves
(fork twice, setsid) too. No torch here.

The guard is the process that the parent has started, and the guarded process its child. The guard
is a "child subreaper": Linux makes it the parent of every descendant whose own parent has ended. A
SIGKILL to the guard itself ends the guarded process alone.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterable
from typing import NoReturn

from rlhf_mc.runtime.parent_death import adopt_orphans, exit_with_parent, signal_with_parent

END = signal.SIGRTMIN
"""Signal with which the parent ends the guard and all below it. Schedulers and shells send others,
to whole groups."""
STACKS = signal.SIGRTMIN + 1
"""Signal with which the parent asks the guarded process for its stacks (worker_process.py)."""
END_SECONDS = 5.0
"""Time for the processes to end. One that waits for a disk may take longer."""
_LOOK_SECONDS = 1.0
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that schedulers and shells send to whole process groups; the rank alone acts on them."""


def guarded(parent: int, descriptors: Iterable[int]) -> None:
    """Become the guard, and return in its new child, which is killed when the guard ends. parent:
    the process that has started this one. descriptors: what the child alone holds open. Call it
    before threads are started."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, END, STACKS})
    adopt_orphans()
    signal_with_parent(parent, signal.SIGCHLD)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        exit_with_parent(guard)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, END, STACKS})
        return
    for descriptor in descriptors:
        os.close(descriptor)
    _guard(child, parent)


def _guard(child: int, parent: int) -> NoReturn:
    """Wait for the end of the child, of the parent, or for END. End all descendants, and then this
    process as the child has ended."""
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    status = None
    while status is None and os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGCHLD, END, STACKS}, _LOOK_SECONDS)
        if received is not None and received.si_signo == END:
            break
        if received is not None and received.si_signo == STACKS:
            os.kill(child, STACKS)
        status = _reap(child)
    _end_descendants()
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has written one
        with contextlib.suppress(OSError):  # SIGKILL has no handler to replace
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -code)
    os._exit(code)


def _reap(child: int) -> int | None:
    """Reap the children that have ended, adopted ones too. Return the status of the guarded one if
    it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            status = ended[1] if ended[0] == child else status
    return status


def _end_descendants() -> None:
    """Kill all descendants, and those that they start meanwhile, for END_SECONDS at most."""
    import psutil

    this = psutil.Process()
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        for process in this.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            # none is left: those below others become children of this process
            return
        time.sleep(0.005)
