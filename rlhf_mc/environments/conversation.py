"""One conversation with an environment, as a state machine: SAMPLING -> WAITING -> SAMPLING -> ...
-> ENDED. What it keeps between two calls of the engines is a ConversationState.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import msgspec
import numpy as np

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.data.batch import CONTEXT_START, OBSERVED, Generation, Prompt
from rlhf_mc.environments.environment_worker import Key
from rlhf_mc.environments.journal import Reply
from rlhf_mc.rewards.results import Episode
from rlhf_mc.rollout.base import Request


class Status(Enum):
    """State of a conversation in a call of the engines, the same on all ranks of its engine."""

    ELSEWHERE = 0
    """Not started in this call, or on another engine."""
    SAMPLING = 1
    """The engine samples a turn."""
    SUSPENDED = 2
    """Unfinished turn, left to a later call: the replayed call ended here."""
    WAITING = 3
    """Turn sent, answer awaited."""
    UNANSWERED = 4
    """Turn sent, answer left to a later call: the replayed call ended here."""
    ENDED = 5


@dataclass(frozen=True)
class ConversationState:
    """A conversation after a call of the engines, without its tokens. With rollout.partial_rollout
    a later call continues it, on any rank."""

    engine: int
    """Engine that ran the conversation."""
    waits: bool
    """Last turn sent, not answered yet."""
    ended: bool
    episode: Episode
    """Rewards and numbers up to the last answer."""

    @staticmethod
    def from_dict(row: Mapping[str, Any], length: int) -> ConversationState:
        """Return the state of a dict of asdict. length: of the response, in tokens. Raise
        ValueError for another dict."""
        try:
            state = msgspec.convert(row, ConversationState)
        except msgspec.ValidationError as error:
            raise ValueError(f"conversations: {error}") from error
        episode = state.episode
        turn_ends = [-1, *(position for position, _ in episode.rewards), length]
        bounds = [0, *itertools.chain(*episode.observations), length]
        rewards = [reward for _, reward in episode.rewards]
        is_sound = (
            (state.engine >= 0 and all(count >= 0 for count in episode.failed_calls.values()))
            and (episode.max_tokens is None or episode.max_tokens > 0)
            and (turn_ends == sorted(turn_ends) and bounds == sorted(bounds))
            and {*episode.contexts} <= {*range(len(episode.observations))}
            and all(map(math.isfinite, [*rewards, *episode.info.values(), episode.default_score]))
        )
        if not is_sound:
            raise ValueError(f"conversations: a state is {repr(row)[:80]}")
        return state


@dataclass(eq=False)
class Conversation:
    """A conversation in one call of the engines."""

    cfg: EnvironmentConfig
    max_response_length: int
    key: Key
    prompt: Prompt
    whole_request: Request
    """Request with the limit of the whole response."""
    episode: Episode
    """Rewards and numbers up to the last answer; of earlier calls only, if another engine has the
    conversation."""
    response: Generation
    """Response up to the last complete turn or observation."""
    status: Status = Status.ELSEWHERE
    num_cached: int = 0
    """Tokens in the engine's KV cache."""

    def start(self, waits: bool) -> None:
        """Begin, or continue an earlier call's conversation. waits: its last turn is not
        answered."""
        has_turn = waits or self.is_before_first
        self.status = Status.WAITING if has_turn else Status.SAMPLING

    def stop(self, response: Generation) -> None:
        """Store the response at which the engine stopped: at the turn's end, or at the call's
        limit."""
        assert self.status is Status.SAMPLING, self.status
        self.response = response
        self.num_cached = replace(self.whole_request, partial=response).num_tokens
        is_complete = response.finished or len(response.token_ids) == self.turn_limit
        self.status = Status.WAITING if is_complete else Status.SUSPENDED

    def postpone_answer(self) -> None:
        """Leave the answer to a later call."""
        assert self.status is Status.WAITING, self.status
        self.status = Status.UNANSWERED

    def answer(self, reply: Reply) -> None:
        """Append the answer. The conversation continues with a turn if the response has room for
        it, else it ends."""
        assert self.status is Status.WAITING, self.status
        turn = self.response
        self._append(reply)
        self.status = Status.SAMPLING
        if reply.ends:
            has_room = turn.finished or len(turn.token_ids) < self.max_response_length
            is_cut = bool(reply.token_ids) or reply.is_context
            self.response = replace(self.response, finished=has_room and not is_cut)
            self.status = Status.ENDED
        elif self.request.max_tokens == len(self.response.token_ids):
            self.status = Status.SUSPENDED

    def state(self, engine: int) -> ConversationState:
        """Return the state after the call. engine: of this rank."""
        waits = self.status in (Status.WAITING, Status.UNANSWERED)
        return ConversationState(engine, waits, self.status is Status.ENDED, self.episode)

    @property
    def request(self) -> Request:
        """The request of the present turn."""
        most = self.whole_request.max_tokens
        limit = self.turn_limit if most is None else min(self.turn_limit, most)
        # a draw depends on the seed and on the place in the context
        seed = (self.whole_request.seed + self.response.context_start()) % 2**63
        return replace(self.whole_request, seed=seed, partial=self.response, max_tokens=limit)

    def context(self, turn: int) -> list[int]:
        """Return the tokens of a turn's context, up to its end."""
        end = max(self.turn_positions[turn], default=-1) + 1
        return replace(self.whole_request, partial=self.response).tokens(end)

    @property
    def is_before_first(self) -> bool:
        """True until the environment has given its first observation, which precedes the model's
        first turn."""
        return self.cfg.begins and not self.episode.rewards

    @property
    def room(self) -> int:
        """Tokens that fit into the response."""
        return self.max_response_length - len(self.response.token_ids)

    @property
    def turn_limit(self) -> int:
        """Maximum length of the response in the present turn."""
        limits = [*filter(None, (self.cfg.max_tokens_per_turn, self.episode.max_tokens))]
        if not limits:
            return self.max_response_length
        turn = self.turn_positions[-1]
        start = turn[0] if turn else len(self.response.token_ids)
        return min(self.max_response_length, start + min(limits))

    @property
    def turn_positions(self) -> list[list[int]]:
        """Positions in the response of the sampled tokens of each turn, the present turn last."""
        log_probs = self.response.log_probs
        sampled = [i for i, log_prob in enumerate(log_probs) if not log_prob >= CONTEXT_START]
        bounds = [0, *(last + 1 for last, _ in self.episode.rewards), len(sampled)]
        return [sampled[start:end] for start, end in itertools.pairwise(bounds)]

    @property
    def turns(self) -> list[list[int]]:
        """Sampled tokens of each turn."""
        token_ids = self.response.token_ids
        return [[token_ids[i] for i in positions] for positions in self.turn_positions]

    @property
    def digest(self) -> int:
        """CRC-32 of the tokens of prompt and response."""
        response = np.array(self.response.token_ids, np.int32)
        return zlib.crc32(np.concatenate([self.whole_request.prompt, response]).tobytes())

    def _append(self, reply: Reply) -> None:
        episode = self.episode
        rewards = [*episode.rewards, (self.response.num_drawn - 1, reply.reward)]
        if reply.is_fatal:
            rewards = [(position, 0.0) for position, _ in rewards]
        start = len(self.response.token_ids)
        observation = (start, start + len(reply.token_ids))
        observed = [OBSERVED] * len(reply.token_ids)
        contexts = episode.contexts
        if reply.is_context and reply.token_ids:
            self.num_cached = 0
            observed[0] = CONTEXT_START
            contexts = [*contexts, len(episode.observations)]
        self.episode = Episode(
            rewards,
            {**episode.info, **reply.info},
            dict(Counter(episode.failed_calls) + Counter(reply.failed)),
            reply.failed[-1] if reply.is_fatal else None,
            episode.default_score,
            [*episode.observations, *([observation] if reply.token_ids else [])],
            reply.max_tokens,
            contexts,
        )
        self.response = replace(
            self.response,
            token_ids=[*self.response.token_ids, *reply.token_ids],
            log_probs=[*self.response.log_probs, *observed],
            finished=False,
        )
