"""One row to the tokens of its prompt: chat messages, the chat template, the limit on length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_mc import json_files
from rlhf_mc.config.environment_schema import SINGLE_TURN_AGENT, TOOL_AGENT
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.masking import one_line
from rlhf_mc.config.schema import DataConfig
from rlhf_mc.data.source import AGENT, EXTRA, REFERENCE, UNREAD, is_filled, needed_columns
from rlhf_mc.data.tokenizer import ChatText, ChatTokenizer


class TooLongError(UserError):
    """A prompt of more than data.max_prompt_length tokens, which data.truncation does not allow."""


class RowTokenizer:
    """Makes tokens of rows, by the settings."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        cfg: DataConfig,
        by_rule: bool,
        teacher_columns: Mapping[str | None, str] | None = None,
    ) -> None:
        """by_rule: as `scored_by_rule` returns. teacher_columns: as load_prompts has them."""
        self._tokenizer = tokenizer
        self._chats = ChatTokenizer(tokenizer)
        self._cfg = cfg
        self._by_rule = by_rule
        self._most_characters = cfg.max_prompt_length * _most_characters_of_a_token(tokenizer)

        self._of_teachers = {
            source: RowTokenizer(tokenizer, replace(cfg, prompt_key=column), by_rule)
            for source, column in (teacher_columns or {}).items()
        }

    def teacher_tokens(self, row: dict[str, Any], where: str) -> tuple[list[int], bool]:
        """Do as `tokens` with the prompt of the row's teacher. Return none if it reads the same
        one."""
        by_source = self._of_teachers
        tokenizer = by_source.get(row.get(self._cfg.reward_fn_key), by_source.get(None))
        if tokenizer is None:
            return [], False
        return tokenizer.tokens(row, f"{where}, the teacher's prompt")

    def tokens(self, row: dict[str, Any], where: str) -> tuple[list[int], bool]:
        """Return the tokens of the row's prompt, and whether they were truncated. Raise
        TooLongError if it has too many, and UserError if a column is not as expected. `where`
        begins the message: file and row."""
        self._check_columns(row, where)
        chat, add_special_tokens = self._text(row, where)
        cfg = self._cfg
        limit = cfg.max_prompt_length
        cuts = cfg.truncation != "error"
        hint = (
            f"data.max_prompt_length {limit}; raise that, or set data.filter_overlong_prompts: true"
        )
        if len(chat.text) > self._most_characters and not cuts:
            raise TooLongError(
                f"{where}: the prompt has {len(chat.text)} characters, too many for {hint}"
            )
        token_ids = self._encode(chat, add_special_tokens, where)
        if not token_ids:
            raise UserError(f"{where}: the prompt has no tokens")
        if len(token_ids) <= limit:
            return token_ids, False
        if not cuts:
            raise TooLongError(f"{where}: the prompt has {len(token_ids)} tokens, more than {hint}")
        return truncated(token_ids, limit, cfg.truncation), True

    def _check_columns(self, row: dict[str, Any], where: str) -> None:
        key = self._cfg.reward_fn_key
        for name in needed_columns(self._cfg, self._by_rule):
            if name not in row:  # of a JSONL file: a parquet file has all columns in all rows
                raise UserError(
                    f"{where}: no column {name!r}; its columns are {', '.join(row)[:300] or 'none'}"
                )
        data_source = row.get(key, "")
        if not isinstance(data_source, str):
            raise UserError(f"{where}: column {key!r} is {_shown(data_source)}, expected a string")
        reference = row.get(REFERENCE, {"ground_truth": None})
        if not isinstance(reference, dict) or "ground_truth" not in reference:
            raise UserError(f"{where}: column {REFERENCE!r} has no field 'ground_truth'")
        for name, hint in UNREAD.items():
            if is_filled(row.get(name)):
                raise UserError(
                    f"{where}: column {name!r} is not read{hint}; drop this column, or the rows "
                    "that have it"
                )
        extra_info = row.get(EXTRA) or {}
        if not isinstance(extra_info, dict):
            raise UserError(
                f"{where}: column {EXTRA!r} is not a struct but {type(extra_info).__name__}"
            )

    def _text(self, row: dict[str, Any], where: str) -> tuple[ChatText, bool]:
        """Return the text, and whether the tokenizer has to add special tokens: the text of a
        template has them. Control tokens in messages are text. A prompt without a template is the
        whole text, and may have them."""
        prompt = row.get(self._cfg.prompt_key)
        if isinstance(prompt, str) and prompt.strip() and self._tokenizer.chat_template is None:
            return ChatText(prompt), True
        messages = chat_messages(prompt, where, self._cfg.prompt_key)
        if self._tokenizer.chat_template is None:
            raise UserError(
                f"{where}: the prompt is chat messages, but the tokenizer of "
                f"{self._tokenizer.name_or_path} has no chat template; give plain strings, a "
                "tokenizer with a template, or data.chat_template_path"
            )
        arguments = dict(self._cfg.apply_chat_template_kwargs)
        if "tools" in arguments and row.get(AGENT) not in (None, TOOL_AGENT):
            if row[AGENT] != SINGLE_TURN_AGENT:
                raise UserError(
                    f"{where}: column {AGENT!r} is {_shown(row[AGENT])}; known: {TOOL_AGENT}, "
                    f"{SINGLE_TURN_AGENT}"
                )
            del arguments["tools"]
        add_generation_prompt = arguments.pop("add_generation_prompt", True)
        return self._chats.render(messages, arguments, where, add_generation_prompt), False

    def _encode(self, chat: ChatText, add_special_tokens: bool, where: str) -> list[int]:
        try:
            return self._chats.tokens(chat, add_special_tokens)
        except Exception as error:  # as in load_tokenizer
            reason = one_line(str(error), 300)
            raise UserError(
                f"{where}: the prompt cannot be tokenised ({type(error).__name__}: {reason})"
            ) from error


