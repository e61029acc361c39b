"""Translation between a model's tokens and an environment's texts: turns as messages to worker
processes, and answers as observations in tokens. Warnings of failed calls are printed here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec
from transformers import PreTrainedTokenizerBase

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.masking import one_line
from rlhf_mc.config.schema import DataConfig
from rlhf_mc.data.batch import Prompt
from rlhf_mc.environments.conversation import Conversation
from rlhf_mc.environments.environment_worker import Turn
from rlhf_mc.environments.journal import Reply
from rlhf_mc.environments.protocol import Completion, StepOutcome, StepResult, ToolCall, where
from rlhf_mc.environments.template import ObservationTokenizer
from rlhf_mc.rewards.results import MASKED, Failure, FailureKind
from rlhf_mc.rollout.base import Sampling
from rlhf_mc.runtime.console import print_line

if TYPE_CHECKING:
    from rlhf_mc.rollout.vllm_tools import ToolCallParser

_MAX_REPORTED = 5
"""Failed calls that each rank reports; after them it reports every hundredth."""


class Translator:
    """Translates turns and answers."""

    def __init__(
        self,
        cfg: EnvironmentConfig,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
        tools: Sequence[Any],
    ) -> None:
        """tools: schemas of the tools that the model may call."""
        self.cfg = cfg
        self.max_response_length = data.max_response_length
        arguments = data.apply_chat_template_kwargs | ({"tools": tools} if tools else {})
        self._tokenizer = tokenizer
        self._stop = stop_token_ids
        self._observations = ObservationTokenizer(tokenizer, stop_token_ids, arguments, cfg)
        prompt_end: dict[str, Any] = {"add_generation_prompt": False} if cfg.begins else {}
        if cfg.is_agent:  # whose first request has the messages
            prompt_end |= {"chat_template": "{{ beginning }}"}
            prompt_end["beginning"] = self._observations.beginning()
        self.prompt_arguments = arguments | prompt_end
        """Arguments of the chat template for prompts."""
        self._parser = _parser(cfg, tokenizer, stop_token_ids, tools) if tools else None
        self._for_tools = functools.lru_cache(64)(self._new_for_tools)
        self._num_failed = 0

    def turn(
        self,
        conversation: Conversation,
        index: int,
        is_new: bool,
        tools: Sequence[dict[str, Any]] = (),
        sampling: Sampling | None = None,
    ) -> Turn:
        """Return the message with a turn of this index. is_new: the environment begins with it.
        tools: of an agent's last request. sampling: of the call."""
        turns = conversation.turns
        tokens = turns[index]
        text = self._tokenizer.decode(tokens, skip_special_tokens=self.cfg.skip_special_tokens)
        content = ""
        calls: list[tuple[str, str, str]] = []
        parser = None
        with contextlib.suppress(Failure):
            _, parser = self._for_tools(msgspec.json.encode(tools))
        has_room = bool(conversation.room) or index + 1 < len(turns)
        if parser is not None and (has_room or self.cfg.is_agent):
            content, calls = parser.calls(tokens)
        resets = is_new and (index == 0 or not self.cfg.begins)
        row = _row(conversation.prompt) if resets else None
        completion = None
        if self.cfg.is_agent:
            if row is not None and sampling is not None:
                row["sampling"] = asdict(sampling)
            is_over = conversation.episode.num_turns + 1 >= self.cfg.max_turns
            positions = conversation.turn_positions[index]
            completion = Completion(
                content,
                [conversation.response.log_probs[i] for i in positions],
                len(conversation.context(index)) - len(tokens),
                bool(tokens) and tokens[-1] in self._stop,
                not has_room or (is_over and index + 1 == len(turns)),
            )
        tool_calls = [ToolCall(*call) for call in calls]
        return Turn(conversation.key, row, text, tokens, tool_calls, completion)

    def reply(self, conversation: Conversation, answer: StepOutcome, iteration: int) -> Reply:
        """Return the answer to the present turn as a reply, with the default observation for a
        failure. iteration: of the engine's loop."""
        tokens: list[int] = []
        failed: list[FailureKind] = []
        is_fatal = False
        if isinstance(answer, StepResult):
            try:
                tokens = self._tokens(conversation, -1, answer)
                failed += [failure.kind for failure in answer.failures]
                for failure in answer.failures:
                    self._report(conversation, failure.problem, "continues with it")
            except Failure as problem:
                answer = problem
        # A conversation does not end without a turn of the model.
        is_first = conversation.is_before_first
        if isinstance(answer, Failure):
            failed.append(answer.kind)
        is_masked = conversation.episode.is_masked or MASKED in failed
        if isinstance(answer, Failure):
            has_default = self.cfg.default_observation is not None and not is_masked
            is_fatal = not (is_first or has_default)
            tokens = [] if is_fatal else self._observations.default_tokens(answer.problem)
            if self.cfg.is_agent and is_first:  # the model answers the row's prompt
                with contextlib.suppress(Failure):
                    messages = [dict(message) for message in conversation.prompt.messages]
                    tokens = self._observations.tokens(messages, [])
            outcome = f"scores {self.cfg.default_score:g}"
            if not is_fatal:
                default = "continues with default_observation"
                outcome = default if has_default else "begins without a first observation"
            self._report(conversation, answer.problem, outcome)
            answer = StepResult("", 0.0, is_fatal, {})
        is_last_turn = not is_first and (
            is_masked or conversation.episode.num_turns + 1 >= self.cfg.max_turns
        )
        is_last = answer.done or is_last_turn
        # With an observation that does not fit, the response is truncated.
        room = conversation.room - is_first
        is_context = answer.continues is not None and not (is_first or is_last)
        if is_context and len(tokens) >= room:  # a context has a turn
            is_last = True
        tokens = [] if is_last else tokens[:room]
        ends = is_last or (not is_first and len(tokens) == room)
        given = (answer.reward, {**answer.info}, ends, failed, is_fatal, answer.max_tokens)
        return Reply(iteration, tokens, *given, is_context)

    def compare(self, conversation: Conversation, index: int, answer: StepOutcome) -> None:
        """Warn if an environment that begins again answers an earlier turn otherwise than
        before."""
        episode = conversation.episode
        positions = conversation.turn_positions
        start = positions[index][-1] + 1 if positions[index] else 0
        tokens = conversation.response.token_ids[start : positions[index + 1][0]]
        before = tokens, episode.rewards[index][1]
        is_same = bool(episode.failed_calls)
        if isinstance(answer, StepResult):
            with contextlib.suppress(Failure):
                now = self._tokens(conversation, index, answer), answer.reward
                is_same = now == before
        if not is_same:
            problem = f"begun again, it answers turn {index + 1} otherwise than before"
            self._report(conversation, problem, "continues with the earlier answer")

    def _tokens(self, conversation: Conversation, index: int, answer: StepResult) -> list[int]:
        """Return the tokens of the observation after a turn; none after the last turn."""
        if answer.done:
            return []
        follows = index if answer.continues is None else answer.continues
        turns = conversation.turns
        if answer.continues is not None and follows not in range(len(turns)):
            raise Failure("invalid", f"it continues turn {follows} of {len(turns) - 1}")
        turn = turns[follows]
        messages = conversation.prompt.messages
        observations, _ = self._for_tools(msgspec.json.encode(answer.tools))
        tokens = observations.tokens(answer.observation, turn, messages)
        if turn and not conversation.episode.rewards:
            text = self._tokenizer.decode(turn, skip_special_tokens=True)
            observations.check(messages, text, answer.observation, tokens)
        before = [] if answer.continues is None else conversation.context(follows)
        return [*before, *tokens]

    def _new_for_tools(self, schemas: bytes) -> tuple[ObservationTokenizer, ToolCallParser | None]:
        """Return what renders and parses for an agent's tools. Raise Failure if nothing does."""
        tools = msgspec.json.decode(schemas)
        if not tools:
            return self._observations, self._parser
        try:
            parser = _parser(self.cfg, self._tokenizer, self._stop, tools)
        except Exception as error:  # of a parser on schemas that it does not expect
            raise Failure("invalid", f"its tools: {one_line(str(error), 300)}") from error
        return self._observations.with_tools(tools), parser

    def _report(self, conversation: Conversation, problem: str, outcome: str) -> None:
        """Warn of a failed call. outcome: what becomes of the conversation."""
        self._num_failed += 1
        if self._num_failed <= _MAX_REPORTED or self._num_failed % 100 == 0:
            print_line(
                f"warning: {where(self.cfg)}: {conversation.prompt.where}: {problem};"
                f" the conversation {outcome} ({self._num_failed} such calls so far on this rank)"
            )


def _parser(
    cfg: EnvironmentConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
    tools: Sequence[Any],
) -> ToolCallParser:
    """Return the parser of tool calls. Raise UserError if vLLM is not installed or has none of this
    format."""
    try:
        from rlhf_mc.rollout.vllm_tools import ToolCallParser
    except ImportError as error:
        problem = f"vLLM's parsers cannot be imported ({error})"
        raise UserError(f"rollout.environment.format {cfg.format}: {problem}") from error
    return ToolCallParser(cfg.format, tokenizer, stop_token_ids, tools)


def _row(prompt: Prompt) -> dict[str, object]:
    """Return the row of the dataset for an environment's reset."""
    return {
        "prompt": [dict(message) for message in prompt.messages],
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": dict(prompt.extra_info),
        "agent_name": prompt.agent_name,
    }
