"""Responses of several turns: the conversations of one call of the engines, and their environments. A turn that has
ended goes to the environment. The observation's tokens are appended, and the engine continues the response as it
continues one of rollout.partial_rollout: tokens depend on seed and position, not on when an observation comes.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlhf_mc.config.data_schema import DataConfig
from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.data.batch import Generation, Prompt
from rlhf_mc.environments.conversation import Conversation, ConversationState, Status
from rlhf_mc.environments.environment_worker import Key, Turn
from rlhf_mc.environments.journal import END, ObservationJournal, Reply
from rlhf_mc.environments.pool import EnvironmentPool
from rlhf_mc.environments.protocol import StepResult, ToolCall, truncated, where
from rlhf_mc.environments.template import ObservationTokenizer
from rlhf_mc.rewards.results import Episode, Failure, FailureKind
from rlhf_mc.rollout.base import Arrivals, Request
from rlhf_mc.runtime.console import print_line
from rlhf_mc.topology.consensus import gather_objects

if TYPE_CHECKING:
    from rlhf_mc.rollout.vllm_tools import ToolCallParser

_IDLE_SECONDS = 0.01
"""Longest time that an engine with nothing else to do waits for an answer, before it looks after other ranks."""
_MOST_REPORTED = 5
"""Failed calls that each rank reports; after them it reports every hundredth."""
_KEPT = -1
"""In place of the call in the key of a conversation that several calls may continue."""


class Environments:
    """The environments of a run: what all calls of the engines share."""

    def __init__(
        self,
        cfg: EnvironmentConfig,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
        journal: ObservationJournal,
    ) -> None:
        """Raise UserError if the user's file cannot be used."""
        self.cfg = cfg
        self.journal = journal
        self.max_response_length = data.max_response_length
        self.tokenizer = tokenizer
        self.pool = EnvironmentPool(cfg)
        tools = self.pool.tool_schemas
        arguments = data.apply_chat_template_kwargs | ({"tools": tools} if tools else {})
        self.prompt_arguments = arguments | ({"add_generation_prompt": False} if cfg.first_observation else {})
        """Of the chat template, for prompts."""
        self.observations = ObservationTokenizer(tokenizer, stop_token_ids, arguments)
        self.parser = _parser(cfg, tokenizer, stop_token_ids, tools) if tools else None
        self.sent: dict[Key, int] = {}
        """Of each conversation whose environment this rank has, the turns that it has got."""
        self._pending: set[Key] = set()
        """Those whose environment has not answered the last one, or whose answer no conversation has got."""
        self._answers: dict[Key, StepResult | Failure | None] = {}
        """Answers that no conversation has got; None: the environment is to begin again."""
        self._left_out: dict[Key, set[int]] = defaultdict(set)
        """The turns that have ended their worker process: an environment that is begun again does not get them."""
        self.engine = 0
        """The engine of this rank."""
        self._num_calls = itertools.count()
        self._calls_of_step = itertools.count()
        self._num_reported = 0
        self._group: dist.ProcessGroup | None = None
        self._ranks: Sequence[int] = ()

    def connect(self, engines: Sequence[Sequence[int]]) -> None:
        """Make a process group of the ranks of each engine that has several. Every rank must call it."""
        for number, ranks in enumerate(engines):
            group = dist.new_group(list(ranks), backend="gloo") if len(ranks) > 1 else None
            if dist.get_rank() in ranks:
                self.engine = number
                self._ranks = ranks
                self._group = group

    def begin_step(self, step: int) -> None:
        """Begin a step, in which the journal names the calls of the engines by their order."""
        self.journal.begin_step(step)
        self._calls_of_step = itertools.count()

    def begin(
        self,
        requests: Sequence[Request],
        prompts: Sequence[Prompt],
        names: Sequence[int] | None = None,
        kept: Mapping[int, ConversationState] | None = None,
    ) -> Conversations:
        """Return the conversations of a call of the engines. prompts: of each request. names: the numbers of the
        conversations in the run; None: they have none. kept: where a later call may continue them, the states of those
        that earlier calls have begun, by the request's number; None: they end with the call. Every rank must call
        it."""
        self.journal.load()
        names = range(len(requests)) if names is None else names
        call = next(self._num_calls) if kept is None else _KEPT
        if kept is not None:
            self.end_kept(set(names))
        return Conversations(self, next(self._calls_of_step), [(call, name) for name in names], requests, prompts, kept)

    def end_kept(self, but: Set[int] = frozenset()) -> None:
        """End the environments that earlier calls have kept, but those of the conversations of these names."""
        for call, name in list(self.sent):
            if call == _KEPT and name not in but:
                self.end((call, name))

    def is_mine(self, key: Key) -> bool:
        """Return whether this rank has the environment of its engine's conversation."""
        return self._ranks[key[1] % len(self._ranks)] == dist.get_rank()

    def send(self, key: Key, prompt: Prompt, turns: Sequence[list[int]], has_room: bool) -> None:
        """Send the first of a conversation's turns that the environment has not got, unless it is to answer another one
        before. has_room: the response may continue after the last turn."""
        if key in self._pending:
            return
        first = self.sent.get(key, 0) if self.pool.has(key) else 0
        sent = next(turn for turn in itertools.count(first) if turn not in self._left_out.get(key, ()))
        if sent == len(turns):
            return
        self.sent[key] = sent + 1
        self._pending.add(key)
        text = self.tokenizer.decode(turns[sent], skip_special_tokens=True)
        parser = self.parser if has_room or sent + 1 < len(turns) else None
        calls = [] if parser is None else [ToolCall(*call) for call in parser.calls(turns[sent])]
        begins = first == 0 and (sent == 0 or not self.cfg.first_observation)
        self.pool.submit(Turn(key, _row(prompt) if begins else None, text, turns[sent], calls))

    def take(self, keys: Set[Key], seconds: float) -> dict[Key, StepResult | Failure | None]:
        """Return the answers that have come for these conversations, None for an environment that is to begin again.
        Without any, wait for at most `seconds`."""
        arrived = self.pool.take(0.0 if keys & self._answers.keys() else seconds)
        for key in self._pending & arrived.keys():
            self._answers[key] = arrived[key]
            if arrived[key] is None:
                self.sent[key] = 0
            elif not self.pool.has(key):
                self._left_out[key].add(self.sent[key] - 1)
        taken = {key: self._answers.pop(key) for key in keys & self._answers.keys()}
        self._pending -= taken.keys()
        return taken

    def end(self, key: Key) -> None:
        """Close the environment of a conversation, if this rank has it."""
        if self.sent.pop(key, None) is not None:
            self._pending.discard(key)
            self._answers.pop(key, None)
            self._left_out.pop(key, None)
            self.pool.end(key)

    def on_all_ranks(self, replies: dict[int, Reply]) -> dict[int, Reply]:
        """Return the replies of all ranks of the engine, by the request's number."""
        if self._group is None:
            return replies
        return {number: reply for part in gather_objects(replies, self._group) for number, reply in part.items()}

    def report(self, prompt: Prompt, problem: str, what: str) -> None:
        """Warn of an environment's answer. what: becomes of the conversation."""
        self._num_reported += 1
        if self._num_reported <= _MOST_REPORTED or self._num_reported % 100 == 0:
            print_line(
                f"warning: {where(self.cfg)}: {prompt.where}: {problem}; the conversation {what}"
                f" ({self._num_reported} such calls so far on this rank)"
            )

    def close(self) -> None:
        """End the worker processes."""
        self.pool.close()


