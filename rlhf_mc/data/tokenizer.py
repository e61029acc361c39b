"""Loading of a tokenizer with its chat template, rendering of chats by the template, and their
tokens."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf_mc import json_files
from rlhf_mc.config.errors import NodeError, UserError, error_reason
from rlhf_mc.config.masking import one_line

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Names of tokenizer files. A directory with one of them has a tokenizer."""
THINK_TAGS = ("<think>", "</think>")
"""Tags around the thoughts of a response. Some tokenizers have them as special tokens."""
_TAG = re.compile(r"</?[\w-]+>")
_MARKS = range(0x10FFFD, 0x3FFFF, -1)
"""The last code points of Unicode, for private use or unassigned: no tokenizer merges them with
others."""
LIMIT_SECONDS = 10.0
"""Limit of processor time for one prompt: a template is a program of the checkpoint. Templates take
less than a thousandth of it."""


def load_tokenizer(
    path: str,
    key: str = "tokenizer",
    chat_template_path: str | None = None,
    template_key: str = "data.chat_template_path",
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a Hugging Face directory. Only local files are read and no code of
    the checkpoint is run. chat_template_path: file of the chat template, the setting
    `template_key`; None: the tokenizer's own.

    Raise UserError, beginning with `key` (the setting that names the directory), if the directory
    is missing, contains no tokenizer, or one without an end-of-sequence token; or if the template
    cannot be read.
    """
    if not os.path.isdir(path):
        raise UserError(f"{key} {path}: no such directory")
    if not has_tokenizer(path):
        raise UserError(f"{key} {path}: holds no tokenizer (none of {', '.join(FILES)})")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        _check_json(key, os.path.join(path, name))
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the tokenizers library has no narrower type for a corrupt file
        reason = one_line(str(error), 300)
        raise UserError(
            f"{key} {path}: cannot be loaded ({type(error).__name__}: {reason})"
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"{key} {path}: the tokenizer has no end-of-sequence token (eos_token)")
    if chat_template_path is not None:
        tokenizer.chat_template = _read_template(chat_template_path, template_key)
    return tokenizer


def has_tokenizer(path: str) -> bool:
    """Return whether the directory has a tokenizer."""
    return any(os.path.isfile(os.path.join(path, name)) for name in FILES)


def _read_template(path: str, key: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise NodeError(f"{key} {path}: cannot be read ({error_reason(error)})") from error
    except UnicodeDecodeError as error:
        raise NodeError(f"{key} {path}: not a text in UTF-8 ({error})") from error
    if not text.strip():
        raise UserError(f"{key} {path}: is empty; expected a Jinja template of chat messages")
    return text


def _check_json(key: str, path: str) -> None:
    if os.path.isfile(path):
        try:
            json_files.read(path)
        except (OSError, ValueError) as error:
            raise UserError(f"{key}: tokenizer file {path}: not valid JSON ({error})") from error


# ---------------------------------------------------------------- rendering


class _Timeout(BaseException):
    """Raised inside the template. Not an Exception, so that the libraries in between do not handle
    it."""


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Raise _Timeout inside after LIMIT_SECONDS of this process's processor time. In a thread there
    is no limit.

    A signal interrupts Python code in the main thread. Processor time excludes the time for which a
    process is suspended. SIGVTALRM is neither blocked by preemption.py nor used by another
    library."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGVTALRM, _raise)
    # Repeated, since an exception is discarded in a destructor.
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_SECONDS, LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def _raise(number: int, frame: FrameType | None) -> None:
    raise _Timeout


# ---------------------------------------------------------------- tokens of chats


@dataclass(frozen=True)
class ChatText:
    """A rendered chat."""

    text: str
    mark: str = ""
    """A character that is not in the messages. In `text` it follows the first character of each
    control token that a message has written out. Empty: none has."""


class ChatTokenizer:
    """Makes tokens of chats. A control token that is written out in a message stays text: no
    content can end its message and begin one of another role.

    Control tokens are the tokenizer's special tokens, and its other added tokens that the chat
    template contains (DeepSeek's <｜User｜>), except tags such as <tool_call>. A response may have
    THINK_TAGS, since templates look for them there. Chats without a written control token have the
    tokens of the rendered text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        template = str(tokenizer.chat_template)
        control = {
            token.content
            for token in tokenizer.added_tokens_decoder.values()
            if token.special or (token.content in template and not _TAG.fullmatch(token.content))
        }
        # One character cannot be marked, and is no mark of a message in any template.
        self._control = frozenset(text for text in control if len(text) > 1)
        self._lens = sorted({len(text) for text in self._control})
        first = "".join(sorted({text[0] for text in self._control}))
        self._first = re.compile(f"[{re.escape(first)}]" if first else "(?!)")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        where: str,
        add_generation_prompt: bool = True,
        template: str = "the tokenizer's chat template",
    ) -> ChatText:
        """Return the rendered messages, with the generation prompt added. Raise UserError, naming
        `where` (file and row) and `template`, if the template fails or does not end."""
        mark = ""
        tools = arguments.get("tools")
        if self._has_control([*messages, tools]):
            texts = json.dumps([*messages, tools], ensure_ascii=False, default=str)
            mark = _unused_character(texts)
            arguments = {**arguments, "tools": self._marked(tools, mark)} if tools else arguments
            messages = [
                self._marked(message, mark, message.get("role") == "assistant")
                for message in messages
            ]
        try:
            with _time_limit():
                text = self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **arguments,
                )
        except _Timeout:
            raise UserError(
                f"{where}: {template} has not ended after {LIMIT_SECONDS:g} s of processor time"
            ) from None
        except Exception as error:  # a template is arbitrary code
            reason = one_line(str(error), 200) or type(error).__name__
            raise UserError(f"{where}: {template} refuses the prompt ({reason})") from error
        if not isinstance(text, str):
            raise UserError(f"{where}: {template} gives {type(text).__name__}, not a text")
        return ChatText(text, mark)

    def plain(self, text: str) -> ChatText:
        """Return a text whose control tokens stay text."""
        mark = _unused_character(text) if self._has_control(text) else ""
        return ChatText(self._marked(text, mark), mark)

    def tokens(self, chat: ChatText, add_special_tokens: bool = False) -> list[int]:
        """Return the tokens of a chat. add_special_tokens: those that the tokenizer adds around a
        text."""
        if not chat.mark:
            return list(
                self.tokenizer(chat.text, add_special_tokens=add_special_tokens)["input_ids"]
            )
        if not self.tokenizer.is_fast:  # no offsets
            parts = chat.text.split(chat.mark)
            return [
                token
                for part in parts
                for token in self.tokenizer(part, add_special_tokens=False)["input_ids"]
            ]
        encoded = self.tokenizer(chat.text, add_special_tokens=False, return_offsets_mapping=True)
        return [
            token
            for token, (start, end) in zip(
                encoded["input_ids"], encoded["offset_mapping"], strict=True
            )
            # a byte of a character may have an empty span
            if chat.text[start : max(start + 1, end)] != chat.mark
        ]

    def _has_control(self, value: Any) -> bool:
        """Return whether a text of the value, which is as JSON has it, has a control token."""
        if isinstance(value, str):
            return next(self._control_starts(value), None) is not None
        if isinstance(value, Mapping):
            return any(
                self._has_control(key) or self._has_control(inner) for key, inner in value.items()
            )
        return isinstance(value, list | tuple) and any(map(self._has_control, value))

    def _marked(self, value: Any, mark: str, is_response: bool = False) -> Any:
        """Return the value with the mark after the first character of each control token in its
        texts."""
        if isinstance(value, str):
            unmarked = THINK_TAGS if is_response else ()
            starts = self._control_starts(value)
            ends = [start + 1 for start in starts if not value.startswith(unmarked, start)]
            return mark.join(
                value[start:end] for start, end in zip([0, *ends], [*ends, None], strict=True)
            )
        if isinstance(value, Mapping):
            marked = [
                [self._marked(inner, mark, is_response) for inner in pair] for pair in value.items()
            ]
            return dict(marked)
        return (
            [self._marked(inner, mark, is_response) for inner in value]
            if isinstance(value, list | tuple)
            else value
        )

    def _control_starts(self, text: str) -> Iterator[int]:
        """Yield the starts of control tokens, which may overlap, and of the beginning of one at the
        end of the text: another message may follow without a mark between them."""
        end = len(text.rstrip())
        for match in self._first.finditer(text):
            start = match.start()
            rest = text[start:end]
            is_token = any(text[start : start + length] in self._control for length in self._lens)
            if is_token or (
                len(rest) < self._lens[-1]
                and any(token.startswith(rest) for token in self._control)
            ):
                yield start


def _unused_character(text: str) -> str:
    """Return a mark that the text does not have."""
    used = set(text)
    return next(mark for mark in map(chr, _MARKS) if mark not in used)
