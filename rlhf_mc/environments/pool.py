"""The worker processes in which the environments of a rank's conversations run, and the rank's
handle of them. No call waits for an environment.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.environments.environment_worker import MOST_THREADS, Key, Turn
from rlhf_mc.environments.protocol import StepOutcome, StepResult, where
from rlhf_mc.rewards.results import Failure, FailureReason
from rlhf_mc.runtime.worker_process import WorkerEndedError, WorkerProcess

_Answer = tuple[Key, StepResult | FailureReason]
_MESSAGE_SECONDS = 60.0
_MOST_BY_CORES = 4
"""Limit of the default of num_workers."""
_MOST_FURTHER = 16
"""Maximum number of additional worker processes in the search for a call that ends its process."""


class _Worker:
    """A worker process with a reading and a writing thread, since a full pipe blocks."""

    def __init__(self, cfg: EnvironmentConfig, messages: SimpleQueue[tuple[_Worker, Any]]) -> None:
        """messages: gets what the process sends, and last a Failure, once it has ended."""
        self.process = WorkerProcess(
            "rlhf_mc.environments.environment_worker", cfg.timeout_seconds, _Answer, cfg
        )
        self.sent: dict[Key, float] = {}
        """Send times of unanswered turns by conversation, the earliest first."""
        self.num_timeouts = 0
        """Number of calls that exceeded their time limit. A call that is not async keeps its
        thread."""
        self.loaded_at = math.inf
        """Time (time.monotonic) at which the user's file was loaded."""
        self.loaded: Future[list[dict[str, Any]]] = Future()
        """The schemas of tools. Raises UserError if the user's file cannot be used."""
        self._cfg = cfg
        self._messages = messages
        self.turns: SimpleQueue[Turn | None] = SimpleQueue()
        """Turns to send; None ends the writing thread."""
        self._threads = [Thread(target=target, daemon=True) for target in (self._read, self._write)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the process and its threads."""
        self.process.end()
        self.turns.put(None)
        for thread in self._threads:
            thread.join()
        self.process.close()

    def _write(self) -> None:
        with contextlib.suppress(WorkerEndedError):  # _read notes the end
            while (turn := self.turns.get()) is not None:
                self.process.send(turn)

    def _read(self) -> None:
        try:
            setting = "rollout.environment.timeout_seconds"
            self.loaded.set_result(
                self.process.loaded(where(self._cfg), setting, list[dict[str, Any]])
            )
            self.loaded_at = time.monotonic()
            while True:
                if self.process.wait_for_message(_MESSAGE_SECONDS):
                    key, answer = self.process.receive()
                    is_failure = isinstance(answer, FailureReason)
                    self._messages.put((self, (key, Failure(*answer) if is_failure else answer)))
        except (UserError, WorkerEndedError) as error:
            if not self.loaded.done():
                self.loaded.set_exception(error)
            self._messages.put((self, Failure("exited", str(error))))


def _default_num_workers() -> int:
    """Return the number of cores of a rank of this node, up to a limit: each worker has the memory
    of what the user's file imports."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(1, len(os.sched_getaffinity(0)) // num_ranks), _MOST_BY_CORES)


class EnvironmentPool:
    """The environments of this rank's conversations."""

    def __init__(self, cfg: EnvironmentConfig) -> None:
        """Start a worker process. Raise UserError if the user's file cannot be used."""
        self._cfg = cfg
        self._messages: SimpleQueue[tuple[_Worker, Any]] = SimpleQueue()
        self._workers: list[_Worker] = []
        self._num_workers = cfg.num_workers or _default_num_workers()
        self._of_new: list[_Worker | None] = [None] * self._num_workers
        """Workers that get new conversations."""
        self._affinity: dict[Key, _Worker] = {}
        """Worker of each conversation, before its first call too where it is to begin again."""
        self._num_begun = 0
        try:
            self.tool_schemas = self._next().loaded.result()
            """Schemas of the tools that the model may call, as the chat template gets them."""
        except UserError:
            self.close()
            raise

    def submit(self, turn: Turn) -> None:
        """Send a turn to the conversation's environment."""
        worker = self._affinity.get(turn.key)
        if worker is None or worker not in self._workers:
            worker = self._affinity[turn.key] = self._next()
        worker.sent[turn.key] = time.monotonic()
        worker.turns.put(turn)

    def take(self, seconds: float) -> dict[Key, StepOutcome | None]:
        """Return the answers that have come, by conversation. Without any, wait for one for at most
        `seconds`. None: the environment has ended with its worker process, perhaps by another
        conversation's call."""
        answers: dict[Key, StepOutcome | None] = {}
        for worker, message in self._arrived(seconds):
            if worker not in self._workers:
                continue
            if isinstance(message, Failure):
                self._end(worker)
                answers |= self._unanswered(worker, message)
            elif worker.sent.pop(message[0], None) is not None:
                answers[message[0]] = message[1]
                self._count_timeouts(worker, message[1])
        # A worker keeps the limit by itself, unless a call blocks it.
        latest = time.monotonic() - 1.1 * self._cfg.timeout_seconds - 1.0
        for worker in [*self._workers]:
            if latest < max(worker.loaded_at, next(iter(worker.sent.values()), math.inf)):
                continue
            # The environments block the process: none keeps its limit.
            place = worker.process.blocking_call()
            self._end(worker)
            problem = (
                f"no answer after {self._cfg.timeout_seconds:g} s, and its process is "
                f"blocked{place}"
            )
            failure = Failure("timeout", f"{problem} (an async method may wait by await alone)")
            answers |= {
                key: failure if sent <= latest else None for key, sent in worker.sent.items()
            }
        return answers

    def has(self, key: Key) -> bool:
        """Return whether the conversation's environment still exists."""
        return self._affinity.get(key) in self._workers

    def end(self, key: Key) -> None:
        """Close the environment of a conversation, if it has begun."""
        worker = self._affinity.pop(key, None)
        if worker is not None and worker in self._workers:
            worker.sent.pop(key, None)
            worker.turns.put(Turn(key, None, None, []))
            if worker not in self._of_new and worker not in self._affinity.values():
                self._end(worker)

    def close(self) -> None:
        """End the worker processes."""
        for worker in [*self._workers]:
            self._end(worker)

    def _start(self) -> _Worker:
        self._workers.append(_Worker(self._cfg, self._messages))
        return self._workers[-1]

    def _next(self) -> _Worker:
        """Return the worker of the next conversation."""
        place = self._num_begun % self._num_workers
        self._num_begun += 1
        worker = self._of_new[place]
        if worker is None or worker not in self._workers:
            worker = self._of_new[place] = self._start()
        return worker

    def _arrived(self, seconds: float) -> Iterator[tuple[_Worker, Any]]:
        try:
            yield self._messages.get(seconds > 0, seconds or None)
            while True:
                yield self._messages.get_nowait()
        except Empty:
            return

    def _end(self, worker: _Worker) -> None:
        """End a worker process."""
        self._workers.remove(worker)
        worker.close()

    def _count_timeouts(self, worker: _Worker, answer: StepOutcome) -> None:
        """Count calls that timed out. New conversations get another process once such calls may
        occupy half of the threads."""
        failures = answer.failures if isinstance(answer, StepResult) else [answer]
        worker.num_timeouts += sum(failure.kind == "timeout" for failure in failures)
        if worker.num_timeouts >= MOST_THREADS // 2 and worker in self._of_new:
            self._of_new[self._of_new.index(worker)] = None

    def _unanswered(self, worker: _Worker, failure: Failure) -> dict[Key, Failure | None]:
        """Return the answer to each call of a process that ended by itself, or None to repeat the
        call. Any call may have ended the process: each half of the calls is repeated in a process
        of its own, until a failing call is alone."""
        calls = [*worker.sent]
        has_imported = worker.loaded.exception() is None
        if (
            len(calls) <= 1
            or not has_imported
            or len(self._workers) >= self._num_workers + _MOST_FURTHER
        ):
            return dict.fromkeys(calls, failure)
        for half in (calls[::2], calls[1::2]):
            self._affinity |= dict.fromkeys(half, self._start())
        return dict.fromkeys(calls)
