"""The environments of a run on this rank: they get the turns of conversations, and their answers are collected. One
that is lost begins again, and gets the earlier turns again.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlhf_mc.config.data_schema import DataConfig
from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.data.batch import Prompt
from rlhf_mc.environments.conversation import ConversationState
from rlhf_mc.environments.environment_worker import Key, Turn
from rlhf_mc.environments.journal import ObservationJournal, Reply
from rlhf_mc.environments.pool import EnvironmentPool
from rlhf_mc.environments.protocol import StepResult, ToolCall, where
from rlhf_mc.environments.template import ObservationTokenizer
from rlhf_mc.environments.turns import Conversations
from rlhf_mc.rewards.results import Failure
from rlhf_mc.rollout.base import Request
from rlhf_mc.runtime.console import print_line
from rlhf_mc.topology.consensus import gather_objects

if TYPE_CHECKING:
    from rlhf_mc.rollout.vllm_tools import ToolCallParser

_MOST_REPORTED = 5
"""Failed calls that each rank reports; after them it reports every hundredth."""
_KEPT = -1
"""In place of the call in the key of a conversation that several calls may continue."""


class EnvironmentManager:
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
        self.observations = ObservationTokenizer(tokenizer, stop_token_ids, arguments, cfg)
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
        text = self.tokenizer.decode(turns[sent], skip_special_tokens=self.cfg.skip_special_tokens)
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
