"""One conversation with an environment: its turns, and what the environment has given."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import msgspec

from rlhf_mc.data.batch import OBSERVED, Generation, Prompt
from rlhf_mc.environments.environment_worker import Key
from rlhf_mc.environments.journal import Place, Reply
from rlhf_mc.rewards.results import Episode
from rlhf_mc.rollout.base import Request


class Status(Enum):
    """Of a conversation in a call of the engines, on the ranks of the engine that has it."""

    NOT_HERE = 0
    """It has not begun, or another engine has it."""
    DRAWS = 1
    WAITS = 2
    """Its last turn has ended, and the environment has not answered."""
    ENDED = 3


@dataclass(frozen=True)
class ConversationState:
    """A conversation after a call of the engines, without its tokens. With rollout.partial_rollout a later call
    continues it, on any rank."""

    engine: int
    """The engine that had it."""
    waits: bool
    """Its last turn has ended, and the environment has not answered."""
    ended: bool
    episode: Episode
    """Up to the last answer."""

    @staticmethod
    def from_dict(row: Mapping[str, Any], length: int) -> ConversationState:
        """Return the state of a dict of asdict. length: of the response, in tokens. Raise ValueError for another
        dict."""
        try:
            state = msgspec.convert(row, ConversationState)
        except msgspec.ValidationError as error:
            raise ValueError(f"conversations: {error}") from error
        episode = state.episode
        turns = [-1, *(place for place, _ in episode.rewards), length]
        places = [0, *itertools.chain(*episode.observations), length]
        numbers = [*(reward for _, reward in episode.rewards), *episode.info.values(), episode.default_score]
        is_sound = (
            (state.engine >= 0 and all(number >= 0 for number in episode.failed_calls.values()))
            and (turns == sorted(turns) and places == sorted(places))
            and all(map(math.isfinite, numbers))
        )
        if not is_sound:
            raise ValueError(f"conversations: a state is {repr(row)[:80]}")
        return state


@dataclass(eq=False)
class Conversation:
    """A conversation in one call of the engines."""

    key: Key
    prompt: Prompt
    whole: Request
    """Its request, with the limit of the whole response."""
    episode: Episode
    """Up to the last answer; of one that another engine has, before the call."""
    response: Generation
    """Up to the last turn that has ended, or the observation after it."""
    status: Status = Status.NOT_HERE
    is_cut: bool = False
    """A later call continues it: the run that is replayed ended this one before."""
    is_cached: bool = False
    """The engine has computed its tokens in this call."""
    is_sent: bool = False
    """While it waits: the environment has got the turn, or one before it that is to be answered again."""
    place: tuple[Place, int] = ((0, 0, 0), 0)
    """While it waits: the turn, and the digest of the tokens up to it, as the journal has them."""
    recorded: Reply | None = None
    """While it waits: the journal's answer."""

    @property
    def places(self) -> list[list[int]]:
        """The places of the drawn tokens of each turn in the response, the present turn last."""
        places = [place for place, log_prob in enumerate(self.response.log_probs) if log_prob != OBSERVED]
        bounds = [0, *(place + 1 for place, _ in self.episode.rewards), len(places)]
        return [places[start:end] for start, end in itertools.pairwise(bounds)]

    @property
    def turns(self) -> list[list[int]]:
        """The tokens that the model has drawn in each turn."""
        return [[self.response.token_ids[place] for place in places] for places in self.places]

    def turn_limit(self, most: int, per_turn: int | None) -> int:
        """Return the largest length of the response in the present turn. most: of the whole response. per_turn: largest
        number of tokens of a turn."""
        if per_turn is None:
            return most
        present = self.places[-1]
        return min(most, (present[0] if present else len(self.response.token_ids)) + per_turn)

    def append(self, reply: Reply) -> None:
        """Append the environment's answer to the turn with which the response ends."""
        episode = self.episode
        rewards = [*episode.rewards, (self.response.num_drawn - 1, reply.reward)]
        if reply.is_fatal:
            rewards = [(place, 0.0) for place, _ in rewards]
        failed = Counter(episode.failed_calls) + Counter(reply.failed)
        failure = reply.failed[-1] if reply.is_fatal else None
        start = len(self.response.token_ids)
        observations = [*episode.observations, *([(start, start + len(reply.token_ids))] if reply.token_ids else [])]
        info = {**episode.info, **reply.info}
        self.episode = Episode(rewards, info, dict(failed), failure, episode.default_score, observations)
        self.response = replace(
            self.response,
            token_ids=[*self.response.token_ids, *reply.token_ids],
            log_probs=[*self.response.log_probs, *[OBSERVED] * len(reply.token_ids)],
            finished=False,
        )
