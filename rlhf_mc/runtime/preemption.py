"""Requests to stop a run: a signal, or the end of its Slurm job's time. All ranks agree on the
request between phases, since a signal reaches them at different steps. What is saved then is the
subject of trainer/save.py.

No torch is imported with this module: signals are handled from the program's first moment on, and
importing torch takes seconds.
"""

from __future__ import annotations

import datetime
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import TrainerConfig
from rlhf_mc.runtime.console import print_line
from rlhf_mc.runtime.exit_codes import EXIT_REQUEUE, exit_from_thread, exit_now
from rlhf_mc.runtime.tool import EXIT_INTERRUPTED

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
ONE_PRESS_SECONDS = 1.0
"""Time within which two SIGINT are one press of Ctrl-C: a rank may get it from the terminal and
from torchrun."""
LATER_SECONDS = 5.0
"""Time by which the other ranks' grace period is longer than rank 0's. Mostly they are ended
together with rank 0, so the message is printed once."""
_TIME_IS_UP = "the job's time is almost up"


class StopRequested(Exception):
    """The run is to stop, for the reason in the message. Every rank raises it at the same point."""


class StopRequests:
    """The requests to stop that this process has received."""

    def __init__(self, cfg: TrainerConfig) -> None:
        self._cfg = cfg
        self._rank = int(os.environ.get("RANK", "0"))
        self._reason = ""
        self._interrupted_at = math.inf
        self._lock = threading.Lock()
        self._stop_at: float | None = None
        """Time (seconds since 1970) at which trainer.stop_before_minutes asks for the stop."""
        self.steps_done = 0
        """Steps that this process has completed; the loop counts them."""
        self.is_obeyed = False
        """The run has been told to stop: StopRequested was raised."""

    def take_signals(self) -> None:
        """Make SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) requests to stop, and nothing else.

        Call it in the main thread, before any other thread exists. Threads and child processes
        inherit that the signals are blocked: Slurm signals every process of a step, and a process
        that writes a checkpoint must survive that."""
        # A shell makes its background processes ignore SIGINT, since Ctrl-C in the terminal is not
        # for them.
        in_background = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        taken = SIGNALS if in_background else (*SIGNALS, signal.SIGINT)
        # Libraries unblock the signals in the main thread (multiprocessing's resource tracker).
        # They are then handled there, and the wakeup descriptor passes them to another thread at
        # once.
        readable, writable = socket.socketpair()
        writable.setblocking(False)
        signal.set_wakeup_fd(writable.detach())
        signal.pthread_sigmask(signal.SIG_BLOCK, taken)
        for number in taken:
            # the launcher may have had it ignored until now
            signal.signal(number, lambda number, frame: None)
        # Threads of their own: a handler would run in the main thread, which may be in a collective
        # for minutes.
        for wait in (lambda: signal.sigwait(taken), lambda: readable.recv(1)[0]):
            threading.Thread(
                target=self._take, args=(wait, taken), name="rlhf_mc signals", daemon=True
            ).start()

    def _take(self, wait: Callable[[], int], taken: Collection[int]) -> None:
        while True:
            number = signal.Signals(wait())
            now = time.monotonic()
            # the wakeup descriptor gets every signal that Python handles, timers' too
            if number not in taken:
                continue
            if (
                number in (signal.SIGINT, signal.SIGTERM)
                and now > self._interrupted_at + ONE_PRESS_SECONDS
            ):
                exit_now(EXIT_INTERRUPTED)  # SIGTERM too: torchrun sends it on a second Ctrl-C
            if number == signal.SIGINT:
                self._interrupted_at = min(self._interrupted_at, now)
                if self._rank == 0 and not self._reason:
                    print_line(
                        "interrupted: saving, then ending; a second Ctrl-C ends the run at once"
                    )
            self.request(number.name)

    def request(self, reason: str) -> None:
        """Ask the run to stop, from any thread. trainer.preemption_grace_seconds begin with the
        first request."""
        with self._lock:
            if self._reason:
                return
            self._reason = reason
        seconds = self._cfg.preemption_grace_seconds + (LATER_SECONDS if self._rank else 0)
        timer = threading.Timer(seconds, self._end_grace_period)
        timer.daemon = True
        timer.start()

    def _end_grace_period(self) -> None:
        exit_from_thread(
            f"asked to stop ({self._reason}) and not ready after "
            f"{self._cfg.preemption_grace_seconds} s (trainer.preemption_grace_seconds): the run "
            "ends without saving; the last complete checkpoint is kept",
            code=EXIT_REQUEUE,
        )

    def read_job_end(self) -> None:
        """Read the end of the Slurm job, for trainer.stop_before_minutes. Raise UserError if the
        time is up already.

        Every rank must call it."""
        from rlhf_mc.topology.consensus import on_every_rank

        on_every_rank(self._read_job_end)

    def _read_job_end(self) -> None:
        minutes = self._cfg.stop_before_minutes
        if minutes is None or self._rank != 0 or (end := job_end()) is None:
            return
        self._stop_at = end - 60 * minutes
        if time.time() >= self._stop_at:
            raise UserError(
                f"trainer.stop_before_minutes is {minutes:g}, but the job ends in "
                f"{(end - time.time()) / 60:.1f} minutes; give it more time (sbatch --time)"
            )

    def check(self) -> None:
        """Raise StopRequested on every rank if any rank has a request. Raise UserError if the job's
        time is up before the first step is complete. Every rank must call it, while the weights are
        as after the last complete step."""
        self.start_check()()

    def start_check(self) -> Callable[[], None]:
        """Start `check`, and return the function that ends it: what the ranks do in between hides
        the wait for their answers. Every rank must call both."""
        from rlhf_mc.topology.consensus import gather_objects, start_max_over_ranks

        if self._stop_at is not None and time.time() >= self._stop_at:
            self.request(
                f"{_TIME_IS_UP}, trainer.stop_before_minutes is {self._cfg.stop_before_minutes:g}"
            )
        own_reason = self._reason
        any_request = start_max_over_ranks(float(bool(own_reason)))

        def end() -> None:
            if any_request():
                self._obey(next(reason for reason in gather_objects(own_reason) if reason))

        return end

    def _obey(self, reason: str) -> None:
        """Raise StopRequested for this reason, or UserError, as `check` does."""
        if reason.startswith(_TIME_IS_UP) and self.steps_done == 0:
            # A requeued job would get no further than this one.
            raise UserError(
                f"{reason}, and no step was complete by then; give the job more time (sbatch "
                "--time)"
            )
        self.request(reason)
        self.is_obeyed = True
        raise StopRequested(reason)


def job_end() -> float | None:
    """Return when the Slurm job of this process will be ended, in seconds since 1970.

    Return None outside of Slurm and if the job has no time limit. Raise UserError if Slurm does not
    say."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    if "SLURM_JOB_END_TIME" in os.environ:
        end = float(os.environ["SLURM_JOB_END_TIME"])
        return end if math.isfinite(end) else None
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%e"]  # in the local time zone
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout.strip()
        return (
            None
            if output in ("N/A", "NONE", "Unknown")
            else datetime.datetime.fromisoformat(output).timestamp()
        )
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(
            f"trainer.stop_before_minutes: `{' '.join(command)}` does not tell when the job ends: "
            f"{error}; export SLURM_JOB_END_TIME (seconds since 1970), or set it to null"
        ) from error
