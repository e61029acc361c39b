"""The scoring of responses by worker processes, while the rank runs other phases."""

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
    """Scores that workers are computing, in the order of the rows."""

    def __init__(self, parts: Sequence[Future[Scores]], num_rows: int) -> None:
        """Part p has the scores of rows p, p + len(parts), ... (round-robin)."""
        self._parts = parts
        self._num_rows = num_rows
        self._submitted = time.perf_counter()
        self._done = self._submitted
        for part in parts:
            part.add_done_callback(self._note_time)

    def _note_time(self, part: Future[Scores]) -> None:
        self._done = max(self._done, time.perf_counter())

    def result(self) -> Scores:
        """Wait for the scores and return them. Raise UserError if a row could not be scored."""
        scores: Scores = [{}] * self._num_rows
        for p, part in enumerate(self._parts):
            scores[p :: len(self._parts)] = part.result()
        return scores

    def seconds_until(self, moment: float) -> float:
        """Return the seconds of scoring before the moment (of time.perf_counter), during which the rank did other
        work."""
        is_done = all(part.done() for part in self._parts)
        return (min(self._done, moment) if is_done else moment) - self._submitted


class RewardManager:
    """Scores responses by the user's function or the built-in rules. Ranks have managers of their own."""

    def __init__(self, cfg: CustomRewardFunctionConfig, reward: RewardConfig) -> None:
        self._cfg = cfg
        self._reward = reward
        self._workers: list[Worker] = []
        self._threads = ThreadPoolExecutor(reward.num_workers)
        if cfg.path is not None:
            # An error in the user's file is reported before training starts.
            try:
                self._start_workers(1)[0].load()
            except UserError:
                self.close()
                raise

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise UserError if a prompt cannot be scored. Called before training starts."""
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
        """Send the responses to the workers. prompts[i] is the prompt of responses[i], repeated if a prompt has several
        responses. Errors are raised by PendingScores.result."""
        rows = [
            Row(p.index, p.data_source, response, p.ground_truth, p.extra_info)
            for p, response in zip(prompts, responses, strict=True)
        ]
        workers = self._start_workers(min(self._reward.num_workers, len(rows)))
        parts = [self._threads.submit(self._score, worker, rows[p :: len(workers)]) for p, worker in enumerate(workers)]
        return PendingScores(parts, len(rows))

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    def _start_workers(self, count: int) -> list[Worker]:
        """Return `count` workers, after starting those that are missing."""
        while len(self._workers) < count:
            self._workers.append(Worker(self._cfg, self._reward.timeout_seconds))
        return self._workers[:count]

    def _score(self, worker: Worker, rows: Sequence[Row]) -> Scores:
        """Return the rows' scores; a worker that fails is removed."""
        try:
            return worker.score(rows)
        except UserError:
            worker.close()
            self._workers.remove(worker)
            raise
