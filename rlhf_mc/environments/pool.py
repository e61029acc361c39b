"""The worker processes in which the environments of a rank's conversations run, and the rank's handle of them. No call
waits for an environment.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.environments.environment_worker import Key, Turn
from rlhf_mc.environments.protocol import StepResult, where
from rlhf_mc.rewards.results import Failure
from rlhf_mc.runtime.worker_process import WorkerProcess

_MESSAGE_SECONDS = 60.0


class _Worker:
    """A worker process, which a thread reads and another one writes to: a pipe may be full."""

    def __init__(self, cfg: EnvironmentConfig, messages: SimpleQueue[tuple[_Worker, Any]]) -> None:
        """messages: gets what the process sends, and last a Failure, once it has ended."""
        self.process = WorkerProcess("rlhf_mc.environments.environment_worker", cfg)
        self.sent: dict[Key, float] = {}
        """When the turns that it has not answered were sent, by conversation, the earliest first."""
        self.loaded_at = math.inf
        """When it has begun to answer."""
        self.loaded: Future[list[dict[str, Any]]] = Future()
        """The schemas of tools. Raises UserError if the user's file cannot be used."""
        self._cfg = cfg
        self._messages = messages
        self.turns: SimpleQueue[Turn] = SimpleQueue()
        """To send to the process."""
        Thread(target=self._read, daemon=True).start()
        Thread(target=self._write, daemon=True).start()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # _read notes the end
            while True:
                self.process.connection.send(self.turns.get())

    def _read(self) -> None:
        try:
            setting = "rollout.environment.timeout_seconds"
            self.loaded.set_result(self.process.loaded(where(self._cfg), self._cfg.timeout_seconds, setting))
            self.loaded_at = time.monotonic()
            while True:
                if self.process.wait_for_message(_MESSAGE_SECONDS):
                    self._messages.put((self, self.process.receive()))
        except UserError as error:
            self.loaded.set_exception(error)
            self._messages.put((self, Failure("exited", str(error))))
        except (EOFError, OSError):
            self._messages.put((self, Failure("exited", f"its worker process ended, {self.process.describe_end()}")))


class EnvironmentPool:
    """The environments of this rank's conversations."""

    def __init__(self, cfg: EnvironmentConfig) -> None:
        """Start a worker process. Raise UserError if the user's file cannot be used."""
        self._cfg = cfg
        self._messages: SimpleQueue[tuple[_Worker, Any]] = SimpleQueue()
        self._workers: list[_Worker | None] = [None] * cfg.num_workers
        self._homes: dict[Key, _Worker] = {}
        """The worker of each conversation that has begun."""
        self._lost: dict[Key, Failure] = {}
        """Conversations whose worker has ended before their turn."""
        self._num_begun = 0
        self.tool_schemas = self._worker(0).loaded.result()
        """Of the tools that the model may call, as the chat template gets them."""

    def submit(self, turn: Turn) -> None:
        """Send a turn to the conversation's environment."""
        if turn.row is not None:
            self._homes[turn.key] = self._worker(self._num_begun % self._cfg.num_workers)
            self._num_begun += 1
        home = self._homes[turn.key]
        if home not in self._workers:
            self._lost[turn.key] = Failure("exited", "its worker process has ended, with another conversation's call")
            return
        home.sent[turn.key] = time.monotonic()
        home.turns.put(turn)

    def take(self, seconds: float) -> dict[Key, StepResult | Failure]:
        """Return the answers that have come, by conversation. Without any, wait for one for at most `seconds`."""
        answers: dict[Key, StepResult | Failure] = dict(self._lost)
        self._lost.clear()
        for worker, message in self._arrived(0.0 if answers else seconds):
            if worker not in self._workers:
                continue
            if isinstance(message, Failure):
                answers |= self._end(worker, message)
            elif worker.sent.pop(message[0], None) is not None:
                answers[message[0]] = message[1]
        # A worker keeps the limit by itself, unless a call blocks it.
        latest = time.monotonic() - 1.1 * self._cfg.timeout_seconds - 1.0
        for one in self._workers:
            if one is None or latest < max(one.loaded_at, next(iter(one.sent.values()), math.inf)):
                continue
            overdue = {key for key, sent in one.sent.items() if sent <= latest}
            # The environments block the process: none keeps its limit.
            failure = Failure("timeout", f"no answer after {self._cfg.timeout_seconds:g} s, and its process is blocked")
            other = Failure("exited", "its worker process was ended, which another conversation's call has blocked")
            answers |= self._end(one, other) | dict.fromkeys(overdue, failure)
        return answers

    def has(self, key: Key) -> bool:
        """Return whether the conversation's environment still exists."""
        return self._homes[key] in self._workers

    def end(self, key: Key) -> None:
        """Close the environment of a conversation, if it has begun."""
        home = self._homes.pop(key, None)
        if home is not None and home in self._workers:
            home.sent.pop(key, None)
            home.turns.put(Turn(key, None, None, []))

    def close(self) -> None:
        """End the worker processes."""
        for worker in self._workers:
            if worker is not None:
                self._end(worker, Failure("exited", ""))

    def _worker(self, index: int) -> _Worker:
        worker = self._workers[index] = self._workers[index] or _Worker(self._cfg, self._messages)
        return worker

    def _arrived(self, seconds: float) -> Iterator[tuple[_Worker, Any]]:
        try:
            yield self._messages.get(seconds > 0, seconds or None)
            while True:
                yield self._messages.get_nowait()
        except Empty:
            return

    def _end(self, worker: _Worker, failure: Failure) -> dict[Key, StepResult | Failure]:
        """End a worker process. Return the failure for each conversation that waits for it."""
        self._workers[self._workers.index(worker)] = None
        worker.process.close()
        return dict.fromkeys(worker.sent, failure)
