"""A worker process that scores rows for a rank, and the rank's handle of it. It imports only what
scoring.py needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.reward_schema import CustomRewardFunctionConfig, RewardConfig
from rlhf_mc.rewards.results import Failure, FailureReason, RewardRow, Score
from rlhf_mc.rewards.scoring import Scorer, custom_score_name
from rlhf_mc.runtime.user_function import describe_error
from rlhf_mc.runtime.worker_process import (
    MessageError,
    WorkerEndedError,
    WorkerProcess,
    guarded_connection,
)

_EXTRA_SECONDS = 1.0
_Outcome = tuple[int, Score | FailureReason] | None
"""A row by its place among those that the rank has sent, and its score. None: the remote endpoint
has answered."""


class Worker:
    """The rank's handle of a worker process that scores."""

    def __init__(self, custom: CustomRewardFunctionConfig, reward: RewardConfig) -> None:
        self._custom = custom
        self._reward = reward
        self.thread = ThreadPoolExecutor(1)
        """The thread that may use the worker."""
        self.num_scored = 0
        """Number of scored rows, read by other threads."""
        self._start()

    def _start(self) -> None:
        self._process = WorkerProcess(
            __name__, self._reward.timeout_seconds, _Outcome, self._custom, self._reward
        )
        self._loading = True
        self._scores_together = False
        self._is_batched = False

    def load(self) -> tuple[bool, bool]:
        """Wait until the reward function is loaded. Return Scorer.{scores_together, is_batched}.
        Raise UserError if loading fails."""
        if self._loading:
            name = custom_score_name(self._custom)
            loaded = self._process.loaded(name, "reward.timeout_seconds", tuple[bool, bool])
            self._scores_together, self._is_batched = loaded
            self._loading = False
        return self._scores_together, self._is_batched

    def score(
        self, rows: Sequence[RewardRow], failed: Callable[[RewardRow, Failure], Score]
    ) -> list[Score]:
        """Return each row's score; the score of a row without one is failed(row, reason). The
        worker cannot be used any more after an exception, of `failed` or another.

        Where a row does not return in time, or ends the process, another process scores the
        remaining ones. Rows that are scored together with it and have no score yet fail with it."""
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
        """Let the process score rows[i] for each i of `left`, into scores[i]. Return None, or why
        the process gives no further score."""
        limit = self._reward.timeout_seconds
        # A process that scores rows together, or asks an endpoint, keeps the limit of each row
        # itself.
        keeps_limit = self._scores_together or self._reward.remote.url is not None
        patience = limit + _EXTRA_SECONDS + 0.1 * limit if keeps_limit else limit
        try:
            self._process.send([rows[i] for i in left])
            while len(scores) < len(rows):
                if not self._process.wait_for_message(patience):
                    place = self._process.blocking_call()
                    return Failure(
                        "timeout", f"no score after {limit:g} s (reward.timeout_seconds){place}"
                    )
                message = self._process.receive()
                if message is None:
                    continue
                index, outcome = message
                i = left[index]
                scores[i] = (
                    outcome if isinstance(outcome, Score) else failed(rows[i], Failure(*outcome))
                )
                self.num_scored += 1
        except WorkerEndedError as end:
            return Failure("exited", str(end), is_killed=end.is_killed)
        return None

    def close(self) -> None:
        """End the process and all that it has started."""
        self._process.close()


def main(parent: int, descriptors: tuple[int, int]) -> None:
    """Score the rows that the rank sends, until it ends. This is the worker process's program."""
    connection, send = guarded_connection(parent, descriptors)

    def send_outcome(index: int, outcome: Score | Failure) -> None:
        try:
            send((index, outcome.reason if isinstance(outcome, Failure) else outcome))
        except MessageError as error:
            send((index, FailureReason("invalid", f"its score {error}")))

    custom: CustomRewardFunctionConfig | None = None
    try:
        custom, reward = connection.recv()
        scorer = Scorer(custom, reward)
        send((scorer.scores_together, scorer.is_batched))
        scorer.score(connection.recv, send_outcome, lambda: send(None))
    except (EOFError, OSError):  # the rank has ended
        return
    except UserError as error:
        send(error)
    except BaseException as error:
        # user code outside of the call: its own number class, a task not awaited
        if custom is not None:
            send(UserError(f"{custom_score_name(custom)}: raised {describe_error(error)}"))
