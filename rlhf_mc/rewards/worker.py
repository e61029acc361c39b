"""A worker process that scores rows for a rank, and the rank's handle of it. It is not started by multiprocessing,
which would import the program's main module, torch included, in the worker; this one imports only what scoring.py
needs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from typing import Any

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.reward_schema import CustomRewardFunctionConfig, RewardConfig
from rlhf_mc.config.user_function import describe_error
from rlhf_mc.rewards.results import Failure, RewardRow, Score
from rlhf_mc.rewards.scoring import Scorer, custom_score_name
from rlhf_mc.runtime import guard

IMPORT_SECONDS = 60.0
"""Least time that a worker has to import the user's file: the limit of a response may be shorter."""
_EXTRA_SECONDS = 1.0


class Worker:
    """The rank's handle of a worker process and of the guard around it (runtime/guard.py)."""

    def __init__(self, custom: CustomRewardFunctionConfig, reward: RewardConfig) -> None:
        self._custom = custom
        self._reward = reward
        self.thread = ThreadPoolExecutor(1)
        """The thread that may use the worker."""
        self.num_scored = 0
        """Rows that have a score; other threads read it."""
        self._start()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from rlhf_mc.rewards.worker import main\nmain({theirs.fileno()}, {os.getpid()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # torchrun kills the rank's group, and with it the guard
        )
        theirs.close()
        self._loading = True
        self._scores_together = False
        self._is_batched = False
        self._connection.send((self._custom, self._reward))

    def load(self) -> tuple[bool, bool]:
        """Wait until the reward function is loaded. Return Scorer.{scores_together, is_batched}. Raise UserError if
        loading fails."""
        if not self._loading:
            return self._scores_together, self._is_batched
        name = custom_score_name(self._custom)
        limit = max(self._reward.timeout_seconds, IMPORT_SECONDS)
        try:
            if not self._wait_for_message(limit):
                raise UserError(f"{name}: not imported after {limit:g} s (reward.timeout_seconds)")
            self._scores_together, self._is_batched = self._receive()
        except (EOFError, OSError):
            raise UserError(f"{name}: importing it ended the worker process, {self._describe_end()}") from None
        self._loading = False
        return self._scores_together, self._is_batched

    def score(self, rows: Sequence[RewardRow], failed: Callable[[RewardRow, Failure], Score]) -> list[Score]:
        """Return each row's score; the score of a row without one is failed(row, reason). The worker cannot be used any
        more after an exception, of `failed` or another.

        Where a row does not return in time, or ends the process, another process scores the remaining ones. Rows that
        are scored together with it and have no score yet fail with it."""
        scores: dict[int, Score] = {}
        while left := [i for i in range(len(rows)) if i not in scores]:
            self.load()
            failure = self._receive_scores(rows, left, scores, failed)
            if failure is not None:
                unscored = [i for i in left if i not in scores]
                # Rows that are not scored together are scored in order.
                for i in unscored if self._scores_together else unscored[:1]:
                    scores[i] = failed(rows[i], failure)
                self.close()
                self._start()
        return [scores[i] for i in range(len(rows))]

    def _receive_scores(
        self,
        rows: Sequence[RewardRow],
        left: list[int],
        scores: dict[int, Score],
        failed: Callable[[RewardRow, Failure], Score],
    ) -> Failure | None:
        """Let the process score rows[i] for each i of `left`, into scores[i]. Return None, or why the process gives no
        further score."""
        limit = self._reward.timeout_seconds
        # A process that scores rows together, or asks an endpoint, keeps the limit of each row itself.
        keeps_limit = self._scores_together or self._reward.remote.url is not None
        patience = limit + _EXTRA_SECONDS + 0.1 * limit if keeps_limit else limit
        try:
            self._connection.send([rows[i] for i in left])
            while len(scores) < len(rows):
                if not self._wait_for_message(patience):
                    return Failure("timeout", f"no score after {limit:g} s (reward.timeout_seconds)")
                message = self._receive()
                if message is None:
                    continue
                place, outcome = message
                i = left[place]
                scores[i] = outcome if isinstance(outcome, Score) else failed(rows[i], outcome)
                self.num_scored += 1
        except (EOFError, OSError):
            return Failure("exited", f"its worker process ended, {self._describe_end()}")
        return None

    def close(self) -> None:
        """End the process and all that it has started."""
        self._process.send_signal(guard.END)
        try:
            self._process.wait(2 * guard.END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._connection.close()

    def _wait_for_message(self, seconds: float) -> bool:
        """Return whether a message arrives within that time. Raise EOFError if the process has ended.

        The pipe alone does not show that end: processes that the reward function started may hold its other end
        open."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._connection.poll(min(1.0, left)):
                return True
            if self._process.poll() is not None and not self._connection.poll():
                raise EOFError
        return self._connection.poll()

    def _receive(self) -> Any:
        """Return a message: Scorer.{scores_together, is_batched} once the user's function is loaded; (place among the
        rows that were sent, Score or Failure) of a row; None where the remote endpoint has answered. Raise a UserError
        that the worker has sent."""
        message = self._connection.recv()
        if isinstance(message, UserError):
            raise message
        return message

    def _describe_end(self) -> str:
        """Wait for the end of the process. Return its exit code or signal as text."""
        code = self._process.wait()
        if code >= 0:
            return f"with exit code {code}"
        why = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"by {signal.Signals(-code).name}{why}"


def main(descriptor: int, parent: int) -> None:
    """Score the rows that the rank sends, until it ends. This is the worker process's program."""
    guard.guarded(parent, (descriptor,))
    connection = Connection(descriptor)
    for number in guard.GROUP_SIGNALS:
        signal.signal(number, lambda number, frame: None)
    # Processes that a reward function starts must have the default handling, since the function may want to end them.
    # So the signals that the rank blocks are unblocked here, and a forked child restores the default handlers (a new
    # program has them anyway).
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.register_at_fork(after_in_child=lambda: _restore_signals(connection))

    def send(message: object) -> None:
        try:
            connection.send(message)
        except OSError:  # the rank has ended
            os._exit(0)

    custom: CustomRewardFunctionConfig | None = None
    try:
        custom, reward = connection.recv()
        scorer = Scorer(custom, reward)
        send((scorer.scores_together, scorer.is_batched))
        while True:
            rows = connection.recv()
            scorer.score(rows, lambda *scored: send(scored), lambda: send(None))
    except EOFError:  # the rank has ended
        return
    except UserError as error:
        send(UserError(str(error)))
    except BaseException as error:  # user code outside of the call: its own number class, a task not awaited
        if custom is not None:
            send(UserError(f"{custom_score_name(custom)}: raised {describe_error(error)}"))


def _restore_signals(connection: Connection) -> None:
    """Restore the default signal handlers in a forked child, and close its copy of the pipe."""
    for number in guard.GROUP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    connection.close()