class Conversations:
    """The conversations of one call of the engines: rollout/base.py has the interface, Turns."""

    def __init__(
        self,
        environments: Environments,
        call: int,
        keys: Sequence[Key],
        requests: Sequence[Request],
        prompts: Sequence[Prompt],
        kept: Mapping[int, ConversationState] | None,
    ) -> None:
        """call: of the step. keys: of each conversation. Other arguments as of Environments.begin."""
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
        one.recorded = replies.get(one.place[1])
        if one.recorded is not None:
            self._num_untaken -= self._run.is_mine(one.key)
        elif journal.is_replay and replies:
            where = f"{one.prompt.where}, turn {place[2] + 1}"
            self._problem = f"step {journal.step}, {where}: the runs have drawn other tokens"
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
            text = truncated((cfg.default_observation or "").replace("{error}", answer.problem), cfg)
            answer = StepResult(text, 0.0, is_fatal, {})
            tokens = self._tokens(one, turn, answer)
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


def _parser(
    cfg: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int], tools: Sequence[Any]
) -> ToolCallParser:
    """Return the parser of tool calls. Raise UserError if vLLM is not installed or has none of this format."""
    try:
        from rlhf_mc.rollout.vllm_tools import ToolCallParser
    except ImportError as error:
        raise UserError(
            f"rollout.environment.format {cfg.format}: vLLM's parsers cannot be imported ({error})"
        ) from error
    return ToolCallParser(cfg.format, tokenizer, stop_token_ids, tools)


def _row(prompt: Prompt) -> dict[str, object]:
    """Return the row of the dataset, as an environment gets it."""
    return {
        "prompt": [dict(message) for message in prompt.messages],
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": dict(prompt.extra_info),
        "agent_name": prompt.agent_name,
    }
