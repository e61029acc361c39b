"""When a run gives way: a signal, or the end of its Slurm job's time. All ranks agree on it between phases, since a
signal reaches them at different steps. What is saved then is the subject of checkpointing.py.

No torch at import: signals are taken from the program's first moment on, and importing torch takes seconds.
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
from rlhf_mc.runtime.console import say
from rlhf_mc.runtime.exit_codes import EXIT_INTERRUPTED, EXIT_REQUEUE, end_from_a_thread, leave

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
ONE_PRESS_SECONDS = 1.0
"""Of one Ctrl-C a rank may hear twice: from the terminal and from torchrun."""
_TIME_IS_UP = "the job's time is almost up"
LATER_SECONDS = 5.0
"""By how much rank 0 is ahead of the others with its last word: mostly they are ended with it, and it is said once."""


class StopRequested(Exception):
    """The run is to stop, for the reason in the message. Every rank raises it at the same place."""


class StopRequests:
    """What this process knows of a wish that the run stop."""

    def __init__(self, cfg: TrainerConfig) -> None:
        self._cfg = cfg
        self._rank = int(os.environ.get("RANK", "0"))
        self._reason = ""
        self._interrupted_at = math.inf
        self._lock = threading.Lock()
        self._stop_at: float | None = None
        self.steps_done = 0
        """Of this process's run; the loop counts them."""

    def take_signals(self) -> None:
        """Let SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) ask to stop, and do no more. Call it in the main thread,
        before any other thread is there: they, and the processes that they start, inherit that the signals are blocked,
        as Slurm signals every process of a step, and one that writes a checkpoint must not die of it."""
        # A shell has SIGINT ignored in what it starts in the background, which is not to end with the terminal.
        in_background = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        taken = SIGNALS if in_background else (*SIGNALS, signal.SIGINT)
        # Libraries unblock them again in the main thread (multiprocessing's resource tracker): then they are handled
        # there, and this tells another thread at once.
        readable, writable = socket.socketpair()
        writable.setblocking(False)
        signal.set_wakeup_fd(writable.detach())
        signal.pthread_sigmask(signal.SIG_BLOCK, taken)
        for number in taken:
            signal.signal(number, lambda number, frame: None)  # the launcher may have had it ignored until now
        # Threads of their own: a handler would run in the main thread, which may be in a collective for minutes.
        for wait in (lambda: signal.sigwait(taken), lambda: readable.recv(1)[0]):
            threading.Thread(target=self._take, args=(wait, taken), name="rlhf_mc signals", daemon=True).start()

    def _take(self, wait: Callable[[], int], taken: Collection[int]) -> None:
        while True:
            number, now = signal.Signals(wait()), time.monotonic()
            if number not in taken:  # the descriptor tells of every signal that Python handles, timers' too
                continue
            if number in (signal.SIGINT, signal.SIGTERM) and now > self._interrupted_at + ONE_PRESS_SECONDS:
                leave(EXIT_INTERRUPTED)  # of a second Ctrl-C torchrun makes SIGTERM
            if number == signal.SIGINT:
                self._interrupted_at = min(self._interrupted_at, now)
                if self._rank == 0 and not self._reason:
                    say("interrupted: saving, then ending; a second Ctrl-C ends the run at once")
            self.request(number.name)

    def request(self, reason: str) -> None:
        """Asks the run to stop, from any thread. It has trainer.preemption_grace_seconds from the first request on."""
        with self._lock:
            if self._reason:
                return
            self._reason = reason
        seconds = self._cfg.preemption_grace_seconds + (LATER_SECONDS if self._rank else 0)
        timer = threading.Timer(seconds, self._give_up)
        timer.daemon = True
        timer.start()

    def _give_up(self) -> None:
        end_from_a_thread(
            f"asked to stop ({self._reason}) and not ready after {self._cfg.preemption_grace_seconds} s "
            "(trainer.preemption_grace_seconds): it ends without saving; the last complete checkpoint is what is kept",
            code=EXIT_REQUEUE,
        )

    def watch_the_clock(self) -> None:
        """Reads when the Slurm job ends, for trainer.stop_before_minutes. UserError where the time is up already.
        Every rank must call it."""
        from rlhf_mc.topology.consensus import on_every_rank

        on_every_rank(self._read_the_clock)

    def _read_the_clock(self) -> None:
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
        """Raises StopRequested on every rank if any of them is asked to stop. Every rank must call it, where the run
        can give way."""
        from rlhf_mc.topology.consensus import gather_objects

        if self._stop_at is not None and time.time() >= self._stop_at:
            self.request(f"{_TIME_IS_UP}, trainer.stop_before_minutes is {self._cfg.stop_before_minutes:g}")
        reason = next((reason for reason in gather_objects(self._reason) if reason), "")
        if reason.startswith(_TIME_IS_UP) and self.steps_done == 0:
            # Queued again, it would come this far again, for ever.
            raise UserError(f"{reason}, and no step was complete by then; give the job more time (sbatch --time)")
        if reason:
            self.request(reason)
            raise StopRequested(reason)


def job_end() -> float | None:
    """When the Slurm job that this process is in will be ended, in seconds since 1970; None outside of Slurm and where
    the job has no limit. UserError where Slurm does not say."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    if "SLURM_JOB_END_TIME" in os.environ:
        return float(os.environ["SLURM_JOB_END_TIME"])
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%e"]  # of the local time zone
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
        return None if said in ("N/A", "NONE", "Unknown") else datetime.datetime.fromisoformat(said).timestamp()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(
            f"trainer.stop_before_minutes: `{' '.join(command)}` does not tell when the job ends: {error}; "
            "export SLURM_JOB_END_TIME (seconds since 1970), or set it to null"
        ) from error
