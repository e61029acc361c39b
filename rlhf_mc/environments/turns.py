"""Responses of several turns: the conversations of one call of the engines, and their environments. A turn that has
ended goes to the environment. The observation's tokens are appended, and the engine continues the response as it
continues one of rollout.partial_rollout: tokens depend on seed and position, not on when an observation comes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlhf_mc.config.data_schema import DataConfig
from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.data.batch import OBSERVED, Generation, Prompt
from rlhf_mc.environments.environment_worker import Turn
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


class Environments:
    """The environments of a run: what all calls of the engines share."""

    def __init__(
        self,
        cfg: EnvironmentConfig,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
    ) -> None:
        """Raise UserError if the user's file cannot be used."""
        self.cfg = cfg
        self.max_response_length = data.max_response_length
        self.tokenizer = tokenizer
        self.pool = EnvironmentPool(cfg)
        tools = self.pool.tool_schemas
        self.template_arguments = data.apply_chat_template_kwargs | ({"tools": tools} if tools else {})
        """Of the chat template, for prompts and observations."""
        self.observations = ObservationTokenizer(tokenizer, stop_token_ids, self.template_arguments)
        self.parser = _parser(cfg, tokenizer, stop_token_ids, tools) if tools else None
        self._calls = itertools.count()
        self._num_failed = 0
        self._group: dist.ProcessGroup | None = None
        self._ranks: Sequence[int] = ()

    def connect(self, engines: Sequence[Sequence[int]]) -> None:
        """Make a process group of the ranks of each engine that has several. Every rank must call it."""
        for ranks in engines:
            group = dist.new_group(list(ranks), backend="gloo") if len(ranks) > 1 else None
            if dist.get_rank() in ranks:
                self._ranks = ranks
                self._group = group

    def begin(self, requests: Sequence[Request], prompts: Sequence[Prompt]) -> Conversations:
        """Return the conversations of a call of the engines. prompts: of each request."""
        return Conversations(self, next(self._calls), requests, prompts)

    def is_mine(self, number: int) -> bool:
        """Return whether this rank has the environment of its engine's conversation."""
        return self._ranks[number % len(self._ranks)] == dist.get_rank()

    def on_all_ranks(self, replies: dict[int, _Reply]) -> dict[int, _Reply]:
        """Return the replies of all ranks of the engine, by the request's number."""
        if self._group is None:
            return replies
        return {number: reply for part in gather_objects(replies, self._group) for number, reply in part.items()}

    def report(self, prompt: Prompt, failure: Failure, what: str) -> None:
        """Warn that an environment has failed. what: becomes of the conversation."""
        self._num_failed += 1
        if self._num_failed <= _MOST_REPORTED or self._num_failed % 100 == 0:
            print_line(
                f"warning: {where(self.cfg)}: {prompt.where}: {failure.problem}; the conversation {what}"
                f" ({self._num_failed} such calls so far on this rank)"
            )

    def close(self) -> None:
        """End the worker processes."""
        self.pool.close()


@dataclass(frozen=True)
class _Reply:
    """The observation for a conversation."""

    token_ids: Sequence[int]
    ends: bool
    """The conversation has ended."""