def truncated(token_ids: list[int], limit: int, side: str) -> list[int]:
    """Return `limit` of the tokens. side: left drops the first, right the last, middle those
    between the first limit // 2 and the last limit - limit // 2 (as verl's data.truncation)."""
    if side == "left":
        return token_ids[-limit:]
    if side == "right":
        return token_ids[:limit]
    first = limit // 2
    return token_ids[:first] + token_ids[first - limit :]


def _most_characters_of_a_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return an upper bound of a prompt's average characters per token: four times the longest
    vocabulary entry.

    Tokenizers of the supported families fall back to bytes, so a token has at most the characters
    of its entry. The factor of four allows for normalisation that composes accents and for special
    tokens that absorb spaces."""
    return 4 * max(16, max(map(len, tokenizer.get_vocab())))


def _shown(value: Any) -> str:
    """Return the value of a column for a message, at most 60 characters."""
    return "null" if value is None else repr(value)[:60]


def chat_messages(prompt: Any, where: str, column: str) -> list[dict[str, Any]]:
    """Return the chat messages of a prompt, without the fields that are null (parquet has each
    field in all messages), and with texts as contents."""
    if isinstance(prompt, str) and prompt.strip():
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise UserError(
            f"{where}: column {column!r} is {_shown(prompt)}, expected chat messages or a "
            "non-empty string"
        )
    messages = []
    for message in json_files.without_nulls(prompt):
        fields = dict(message) if isinstance(message, dict) else {}
        content = _content(fields)
        if not isinstance(fields.get("role"), str) or content is None:
            raise UserError(
                f"{where}: column {column!r} has the message {repr(message)[:60]}, expected a role "
                "and a text content"
            )
        messages.append({**fields, "content": content})
    if not any(message["content"].strip() for message in messages):
        raise UserError(
            f"{where}: column {column!r} is {repr(prompt)[:60]}, whose messages are all empty"
        )
    return messages


def _content(message: dict[str, Any]) -> str | None:
    """Return the content of a message as text: parts of text one after the other, no text beside
    tool calls. Return None if it is no text."""
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, list) and content:
        parts = [part if isinstance(part, dict) else {} for part in content]
        texts = [
            part["text"]
            for part in parts
            if part.get("type") == "text" and isinstance(part.get("text"), str)
        ]
        return "".join(texts) if len(texts) == len(parts) else None
    return content if isinstance(content, str) else None
