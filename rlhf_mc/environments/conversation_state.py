"""One conversation with an environment: its turns, and what the environment has given."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_mc.data.batch import OBSERVED, Generation
from rlhf_mc.environments.journal import Reply
from rlhf_mc.rewards.results import Episode


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
    def from_dict(row: Mapping[str, Any]) -> ConversationState:
        """Return the state of a dict of asdict."""
        return ConversationState(**{**row, "episode": Episode(**row["episode"])})


def places_by_turn(response: Generation, episode: Episode) -> list[list[int]]:
    """Return the places of the drawn tokens of each turn of the response, the present turn last."""
    places = [place for place, log_prob in enumerate(response.log_probs) if log_prob != OBSERVED]
    bounds = [0, *(place + 1 for place, _ in episode.rewards), len(places)]
    return [places[start:end] for start, end in itertools.pairwise(bounds)]


def with_reply(episode: Episode, turn: Generation, reply: Reply) -> Episode:
    """Return the episode with the environment's answer to the turn with which the response ends."""
    rewards = [*episode.rewards, (turn.num_drawn - 1, reply.reward)]
    if reply.is_fatal:
        rewards = [(place, 0.0) for place, _ in rewards]
    failed = Counter(episode.failed_calls) + Counter(reply.failed)
    failure = reply.failed[-1] if reply.is_fatal else None
    start = len(turn.token_ids)
    observations = [*episode.observations, *([(start, start + len(reply.token_ids))] if reply.token_ids else [])]
    info = {**episode.info, **reply.info}
    return Episode(rewards, info, dict(failed), failure, episode.default_score, observations)


def with_observation(turn: Generation, tokens: Sequence[int]) -> Generation:
    """Return the response with an observation appended."""
    return replace(
        turn,
        token_ids=[*turn.token_ids, *tokens],
        log_probs=[*turn.log_probs, *[OBSERVED] * len(tokens)],
        finished=False,
    )
