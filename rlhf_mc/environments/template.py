"""The tokens of an observation: text as it is, chat messages as the chat template adds them to a
conversation. Control tokens that they have written out stay text. What the model has drawn is never
rendered or tokenised again.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.data.tokenizer import ChatText, ChatTokenizer
from rlhf_mc.environments.protocol import Observation, truncated
from rlhf_mc.rewards.results import Failure
from rlhf_mc.runtime.console import print_line

_QUESTION = {"role": "user", "content": "."}
"""The prompt of the rendered conversation; the tokens of an observation do not depend on it."""


class ObservationTokenizer:
    """Makes tokens of observations."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
        arguments: Mapping[str, Any],
        cfg: EnvironmentConfig,
    ) -> None:
        """arguments: of the chat template."""
        self._tokenizer = tokenizer
        self._chats = ChatTokenizer(tokenizer)
        self._cfg = cfg
        self._stop = frozenset(stop_token_ids)
        self._arguments = arguments
        self._is_checked = False
        self._beginning: list[int] = []
        if "tools" in arguments:
            self._check_tools()

    def tokens(
        self,
        observation: Observation,
        turn: Sequence[int],
        prompt: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Return the tokens that follow a turn's, with the generation prompt after messages.
        prompt: where there is no turn yet, the messages that they follow. Raise Failure if the chat
        template refuses the messages, or if a conversation without them is not the beginning of one
        with them."""
        if isinstance(observation, str):
            splits = self._cfg.split_special_tokens
            return self._chats.tokens(
                self._chats.plain(observation) if splits else ChatText(observation)
            )
        messages = [message for message in observation if isinstance(message, dict)]
        if len(messages) < len(observation) or not messages:
            tokens = [token for token in observation if isinstance(token, int)]
            largest = max(tokens, default=0)
            if largest >= len(self._tokenizer):
                raise Failure(
                    "invalid",
                    f"step returned the token {largest}; the tokenizer has {len(self._tokenizer)}",
                )
            return tokens
        if not turn and self._cfg.is_agent:
            whole = self._rendered(messages, True)
            if whole[:1] != self._beginning:
                raise Failure("invalid", "the chat template begins the conversation like no other")
            return whole[1:]
        if not turn:
            return self._difference(prompt, self._rendered([*prompt, *messages], True))
        after = self._after([_QUESTION], ".", messages)
        # The response ends with the first end token after the generation prompt, of which the
        # template may render a part alone. What it adds after the end token (a line break) belongs
        # to the observation. With another content the tokens up to the observation's are the same:
        # an end token that comes later ends no response.
        before_response = self._rendered([_QUESTION], True)
        others = [{**message, "content": f".{message['content']}"} for message in messages]
        other = self._after([_QUESTION], ".", others)
        start = _num_equal(before_response, after)
        end = next(
            (i for i in range(start, _num_equal(other, after)) if after[i] in self._stop), None
        )
        if end is not None and turn[-1] == after[end]:
            return after[end + 1 :]
        response = [_QUESTION, {"role": "assistant", "content": "."}]
        before = self._rendered(response, False)
        has_end = not self._stop.isdisjoint(before[start:])
        if end is None and has_end and after[: len(before) - 1] == before[:-1]:
            # the end token of the last message is another one than those of others (gpt-oss)
            end = len(before) - 1
        if end is not None:
            # Or the end token begins the next message (GLM): the turn may have that of another
            # role.
            return after[end + (has_end and turn[-1] in self._stop) :]
        return self._difference(response, after)

    def with_tools(self, tools: Sequence[dict[str, Any]]) -> ObservationTokenizer:
        """Return the tokenizer of observations for an agent with these tools."""
        other = copy.copy(self)
        other._arguments = {**self._arguments, "tools": tools}
        other._check_tools()
        return other

    def beginning(self) -> str:
        """Return the text of the token with which the template begins all conversations, the prompt
        of agents' ones. Raise UserError if there is none."""
        tool = {"name": "f", "description": "f", "parameters": {"type": "object"}}
        tools = {"tools": [{"type": "function", "function": tool}]}
        chats = [[_QUESTION], [{**_QUESTION, "role": "system"}, _QUESTION]]
        firsts = set()
        for messages, arguments in itertools.product(chats, ({}, tools)):
            with contextlib.suppress(UserError):  # of a template without system messages
                chat = self._chats.render(messages, {**self._arguments, **arguments}, "an agent")
                firsts.add(self._chats.tokens(chat)[0])
        self._beginning = [*firsts]
        text = str(self._tokenizer.decode(self._beginning))
        if len(firsts) == 1 and self._chats.tokens(ChatText(text)) == self._beginning:
            return text
        raise UserError(
            "rollout.environment.name openai: the chat template has no first token that all "
            "conversations have; data.chat_template_path may name another template"
        )

    def default_tokens(self, problem: str) -> list[int]:
        """Return the tokens of rollout.environment.default_observation, with its control tokens.
        problem: replaces {error}, and has none."""
        chat = self._chats.plain(problem)
        text = truncated(
            (self._cfg.default_observation or "").replace("{error}", chat.text), self._cfg
        )
        return self._chats.tokens(replace(chat, text=text))

    def check(
        self,
        prompt: Sequence[Mapping[str, Any]],
        turn: str,
        observation: Observation,
        tokens: Sequence[int],
    ) -> None:
        """Warn, the first time, if the rendering of the whole conversation does not end with the
        observation's tokens, or lacks a part of the turn. prompt: its messages. turn: the text of
        the first one."""
        messages = [message for message in observation if isinstance(message, dict)]
        if self._is_checked or not prompt or not messages:
            return
        self._is_checked = True
        whole = self._after(prompt, turn, messages)
        if whole[-len(tokens) :] != list(tokens):
            texts = [self._tokenizer.decode(part) for part in (tokens, whole[-len(tokens) :])]
            print_line(
                "warning: rollout.environment: the chat template adds an observation as "
                f"{texts[0]!r}, and a rendering of the whole conversation ends with {texts[1]!r}; "
                "the model is trained on the former"
            )
        # Some templates render calls of tools in place of the text.
        if messages[0]["role"] != "tool" and turn.strip() not in self._tokenizer.decode(whole):
            print_line(
                "warning: rollout.environment: once an observation follows, the chat template "
                f"renders the response {turn[:200]!r} otherwise, or without its thoughts; the "
                "model sees all that it has drawn"
            )

    def _check_tools(self) -> None:
        """Warn if the template does not render tools, as that of DeepSeek-V3.1's checkpoint."""
        with contextlib.suppress(UserError):  # of a template that asks for another prompt
            texts = [
                self._chats.render(
                    [_QUESTION], {**self._arguments, "tools": tools}, "a question"
                ).text
                for tools in (self._arguments["tools"], None)
            ]
            if texts[0] == texts[1]:
                print_line(
                    "warning: rollout.environment: the chat template does not render tools, so no "
                    "prompt has their schemas; data.chat_template_path may name another template",
                    rank_0_only=True,
                )

    def _difference(self, messages: Sequence[Mapping[str, Any]], after: list[int]) -> list[int]:
        """Return what a rendering adds to that of the messages."""
        before = self._rendered(messages, False)
        if after[: len(before)] != before:
            raise Failure(
                "invalid",
                "the chat template renders messages differently once an observation follows",
            )
        return after[len(before) :]

    def _after(
        self,
        prompt: Sequence[Mapping[str, Any]],
        turn: str,
        observation: Sequence[Mapping[str, str]],
    ) -> list[int]:
        """Return the tokens of a conversation that ends with an observation. Where that is answers
        of tools, the turn has their calls; some templates take their arguments as a text alone,
        some as a mapping."""
        answers = [message for message in observation if message["role"] == "tool"]
        if not answers:
            return self._rendered(
                [*prompt, {"role": "assistant", "content": turn}, *observation], True
            )

        def rendered(arguments: Any) -> list[int]:
            tool_calls = [
                {
                    "type": "function",
                    "id": answer.get("tool_call_id", "call00000"),
                    "function": {"name": answer.get("name", "tool"), "arguments": arguments},
                }
                for answer in answers
            ]
            message = {"role": "assistant", "content": turn, "tool_calls": tool_calls}
            return self._rendered([*prompt, message, *observation], True)

        try:
            return rendered({})
        except Failure:
            return rendered("{}")

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> list[int]:
        try:
            chat = self._chats.render(
                messages, self._arguments, "an observation", add_generation_prompt
            )
        except UserError as error:
            raise Failure("invalid", str(error)) from error
        return self._chats.tokens(chat)


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens with which both begin."""
    pairs = zip(first, second, strict=False)
    return next(
        (i for i, (left, right) in enumerate(pairs) if left != right), min(len(first), len(second))
    )
