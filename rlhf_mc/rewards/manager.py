"""The scoring of responses by worker processes, while responses are generated and other phases
run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import LostProcessError, UserError
from rlhf_mc.config.reward_schema import CustomRewardFunctionConfig, RewardConfig
from rlhf_mc.data.batch import Prompt
from rlhf_mc.rewards.mixture import Mixture, row_problem
from rlhf_mc.rewards.registry import RULES
from rlhf_mc.rewards.results import (
    CUSTOM,
    DEFAULT,
    MASKED,
    Episode,
    Failure,
    RewardRow,
    Score,
)
from rlhf_mc.rewards.returned import Names
from rlhf_mc.rewards.scoring import custom_score_name
from rlhf_mc.rewards.worker import Worker
from rlhf_mc.runtime.console import print_line
from rlhf_mc.runtime.work import count, working
from rlhf_mc.topology.consensus import gather_results

Scores = list[Score]
_COUNT_SECONDS = 0.5
"""Time between two counts of the rows that are scored."""
_MAX_REPORTED = 5
"""Failures that each rank reports; after them it reports every hundredth."""


class PendingScores:
    """Scores that workers are computing, in the order in which their rows were submitted."""

    def __init__(self, names: Names) -> None:
        self.names = names
        """Limits the numbers of the scores of all ranks together."""
        self.num_rows = 0
        self._parts: list[tuple[Sequence[int], Future[Scores]]] = []
        self._num_before: dict[Worker, int] = {}
        """Number of rows that each worker had scored before."""
        self._last_parts: dict[Worker, Future[Scores]] = {}
        """A worker computes its parts one after the other."""
        self._submitted: float | None = None
        self._done = 0.0

    def add(self, worker: Worker, rows: Sequence[int], scores: Future[Scores]) -> None:
        """Add the scores of these rows, which the worker computes."""
        self._submitted = self._submitted or time.perf_counter()
        self._num_before.setdefault(worker, worker.num_scored)
        self._parts.append((rows, scores))
        self._last_parts[worker] = scores
        scores.add_done_callback(self._note_time)

    def _note_time(self, part: Future[Scores]) -> None:
        self._done = max(self._done, time.perf_counter())

    @property
    def is_busy(self) -> bool:
        """Rows are waiting for their scores."""
        return not all(part.done() for part in self._last_parts.values())

    def result(self) -> Scores:
        """Wait for the scores and return them. Raise UserError if a row could not be scored."""
        scores: Scores = [Score(0.0)] * self.num_rows
        with working(total=self.num_rows, unit="responses") as work:
            for rows, part in self._parts:
                while not wait([part], _COUNT_SECONDS).done:
                    work.done = sum(
                        worker.num_scored - before for worker, before in self._num_before.items()
                    )
                for row, score in zip(rows, part.result(), strict=True):
                    scores[row] = score
        return scores

    def seconds_until(self, moment: float) -> float:
        """Return the seconds from the first submission to the last score or the moment (of
        time.perf_counter), during which the rank did other work."""
        if self._submitted is None:
            return 0.0
        return (moment if self.is_busy else min(self._done, moment)) - self._submitted


class RewardManager:
    """Scores responses by the user's function and the built-in rules. Each rank has its own
    manager."""

    def __init__(
        self,
        custom: CustomRewardFunctionConfig,
        reward: RewardConfig,
        models: Mapping[str, str] | None = None,
        environment: EnvironmentConfig | None = None,
    ) -> None:
        """Raise UserError if reward.mixture or the user's file cannot be used. models, environment:
        as Mixture has them; the parts of models are not computed here."""
        self.mixture = Mixture(custom, reward, models, environment)
        self._custom = custom
        self._reward = reward
        self._failures = 0
        self._names = Names()
        self._workers: list[Worker] = []
        self.scores_together = reward.remote.url is not None
        """The user's function, or the endpoint, scores several rows at a time."""
        self.is_batched = False
        """The user's function takes all rows in one call."""
        if custom.path is not None or reward.remote.url is not None:
            # An error in the user's file, or a missing key, is reported before training starts.
            try:
                scores_together, self.is_batched = self._start_workers(1)[0].load()
                self.scores_together |= scores_together
            except UserError:
                self.close()
                raise

    def check(self, prompts: Sequence[Prompt], training: bool = True) -> None:
        """Raise UserError if a prompt cannot be scored, or warn, by reward.default_score. Called
        before training starts."""
        default = self._reward.default_score
        unscored = 0
        for prompt in prompts:
            row = self._row(prompt, "", "", None, {}, training)
            if (problem := row_problem(row)) is None:
                continue
            if default is None:
                raise UserError(f"{row.name}: {problem}")
            unscored += 1
            if unscored == 1:
                first = f"{row.name}: {problem}"
        if unscored:
            print_line(
                f"warning: {unscored} prompts score reward.default_score {default:g}; {first}"
            )

    def parts(self, prompt: Prompt, training: bool) -> Mapping[str, float]:
        """Return the weights of the parts of the score of the prompt's responses."""
        return (self.mixture.training if training else self.mixture.validation)(prompt.data_source)

    @property
    def special_tokens(self) -> dict[str, Sequence[str] | None]:
        """The special tokens, where the tokenizer has them, with which a part reads responses;
        None: all."""
        read: dict[str, Sequence[str] | None] = {
            name: rule.tags for name, rule in RULES.items() if rule.tags
        }
        return read if self._custom.skip_special_tokens else {**read, CUSTOM: None}

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
        earlier: PendingScores | None = None,
        episodes: Sequence[Episode | None] | None = None,
        with_special_tokens: Sequence[Mapping[str, str]] | None = None,
    ) -> PendingScores:
        """Send the responses to the workers. prompts[i] is the prompt of responses[i], repeated if
        a prompt has several responses. Errors are raised by PendingScores.result.

        training: by the weights of training, else of validation. Parts of reward models are not
        added here. texts: the prompts as text, with `needs_prompts`. earlier: scores to come,
        behind which these are added. episodes: what the environments of the responses gave.
        with_special_tokens: as RewardRow has them."""
        pending = PendingScores(self._names) if earlier is None else earlier
        texts = [""] * len(prompts) if texts is None else texts
        episodes = [None] * len(prompts) if episodes is None else episodes
        special = [{}] * len(prompts) if with_special_tokens is None else with_special_tokens
        columns = zip(prompts, responses, texts, episodes, special, strict=True)
        rows = [self._row(*row, training=training) for row in columns]
        first = pending.num_rows
        pending.num_rows += len(rows)
        if any(row.episode or not self.mixture.is_by_models(row.parts) for row in rows):
            # Row i of all is worker i's, round-robin.
            workers = self._start_workers(min(self._reward.num_workers, pending.num_rows))
            for p in range(min(len(workers), len(rows))):
                worker = workers[(first + p) % len(workers)]
                part = worker.thread.submit(self._score, worker, rows[p :: len(workers)])
                pending.add(worker, range(first + p, pending.num_rows, len(workers)), part)
        return pending

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    def _row(
        self,
        prompt: Prompt,
        response: str,
        text: str,
        episode: Episode | None,
        special: Mapping[str, str],
        training: bool,
    ) -> RewardRow:
        return RewardRow(
            prompt.where,
            prompt.data_source,
            response,
            prompt.ground_truth,
            prompt.extra_info,
            self.parts(prompt, training),
            text,
            episode,
            special,
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
            if worker in self._workers:  # a part that was submitted later fails too
                self._workers.remove(worker)
            raise

    def _failed(self, row: RewardRow, failure: Failure) -> Score:
        """Return the default score of a row that could not be scored, with a warning. Raise
        UserError instead if reward.default_score is null, unless the row is masked: it then scores
        0."""
        message = (
            f"{failure.origin or custom_score_name(self._custom)}: {row.name}: {failure.problem}"
        )
        is_masked = failure.kind == MASKED or (row.episode is not None and row.episode.is_masked)
        default = self._reward.default_score
        if default is None and is_masked:
            default = 0.0
        if default is None:
            raise LostProcessError(message) if failure.is_killed else UserError(message)
        self._failures += 1
        if self._failures <= _MAX_REPORTED or self._failures % 100 == 0:
            print_line(
                f"warning: {message}; it scores {default:g} ({self._failures} such responses so "
                "far on this rank)"
            )
        return Score(default, {DEFAULT: default}, failure=MASKED if is_masked else failure.kind)


class SpecialTokenTexts:
    """The texts of responses for the parts of the score that read special tokens, which other parts
    do not see."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, special_tokens: Mapping[str, Sequence[str] | None]
    ) -> None:
        """special_tokens: as of RewardManager."""
        self._tokenizer = tokenizer
        numbers = {
            token.content: number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        self.read = {
            part: [text for text in numbers if tokens is None or text in tokens]
            for part, tokens in special_tokens.items()
        }
        """By part the special tokens of the tokenizer that it reads."""
        self._left_out = {
            part: {number for text, number in numbers.items() if text not in read}
            for part, read in self.read.items()
            if read
        }

    def of(self, parts: Iterable[str], token_ids: Sequence[int]) -> dict[str, str]:
        """Return the text of a response for each of these parts that reads special tokens."""
        texts = {}
        for part in self._left_out.keys() & parts:
            tokens = [token for token in token_ids if token not in self._left_out[part]]
            texts[part] = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return texts


class ScoreStream:
    """The scores of responses that are submitted to reward workers as they end, while others are
    generated. Each response has a number, and is scored by exactly one rank."""

    def __init__(
        self,
        rewards: RewardManager,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Prompt],
        training: bool = True,
    ) -> None:
        """prompts: of each response, by its number. training: see RewardManager.submit."""
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._training = training
        self._special = SpecialTokenTexts(tokenizer, rewards.special_tokens)
        self._numbers: list[int] = []
        self._unsubmitted: dict[int, Sequence[int]] = {}
        """Ended responses that wait to be scored together with others."""
        self.episodes: dict[int, Episode] = {}
        """Episodes of responses not yet submitted, where there is an environment."""
        self._pending = rewards.submit([], [], training)
        self._scores: list[Score] | None = None

    def submit(self, responses: Mapping[int, Sequence[int]], others_follow: bool = False) -> None:
        """Submit the tokens of responses to this rank's workers, by number. With others_follow,
        responses wait for others in two cases: for an async function or an endpoint, which score
        several at a time, while the workers are busy; for a function that takes all rows in one
        call, always."""
        self._unsubmitted |= responses
        waits = self._rewards.is_batched or (
            self._rewards.scores_together and self._pending.is_busy
        )
        if not self._unsubmitted or (others_follow and waits):
            return
        # In the order in which they have ended, in parts that depend on time: a worker's rows do
        # not.
        numbers = sorted(self._unsubmitted) if self._rewards.is_batched else list(self._unsubmitted)
        prompts = [self._prompts[number] for number in numbers]
        decode = self._tokenizer.batch_decode
        tokens = [list(self._unsubmitted[number]) for number in numbers]
        texts = decode(tokens, skip_special_tokens=True)
        special = [
            self._special.of(self._rewards.parts(prompt, self._training), token_ids)
            for prompt, token_ids in zip(prompts, tokens, strict=True)
        ]
        prompt_texts = None
        if self._rewards.needs_prompts:
            prompt_texts = decode(
                [prompt.token_ids for prompt in prompts], skip_special_tokens=True
            )
        self._unsubmitted.clear()
        self._numbers += numbers
        episodes = [self.episodes.pop(number, None) for number in numbers]
        self._rewards.submit(
            prompts, texts, self._training, prompt_texts, self._pending, episodes, special
        )

    def select(self, numbers: Sequence[int]) -> None:
        """Number these responses 0, 1, ... in this order. No other response has been or may be
        submitted."""
        new = {number: i for i, number in enumerate(numbers)}
        self._prompts = [self._prompts[number] for number in numbers]
        self._numbers = [new[number] for number in self._numbers]
        self._unsubmitted = {new[number]: tokens for number, tokens in self._unsubmitted.items()}
        self.episodes = {
            new[number]: self.episodes[number] for number in self.episodes.keys() & new.keys()
        }

    def collect(self) -> list[Score]:
        """Return the scores of all responses on every rank. Raise UserError on all ranks if a
        response on any cannot be scored. Every rank must call it; a second time any may."""
        if self._scores is not None:
            return self._scores
        count(responses=len(self._numbers))

        def result() -> dict[int, Score]:
            start = time.perf_counter()
            local = self._pending.result()
            count(reward_seconds=time.perf_counter() - start)
            return dict(zip(self._numbers, local, strict=True))

        by_number: dict[int, Score] = {}
        for part in gather_results(result):
            by_number |= part
        assert len(by_number) == len(self._prompts), (
            f"{len(by_number)} scores of {len(self._prompts)} responses"
        )
        self._scores = self._pending.names.limit(
            [by_number[number] for number in range(len(self._prompts))]
        )
        return self._scores

    def hidden_seconds(self) -> float:
        """Return the seconds since the first submission, or up to the last score, in which the rank
        did other work."""
        return self._pending.seconds_until(time.perf_counter())


class GroupScores:
    """The scores of groups when a step trains on some of them. A response waits until the step is
    certain to train on its group: each trained response is scored exactly once. Each ended response
    is on one rank."""

    def __init__(self, stream: ScoreStream, n: int, first: int = 0) -> None:
        """n: responses of a group. stream: response i of group g has number first + g * n + i."""
        self._stream = stream
        self._n = n
        self._first = first
        self._waiting: dict[int, dict[int, Sequence[int]]] = defaultdict(dict)

    def add(
        self, group: int, response: int, token_ids: Sequence[int], episode: Episode | None = None
    ) -> None:
        """Add a response that has ended. episode: what its environment gave."""
        number = self._first + group * self._n + response
        self._waiting[group][number] = token_ids
        if episode is not None:
            self._stream.episodes[number] = episode

    def submit(self, is_taken: np.ndarray) -> None:
        """Submit the waiting responses of taken groups to this rank's workers. is_taken: [groups]
        bool."""
        ready: dict[int, Sequence[int]] = {}
        for group in sorted(self._waiting.keys() & set(np.flatnonzero(is_taken).tolist())):
            ready |= self._waiting.pop(group)
        self._stream.submit(ready, others_follow=True)
