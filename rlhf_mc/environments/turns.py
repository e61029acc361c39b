"""Responses of several turns: the conversations of one call of the engines. A turn that has ended goes to the
environment. The observation's tokens are appended, and the engine continues the response as it continues one of
rollout.partial_rollout: tokens depend on seed and position, not on when an observation comes.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

from rlhf_mc.config.errors import UserError
from rlhf_mc.data.batch import Generation, Prompt
from rlhf_mc.environments.conversation import Conversation, ConversationState, Status
from rlhf_mc.environments.environment_worker import Key
from rlhf_mc.environments.journal import END, Reply
from rlhf_mc.environments.protocol import StepResult
from rlhf_mc.rewards.results import Episode, Failure, FailureKind
from rlhf_mc.rollout.base import Arrivals, Request
from rlhf_mc.topology.consensus import gather_objects

if TYPE_CHECKING:
    from rlhf_mc.environments.environment_manager import EnvironmentManager

_IDLE_SECONDS = 0.01
"""Longest time that an engine with nothing else to do waits for an answer, before it looks after other ranks."""


class Conversations:
    """The conversations of one call of the engines: rollout/base.py has the interface, Turns."""

    def __init__(
        self,
        environments: EnvironmentManager,
        call: int,
        keys: Sequence[Key],
        requests: Sequence[Request],
        prompts: Sequence[Prompt],
        kept: Mapping[int, ConversationState] | None,
    ) -> None:
        """call: of the step. keys: of each conversation. Other arguments as of EnvironmentManager.begin."""
        self._run = environments
        self._call = call
        self._keeps = kept is not None
        self._kept = {} if kept is None else kept
        self.homes: Mapping[int, int] = {number: state.engine for number, state in self._kept.items()}
        new = Episode([], {}, {}, None, environments.cfg.default_score)
        self._all = [
            Conversation(key, prompt, request, self._kept[i].episode if i in self._kept else new, request.begun)
            for i, (key, prompt, request) in enumerate(zip(keys, prompts, requests, strict=True))
        ]
        self.requests = [self._request(one) for one in self._all]
        """The first turn of each conversation."""
        self._waiting: dict[int, Conversation] = {}
        """Those of this rank's engine that wait for an answer in this call."""
        self._iteration = 0
        """Calls of `arrived`: the time of the journal, which does not depend on seconds."""
        recorded = environments.journal.of_call(call)
        self._last_recorded = max((reply.at for reply in recorded.values()), default=0)
        self._num_untaken = sum(place[1] != END for place in recorded) if dist.get_rank() == 0 else 0
        self._problem: str | None = None

    @property
    def num_waiting(self) -> int:
        """Number of conversations that wait for their environment."""
        return len(self._waiting)

    @property
    def waiting(self) -> dict[int, Generation]:
        """The responses of this rank's engine that wait for an environment after the call, by number."""
        return {i: one.response for i, one in enumerate(self._all) if one.status is Status.WAITS}

    def episode(self, number: int) -> Episode:
        """Return what the environment has given the conversation of this number."""
        return self._all[number].episode

    def start(self, requests: Sequence[Request]) -> list[Request]:
        """Begin conversations, or continue those of earlier calls. Return those in which the model draws."""
        for number in (request.number for request in requests):
            self._all[number].status = Status.DRAWS
            if self._is_before_first(self._all[number]) or (number in self._kept and self._kept[number].waits):
                self._wait(number)
        return [request for request in requests if self._all[request.number].status is Status.DRAWS]

    def submit(self, ended: Mapping[int, Generation]) -> None:
        """Send turns that have ended to their environments."""
        for number, response in ended.items():
            one = self._all[number]
            one.response = response
            one.is_cached = True
            if response.finished or len(response.token_ids) == self._turn_limit(one):
                self._wait(number)
            else:
                one.is_cut = True

    def arrived(self, is_idle: bool) -> Arrivals:
        """Return what has arrived. is_idle: the engine has nothing else to do for a moment."""
        self._iteration += 1
        recorded = {number: one.recorded for number, one in self._waiting.items() if one.recorded is not None}
        replies = {number: reply for number, reply in recorded.items() if reply.at <= self._iteration}
        # While the journal has later answers in this call, it knows when the others have been answered, or that they
        # have not: these are not sent yet.
        if self._iteration > self._last_recorded and (others := self._waiting.keys() - recorded.keys()):
            replies |= self._run.on_all_ranks(self._answers(others, is_idle))
        requests = []
        ended = {}
        num_cached = 0
        for number, reply in sorted(replies.items()):
            one = self._waiting.pop(number)
            turn = one.response
            one.append(reply)
            if reply.ends:
                one.status = Status.ENDED
                has_room = turn.finished or len(turn.token_ids) < self._run.max_response_length
                ended[number] = replace(one.response, finished=has_room and not reply.token_ids)
                self._run.end(one.key)
                continue
            one.status = Status.DRAWS
            request = self._request(one)
            if request.max_tokens == len(one.response.token_ids):
                one.is_cut = True
                continue
            requests.append(request)
            num_cached += one.is_cached * (len(request.prompt) + len(turn.token_ids))
        return Arrivals(requests, num_cached, ended)

    def abort(self) -> dict[int, Generation]:
        """End the environments, unless a later call continues the conversations. Return those that wait."""
        for one in () if self._keeps else self._all:
            self._run.end(one.key)
        return {**self.waiting, **{i: one.response for i, one in enumerate(self._all) if one.is_cut}}

    def finish(self) -> None:
        """Record the end of the call. Raise UserError, on all ranks, if the conversations are not those of the run that
        is replayed. Every rank must call it."""
        if not self._run.journal.is_replay:
            self._run.journal.record({((self._call, END, self._run.engine), 0): Reply(self._iteration)})
            return
        problems, nums_untaken = zip(*gather_objects((self._problem, self._num_untaken)), strict=True)
        problem = next(filter(None, problems), None)
        if problem is None and (num := sum(nums_untaken)) > 0:
            problem = f"the journal has {num} observations for conversations that do not wait for them"
        if problem is not None:
            raise UserError(f"trainer.replay: {problem}: are model, data, settings and versions those of that run?")

    def states(self) -> dict[int, ConversationState]:
        """Return the state of each conversation that the call has begun, by the request's number. Every rank must call
        it after the call."""
        own = {
            i: ConversationState(self._run.engine, one.status is Status.WAITS, one.status is Status.ENDED, one.episode)
            for i, one in enumerate(self._all)
            if one.status is not Status.NOT_HERE
        }
        return {number: state for part in gather_objects(own) for number, state in part.items()}

    def _is_before_first(self, one: Conversation) -> bool:
        """Return whether the environment is to give the conversation its first observation."""
        return self._run.cfg.first_observation and not one.episode.rewards

    def _turn_limit(self, one: Conversation) -> int:
        return one.turn_limit(self._run.max_response_length, self._run.cfg.max_tokens_per_turn)

    def _request(self, one: Conversation) -> Request:
        """Return the request of the present turn."""
        limit = self._turn_limit(one)
        most = one.whole.max_tokens
        return replace(one.whole, begun=one.response, max_tokens=limit if most is None else min(limit, most))

    def _wait(self, number: int) -> None:
        """Let a conversation wait for its environment, or for the journal's answer."""
        one = self._all[number]
        one.status = Status.WAITS
        one.is_sent = False
        journal = self._run.journal
        place = (self._call, one.key[1], len(one.episode.rewards))
        tokens = np.concatenate([one.whole.prompt, np.array(one.response.token_ids, np.int32)])
        one.place = place, zlib.crc32(tokens.tobytes())
        replies = journal.at(place)
        recorded = replies.get(one.place[1])
        limit = self._run.max_response_length
        fits = recorded is None or len(one.response.token_ids) + len(recorded.token_ids) <= limit
        one.recorded = recorded if fits else None
        if one.recorded is not None:
            self._num_untaken -= self._run.is_mine(one.key)
        elif journal.is_replay and replies:
            where = f"{one.prompt.where}, turn {place[2] + 1}"
            no_room = f"data.max_response_length {limit} has no room for the observation"
            self._problem = f"step {journal.step}, {where}: {'the runs have drawn other tokens' if fits else no_room}"
            one.recorded = Reply(0)
        elif journal.is_replay and one.whole.max_tokens is not None:
            one.is_cut = True
            return
        self._waiting[number] = one

    def _send(self, one: Conversation) -> None:
        """Send the first turn that the environment has not got."""
        one.is_sent = True
        has_room = len(one.response.token_ids) < self._run.max_response_length
        self._run.send(one.key, one.prompt, one.turns, has_room)

    def _answers(self, numbers: Set[int], is_idle: bool) -> dict[int, Reply]:
        """Return, and record, the answers of this rank's environments to these conversations."""
        numbers_by_key = {one.key: number for number in numbers if self._run.is_mine((one := self._all[number]).key)}
        for number in numbers_by_key.values():
            if not self._all[number].is_sent:
                self._send(self._all[number])
        replies = {}
        for key, answer in self._run.take(numbers_by_key.keys(), _IDLE_SECONDS if is_idle else 0.0).items():
            one = self._all[numbers_by_key[key]]
            turns = one.turns
            if answer is None or (sent := self._run.sent[key]) < len(turns):  # the environment is begun again
                if answer is not None:
                    self._compare(one, sent - 1, turns[sent - 1], answer)
                self._send(one)
            else:
                replies[numbers_by_key[key]] = self._reply(one, turns[-1], answer)
        self._run.journal.record({self._all[number].place: reply for number, reply in replies.items()})
        return replies

    def _reply(self, one: Conversation, turn: Sequence[int], answer: StepResult | Failure) -> Reply:
        """Return an environment's answer to a turn as a reply, with the default observation for a failure."""
        cfg = self._run.cfg
        failed: list[FailureKind] = []
        is_fatal = False
        tokens: list[int] = []
        if not isinstance(answer, Failure):
            try:
                tokens = self._tokens(one, turn, answer)
                failed += [failure.kind for failure in answer.failures]
                for failure in answer.failures:
                    self._run.report(one.prompt, failure.problem, "continues with it")
            except Failure as problem:
                answer = problem
        is_first = self._is_before_first(one)  # a conversation does not end without a turn of the model
        if isinstance(answer, Failure):
            failed.append(answer.kind)
            is_fatal = not is_first and cfg.default_observation is None
            what = f"scores {cfg.default_score:g}" if is_fatal else "continues with default_observation"
            if is_first and cfg.default_observation is None:
                what = "begins without a first observation"
            self._run.report(one.prompt, answer.problem, what)
            tokens = [] if is_fatal else self._run.observations.default_tokens(answer.problem)
            answer = StepResult("", 0.0, is_fatal, {})
        room = self._run.max_response_length - len(one.response.token_ids) - is_first
        is_last = answer.done or (not is_first and one.episode.num_turns + 1 >= cfg.max_turns)
        # An observation that does not fit is cut: the response is then truncated, as one of a single turn is.
        tokens = [] if is_last else tokens[:room]
        ends = is_last or (not is_first and len(tokens) == room)
        return Reply(self._iteration, tokens, answer.reward, {**answer.info}, ends, failed, is_fatal)

    def _compare(self, one: Conversation, index: int, turn: Sequence[int], answer: StepResult | Failure) -> None:
        """Warn if an environment that is begun again answers an earlier turn otherwise than before."""
        places = one.places
        start = places[index][-1] + 1 if places[index] else 0
        wanted = one.response.token_ids[start : places[index + 1][0]]
        is_same = bool(one.episode.failed_calls)
        if not isinstance(answer, Failure):
            with contextlib.suppress(Failure):
                is_same = (self._tokens(one, turn, answer), answer.reward) == (wanted, one.episode.rewards[index][1])
        if not is_same:
            problem = f"begun again, it answers turn {index + 1} otherwise than before"
            self._run.report(one.prompt, problem, "continues with the earlier answer")

    def _tokens(self, one: Conversation, turn: Sequence[int], answer: StepResult) -> list[int]:
        """Return the tokens of an observation; none after the last turn."""
        if answer.done:
            return []
        tokens = self._run.observations.tokens(answer.observation, turn, one.prompt.messages)
        if turn and not one.episode.rewards:
            text = self._run.tokenizer.decode(turn, skip_special_tokens=True)
            self._run.observations.check(one.prompt.messages, text, answer.observation, tokens)
        return tokens
