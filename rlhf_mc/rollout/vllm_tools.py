"""Tool calls in the model's turns, by vLLM's parsers without its server. They run in the rank,
which has vLLM and the tokenizer: a worker process would take 10 s and 450 MB to import both.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers.abstract_tool_parser import ToolParserManager

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.masking import one_line

Call = tuple[str, str, str]
"""Tool name, arguments as JSON, and call id in the chat template."""
_HARMONY = "gpt-oss"
"""Format whose vLLM parser needs a vocabulary from the network; no other parser does."""
_HARMONY_CALL = re.compile(
    r"to=functions\.([\w.-]+)(?:(?!<\|(?:message|end|call)\|>).)*<\|message\|>(.*?)(?=<\|(?:call|end)\|>|\Z)",
    re.DOTALL,
)
_STARTS = ("tool_calls_start_token", "tool_call_start_token", "bot_token")
"""Parser attributes with the start marker of a call."""
_OTHER_STARTS = ("<tool_call>", "<|tool_calls_section_begin|>", "[TOOL_CALLS]")
"""Start markers for parsers without these attributes: GLM's and Qwen3-Coder's, Kimi's,
Mistral's."""


class ToolCallParser:
    """Finds the tool calls of turns."""

    def __init__(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
        tools: Sequence[dict[str, Any]],
    ) -> None:
        """name: the setting rollout.environment.format. tools: schemas. Raise UserError for an
        unknown name, or if the tokenizer is not one of the format's models."""
        self._tokenizer = tokenizer
        self._stop = frozenset(stop_token_ids)
        self._request = ChatCompletionRequest(messages=[], tools=list(tools))
        self._keeps_numbers = name.startswith("kimi")
        self._parser = None
        self._starts: Sequence[str] = ["to=functions."]
        if name == _HARMONY:
            return
        known = ToolParserManager.list_registered()
        if name not in known:
            raise UserError(
                f"rollout.environment.format is {name!r}; known: {', '.join((_HARMONY, *known))}"
            )
        try:
            self._parser = ToolParserManager.get_tool_parser(name)(tokenizer, self._request.tools)
        except Exception as error:  # a tokenizer without the format's tokens
            raise UserError(
                f"rollout.environment.format {name}: {one_line(str(error), 300)}"
            ) from error
        starts = [getattr(self._parser, attribute, "") for attribute in _STARTS]
        self._starts = [start for start in starts if start.startswith("<")] or _OTHER_STARTS
        for logger in ("vllm.tool_parsers", "vllm.parser"):
            # a traceback for each call that is malformed
            logging.getLogger(logger).setLevel(logging.CRITICAL)

    def calls(self, turn: Sequence[int]) -> tuple[str, list[Call]]:
        """Return the text of a turn before its tool calls, and the calls. A call with an empty name
        stands for a malformed call."""
        end = len(turn) - (bool(turn) and turn[-1] in self._stop)
        text = str(self._tokenizer.decode(turn[:end], skip_special_tokens=False))
        calls: list[Call] = []
        content = ""
        if self._parser is None:
            for name, arguments in _HARMONY_CALL.findall(text):
                calls.append((name, arguments, f"call{len(calls):05d}"))
            # the last message may be a broken call
            text = text.rpartition("<|start|>")[2].partition("<|message|>")[0]
        else:
            try:
                extracted = self._parser.extract_tool_calls(text, self._request)
                parsed = extracted.tool_calls
                content = extracted.content or ""
            except Exception:  # of a parser on a text that it does not expect
                parsed = []
            for call in parsed:
                # others are random
                number = call.id if self._keeps_numbers else f"call{len(calls):05d}"
                calls.append((call.function.name, call.function.arguments, number))
        if not calls and any(start in text for start in self._starts):
            calls.append(("", "", "call00000"))
        return content, calls