@dataclass
class _Conversation:
    """A conversation whose environment this rank has."""

    start: int
    """Tokens of the response before the present turn."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    info: dict[str, float] = field(default_factory=dict)
    failed_calls: Counter[FailureKind] = field(default_factory=Counter)


class Conversations:
    """The conversations of one call of the engines: rollout/base.py has the interface, Turns."""

    def __init__(
        self, environments: Environments, call: int, requests: Sequence[Request], prompts: Sequence[Prompt]
    ) -> None:
        self._run = environments
        self._call = call
        self._prompts = prompts
        self._whole = requests
        self.requests = [self._limited(request) for request in requests]
        """The first turn of each conversation."""
        self.episodes: dict[int, Episode] = {}
        """Of the conversations that have ended, whose environment this rank has."""
        self._waiting: dict[int, Generation] = {}
        self._own: dict[int, _Conversation] = {}

    @property
    def num_waiting(self) -> int:
        """Number of conversations that wait for their environment."""
        return len(self._waiting)

    def submit(self, ended: Mapping[int, Generation]) -> None:
        """Send turns that have ended to their environments."""
        self._waiting |= ended
        for number, one in ended.items():
            if not self._run.is_mine(number):
                continue
            is_first = number not in self._own
            self._own.setdefault(number, _Conversation(len(self.requests[number].begun.token_ids)))
            turn = one.token_ids[self._own[number].start :]
            text = self._run.tokenizer.decode(turn, skip_special_tokens=True)
            row = _row(self._prompts[number]) if is_first else None
            has_room = len(one.token_ids) < self._run.max_response_length
            calls = self._run.parser.calls(turn) if self._run.parser is not None and has_room else ()
            tool_calls = [ToolCall(*call) for call in calls]
            self._run.pool.submit(Turn((self._call, number), row, text, turn, tool_calls))

    def arrived(self, is_idle: bool) -> Arrivals:
        """Return what has arrived. is_idle: the engine has nothing else to do for a moment."""
        if not self._waiting:
            return Arrivals()
        replies = {}
        for (call, number), answer in self._run.pool.take(_IDLE_SECONDS if is_idle else 0.0).items():
            if call == self._call and number in self._waiting:  # not of a call that has ended
                replies[number] = self._reply(number, answer)
        requests = []
        ended = {}
        num_cached = 0
        for number, reply in sorted(self._run.on_all_ranks(replies).items()):
            turn = self._waiting.pop(number)
            begun = _observed(turn, reply.token_ids)
            if reply.ends:
                has_room = turn.finished or len(turn.token_ids) < self._run.max_response_length
                ended[number] = replace(begun, finished=has_room and not reply.token_ids)
                continue
            requests.append(self._limited(replace(self._whole[number], begun=begun)))
            num_cached += len(self.requests[number].prompt) + len(turn.token_ids)
        return Arrivals(requests, num_cached, ended)

    def abort(self) -> dict[int, Generation]:
        """End all environments. Return the conversations that wait, as they were before the call: their last turn may
        have ended with the response's last token, and has no reward yet."""
        for number in self._own:
            self._run.pool.end((self._call, number))
        return {number: self.requests[number].begun for number in self._waiting}

    def _limited(self, request: Request) -> Request:
        """Return the request of a turn."""
        limit = self._run.max_response_length if request.max_tokens is None else request.max_tokens
        per_turn = self._run.cfg.max_tokens_per_turn
        if per_turn is not None:
            limit = min(limit, len(request.begun.token_ids) + per_turn)
        return replace(request, max_tokens=limit)

    def _reply(self, number: int, answer: StepResult | Failure) -> _Reply:
        """Record an environment's answer. Return the observation, and whether the conversation has ended."""
        own = self._own[number]
        cfg = self._run.cfg
        turn = self._waiting[number]
        failure: Failure | None = None
        tokens: list[int] = []
        if not isinstance(answer, Failure):
            try:
                tokens = self._tokens(number, answer)
                own.info |= answer.info
                own.failed_calls.update(one.kind for one in answer.failures)
                for one in answer.failures:
                    self._run.report(self._prompts[number], one, "continues with it")
            except Failure as problem:
                answer = problem
        if isinstance(answer, Failure):
            own.failed_calls[answer.kind] += 1
            if cfg.default_observation is None or not self._run.pool.has((self._call, number)):
                failure = answer
            ends = failure is not None
            what = f"scores {cfg.default_score:g}" if ends else "continues with default_observation"
            self._run.report(self._prompts[number], answer, what)
            text = truncated((cfg.default_observation or "").replace("{error}", answer.problem), cfg)
            answer = StepResult(text, 0.0, failure is not None, {})
            tokens = self._tokens(number, answer)
        own.rewards.append((turn.num_drawn - 1, answer.reward))
        room = self._run.max_response_length - len(turn.token_ids)
        is_last = answer.done or len(own.rewards) >= cfg.max_turns
        # An observation that does not fit is cut: the response is then truncated, as one of a single turn is.
        tokens = [] if is_last else tokens[:room]
        own.start = len(turn.token_ids) + len(tokens)
        ends = is_last or len(tokens) == room
        if ends:
            rewards = own.rewards if failure is None else [(place, 0.0) for place, _ in own.rewards]
            kind = None if failure is None else failure.kind
            self.episodes[number] = Episode(rewards, own.info, own.failed_calls, kind, cfg.default_score)
            self._run.pool.end((self._call, number))
            del self._own[number]
        return _Reply(tokens, ends)

    def _tokens(self, number: int, answer: StepResult) -> list[int]:
        """Return the tokens of an observation; none after the last turn."""
        if answer.done:
            return []
        turn = self._waiting[number].token_ids[self._own[number].start :]
        tokens = self._run.observations.tokens(answer.observation, turn)
        if not self._own[number].rewards:
            text = self._run.tokenizer.decode(turn, skip_special_tokens=True)
            self._run.observations.check(self._prompts[number].messages, text, answer.observation, tokens)
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


def _observed(turn: Generation, tokens: Sequence[int]) -> Generation:
    """Return the response with an observation appended."""
    return replace(
        turn,
        token_ids=[*turn.token_ids, *tokens],
        log_probs=[*turn.log_probs, *[OBSERVED] * len(tokens)],
        finished=False,
    )
