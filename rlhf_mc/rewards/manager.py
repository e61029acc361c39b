"""Scores responses beside the rank's own work: rows go to worker processes, scores are asked for later."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import CustomRewardFunctionConfig, RewardConfig
from rlhf_mc.data.batch import Prompt
from rlhf_mc.rewards.scoring import RULES, Row
from rlhf_mc.rewards.worker import Worker

Scores = list[dict[str, float]]


class PendingScores:
    """Scores on their way, in the order of the rows."""

    def __init__(self, parts: Sequence[Future[Scores]], num_rows: int) -> None:
        """Part p is the scores of rows p, p + len(parts), ..."""
        self._parts, self._num_rows = parts, num_rows
        self._submitted = time.perf_counter()
        self._done = self._submitted
        for part in parts:
            part.add_done_callback(self._note_time)

    def _note_time(self, part: Future[Scores]) -> None:
        self._done = max(self._done, time.perf_counter())

    def result(self) -> Scores:
        """Waits for them. UserError where a row could not be scored."""
        scores: Scores = [{}] * self._num_rows
        for p, part in enumerate(self._parts):
            scores[p :: len(self._parts)] = part.result()
        return scores

    def seconds_until(self, moment: float) -> float:
        """How long, up to that moment of time.perf_counter, workers have been at it while the rank did other work."""
        over = all(part.done() for part in self._parts)
        return (min(self._done, moment) if over else moment) - self._submitted


class RewardManager:
    """Scores responses by the user's function or the built-in rules; every rank may have one."""

    def __init__(self, cfg: CustomRewardFunctionConfig, reward: RewardConfig) -> None:
        self._cfg, self._reward = cfg, reward
        self._workers: list[Worker] = []
        self._threads = ThreadPoolExecutor(reward.num_workers)
        if cfg.path is not None:
            # What is wrong with the user's file is said before training starts.
            try:
                self._started(1)[0].load()
            except UserError:
                self.close()
                raise

    def check(self, prompts: Sequence[Prompt]) -> None:
        """UserError unless every prompt can be scored; called before training starts."""
        if self._cfg.path is not None:
            return
        for prompt in prompts:
            if prompt.data_source not in RULES:
                raise UserError(
                    f"row {prompt.index}: no reward rule for data_source {prompt.data_source!r};"
                    f" known: {', '.join(RULES)}; for others set custom_reward_function.path"
                )
            if prompt.ground_truth is None:
                raise UserError(
                    f"row {prompt.index} (data_source {prompt.data_source!r}): reward_model.ground_truth is null;"
                    " the built-in rule needs an answer to compare with"
                )

    def submit(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> PendingScores:
        """Sends the responses off. prompts[i] is the prompt of responses[i] (repeated where a prompt has several
        responses). What goes wrong with them is raised by PendingScores.result."""
        rows = [
            Row(p.index, p.data_source, response, p.ground_truth, p.extra_info)
            for p, response in zip(prompts, responses, strict=True)
        ]
        workers = self._started(min(self._reward.num_workers, len(rows)))
        parts = [
            self._threads.submit(self._converse, worker, rows[p :: len(workers)]) for p, worker in enumerate(workers)
        ]
        return PendingScores(parts, len(rows))

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    def _started(self, count: int) -> list[Worker]:
        while len(self._workers) < count:
            self._workers.append(Worker(self._cfg, self._reward.timeout_seconds))
        return self._workers[:count]

    def _converse(self, worker: Worker, rows: Sequence[Row]) -> Scores:
        try:
            return worker.score(rows)
        except UserError:
            worker.close()
            self._workers.remove(worker)
            raise
