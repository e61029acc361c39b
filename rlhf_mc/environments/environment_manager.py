"""The transport between conversations and environments: it sends turns to this rank's worker
processes, and receives answers. An environment that is lost begins again, and gets the earlier
turns again.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.schema import DataConfig
from rlhf_mc.environments.environment_worker import Key, Turn
from rlhf_mc.environments.journal import ObservationJournal, Reply
from rlhf_mc.environments.pool import EnvironmentPool
from rlhf_mc.environments.protocol import StepOutcome
from rlhf_mc.environments.translation import Translator
from rlhf_mc.topology.consensus import gather_objects

_RETAINED = -1
"""Stands for the call in the key of a retained conversation."""


@dataclass
class _Environment:
    """One conversation's environment on this rank."""

    num_sent: int = 0
    """Number of turns sent; 0 again once the environment is lost."""
    is_busy: bool = False
    """Sent, not yet consumed."""
    answer: StepOutcome | None = None
    """Answer to the last turn, not yet consumed."""
    fatal_turns: set[int] = field(default_factory=set)
    """Turns that ended a worker process; never sent again."""
    tools: Sequence[dict[str, Any]] = ()
    """Tools of an agent's last request."""


class EnvironmentManager:
    """The environments of a run on this rank, for all calls of the engines."""

    def __init__(
        self,
        cfg: EnvironmentConfig,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
        journal: ObservationJournal,
    ) -> None:
        """Raise UserError if the user's file cannot be used."""
        self.journal = journal
        self.pool = EnvironmentPool(cfg)
        self.translator = Translator(cfg, data, tokenizer, stop_token_ids, self.pool.tool_schemas)
        self.engine = 0
        """Engine of this rank."""
        self._environments: dict[Key, _Environment] = {}
        self._num_calls = itertools.count()
        self._group: dist.ProcessGroup | None = None
        self._ranks: Sequence[int] = ()

    def connect(self, engines: Sequence[Sequence[int]]) -> None:
        """Make a process group of the ranks of each engine that has several. Every rank must call
        it."""
        for number, ranks in enumerate(engines):
            group = dist.new_group(list(ranks), backend="gloo") if len(ranks) > 1 else None
            if dist.get_rank() in ranks:
                self.engine = number
                self._ranks = ranks
                self._group = group

    @property
    def has_engine(self) -> bool:
        """False on a rank without an engine, which has no conversation."""
        return bool(self._ranks)

    def begin_call(self, names: Sequence[int], retained: bool) -> list[Key]:
        """Return the keys of a call's conversations. names: unique in the call. retained: a later
        call may continue them, and other retained environments are closed; else the names are the
        call's own."""
        if retained:
            self.end_retained(set(names))
        call = _RETAINED if retained else next(self._num_calls)
        return [(call, name) for name in names]

    def end_retained(self, but: Set[int] = frozenset()) -> None:
        """Close the retained environments, except those of the conversations of these names."""
        for call, name in list(self._environments):
            if call == _RETAINED and name not in but:
                self.end((call, name))

    def is_here(self, key: Key) -> bool:
        """Return True on the rank of the engine that runs the conversation's environment."""
        return self._ranks[key[1] % len(self._ranks)] == dist.get_rank()

    def next_turn(self, key: Key) -> tuple[int, bool, Sequence[dict[str, Any]]] | None:
        """Return the index of the turn to send next, whether the environment is new then, and the
        tools of an agent's last request. Return None while the answer to another turn is
        awaited."""
        environment = self._environments.setdefault(key, _Environment())
        if environment.is_busy:
            return None
        first = environment.num_sent if self.pool.has(key) else 0
        index = next(i for i in itertools.count(first) if i not in environment.fatal_turns)
        return index, first == 0, environment.tools

    def send(self, turn: Turn, index: int) -> None:
        """Send the turn of this index, which must be the next one."""
        environment = self._environments[turn.key]
        environment.num_sent = index + 1
        environment.is_busy = True
        self.pool.submit(turn)

    def receive(self, keys: Collection[Key], seconds: float) -> dict[Key, tuple[int, StepOutcome]]:
        """Return the answers that have come for these conversations, with the indices of their
        turns. Without any, wait for at most `seconds`."""
        wanted = {key: self._environments[key] for key in keys}
        has_answers = any(environment.answer is not None for environment in wanted.values())
        for key, answer in self.pool.take(0.0 if has_answers else seconds).items():
            environment = self._environments.get(key)
            if environment is None or not environment.is_busy:
                continue
            environment.answer = answer
            if answer is None:
                environment.num_sent = 0
                environment.is_busy = False
            elif not self.pool.has(key):
                environment.fatal_turns.add(environment.num_sent - 1)
        received = {}
        for key, environment in wanted.items():
            if environment.answer is not None:
                environment.tools = getattr(environment.answer, "tools", ())
                received[key] = environment.num_sent - 1, environment.answer
                environment.answer = None
                environment.is_busy = False
        return received

    def end(self, key: Key) -> None:
        """Close the environment of a conversation, if this rank has it."""
        if self._environments.pop(key, None) is not None:
            self.pool.end(key)

    def on_all_ranks(self, replies: dict[int, Reply]) -> dict[int, Reply]:
        """Return the replies of all ranks of the engine, by the request's number."""
        if self._group is None:
            return replies
        parts = gather_objects(replies, self._group)
        return {number: reply for part in parts for number, reply in part.items()}

    def close(self) -> None:
        """End the worker processes."""
        self.pool.close()
