"""The scoring of responses by worker processes, while the rank runs other phases."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.reward_schema import CustomRewardFunctionConfig, RewardConfig
from rlhf_mc.data.batch import Prompt
from rlhf_mc.rewards.mixture import Mixture, row_problem
from rlhf_mc.rewards.results import DEFAULT, Failure, RewardRow, Score
from rlhf_mc.rewards.returned import Names
from rlhf_mc.rewards.scoring import custom_score_name
from rlhf_mc.rewards.worker import Worker
from rlhf_mc.runtime.console import print_line
from rlhf_mc.runtime.work import working

Scores = list[Score]
_COUNT_SECONDS = 0.5
"""Time between two counts of the rows that are scored."""
_MAX_REPORTED = 5
"""Failures that each rank reports; after them it reports every hundredth."""


class PendingScores:
    """Scores that workers are computing, in the order of the rows."""

    def __init__(self, parts: Sequence[Future[Scores]], num_rows: int, workers: Sequence[Worker], names: Names) -> None:
        """Part p has the scores of rows p, p + len(parts), ... (round-robin), which worker p computes."""
        self.names = names
        """Limits the numbers of the scores of all ranks together."""
        self._parts = parts
        self._workers = workers
        self._num_rows = num_rows
        self._submitted = time.perf_counter()
        self._done = self._submitted
        for part in parts:
            part.add_done_callback(self._note_time)

    def _note_time(self, part: Future[Scores]) -> None:
        self._done = max(self._done, time.perf_counter())

    def result(self) -> Scores:
        """Wait for the scores and return them. Raise UserError if a row could not be scored."""
        scores: Scores = [Score(0.0)] * self._num_rows
        with working(total=self._num_rows, unit="responses") as work:
            for p, part in enumerate(self._parts):
                while not wait([part], _COUNT_SECONDS).done:
                    work.done = sum(worker.num_scored for worker in self._workers)
                scores[p :: len(self._parts)] = part.result()
        return scores

    def seconds_until(self, moment: float) -> float:
        """Return the seconds of scoring before the moment (of time.perf_counter), during which the rank did other
        work."""
        is_done = all(part.done() for part in self._parts)
        return (min(self._done, moment) if is_done else moment) - self._submitted


class RewardManager:
    """Scores responses by the user's function and the built-in rules. Ranks have managers of their own."""

    def __init__(
        self, custom: CustomRewardFunctionConfig, reward: RewardConfig, models: Mapping[str, str] | None = None
    ) -> None:
        """Raise UserError if reward.mixture or the user's file cannot be used. models: as Mixture has them; their parts
        are not computed here."""
        self.mixture = Mixture(custom, reward, models)
        self._custom = custom
        self._reward = reward
        self._failures = 0
        self._names = Names()
        self._workers: list[Worker] = []
        self._threads = ThreadPoolExecutor(reward.num_workers)
        if custom.path is not None or reward.remote.url is not None:
            # An error in the user's file, or a missing key, is reported before training starts.
            try:
                self._start_workers(1)[0].load()
            except UserError:
                self.close()
                raise

    def check(self, prompts: Sequence[Prompt], training: bool = True) -> None:
        """Raise UserError if a prompt cannot be scored, or warn, by reward.default_score. Called before training
        starts."""
        default = self._reward.default_score
        unscored = 0
        for prompt in prompts:
            row = self._row(prompt, "", training)
            if (problem := row_problem(row)) is None:
                continue
            if default is None:
                raise UserError(f"{row.name}: {problem}")
            unscored += 1
            if unscored == 1:
                first = f"{row.name}: {problem}"
        if unscored:
            print_line(f"warning: {unscored} prompts score reward.default_score {default:g}; {first}")

    @property
    def needs_prompts(self) -> bool:
        """A part of the score reads the prompt as text."""
        return self._reward.remote.url is not None

    def submit(
        self,
        prompts: Sequence[Prompt],
        responses: Sequence[str],
        training: bool = True,
        texts: Sequence[str] | None = None,
    ) -> PendingScores:
        """Send the responses to the workers. prompts[i] is the prompt of responses[i], repeated if a prompt has several
        responses. Errors are raised by PendingScores.result.

        training: by the weights of training, else of validation. Parts of reward models are not added here.
        texts: the prompts as text, with `needs_prompts`."""
        texts = [""] * len(prompts) if texts is None else texts
        rows = [
            self._row(p, response, training, text) for p, response, text in zip(prompts, responses, texts, strict=True)
        ]
        has_functions = any(not self.mixture.is_by_models(row.parts) for row in rows)
        workers = self._start_workers(min(self._reward.num_workers, len(rows))) if has_functions else []
        parts = [self._threads.submit(self._score, worker, rows[p :: len(workers)]) for p, worker in enumerate(workers)]
        return PendingScores(parts, len(rows), workers, self._names)

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    def _row(self, prompt: Prompt, response: str, training: bool, text: str = "") -> RewardRow:
        weights = (self.mixture.training if training else self.mixture.validation)(prompt.data_source)
        return RewardRow(
            prompt.where, prompt.data_source, response, prompt.ground_truth, prompt.extra_info, weights, text
        )

    def _start_workers(self, count: int) -> list[Worker]:
        """Return `count` workers, after starting those that are missing."""
        while len(self._workers) < count:
            self._workers.append(Worker(self._custom, self._reward))
        return self._workers[:count]

    def _score(self, worker: Worker, rows: Sequence[RewardRow]) -> Scores:
        """Return the rows' scores; a worker that fails is removed."""
        try:
            return worker.score(rows, self._failed)
        except UserError:
            worker.close()
            self._workers.remove(worker)
            raise

    def _failed(self, row: RewardRow, failure: Failure) -> Score:
        """Return the default score of a row that could not be scored, with a warning. Raise UserError instead if
        reward.default_score is null."""
        message = f"{failure.origin or custom_score_name(self._custom)}: {row.name}: {failure.problem}"
        default = self._reward.default_score
        if default is None:
            raise UserError(message)
        self._failures += 1
        if self._failures <= _MAX_REPORTED or self._failures % 100 == 0:
            print_line(
                f"warning: {message}; it scores {default:g} ({self._failures} such responses so far on this rank)"
            )
        return Score(default, {DEFAULT: default}, failure=failure.kind)
