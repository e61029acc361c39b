"""Loading of a tokenizer with its chat template, and rendering of chats by the template."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf_mc import json_files
from rlhf_mc.config.errors import NodeError, UserError, error_reason

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files of which a directory with a tokenizer has one."""
LIMIT_SECONDS = 10.0
"""Limit of processor time for one prompt: a template is a program of the checkpoint. Templates take less than a
thousandth of it."""


def load_tokenizer(
    path: str,
    key: str = "tokenizer",
    chat_template_path: str | None = None,
    template_key: str = "data.chat_template_path",
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a Hugging Face directory. Only local files are read and no code of the checkpoint is run.
    chat_template_path: file of the chat template, the setting `template_key`; None: the tokenizer's own.

    Raise UserError, beginning with `key` (the setting that names the directory), if the directory is missing, contains
    no tokenizer, or one without an end-of-sequence token; or if the template cannot be read.
    """
    if not os.path.isdir(path):
        raise UserError(f"{key} {path}: no such directory")
    if not has_tokenizer(path):
        raise UserError(f"{key} {path}: holds no tokenizer (none of {', '.join(FILES)})")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        _check_json(key, os.path.join(path, name))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library has no narrower type for a corrupt file
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{key} {path}: cannot be loaded ({type(error).__name__}: {reason})") from error
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
    """Raised inside the template. Not an Exception, so that the libraries in between do not handle it."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    where: str,
    add_generation_prompt: bool = True,
    template: str = "the tokenizer's chat template",
) -> str:
    """Return the text of the messages, with the generation prompt added unless they end with a response. Raise
    UserError, naming `where` (file and row) and `template`, if the template fails or does not end."""
    try:
        with _time_limit():
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **arguments,
            )
    except _Timeout:
        raise UserError(f"{where}: {template} has not ended after {LIMIT_SECONDS:g} s of processor time") from None
    except Exception as error:  # a template is arbitrary code
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{where}: {template} refuses the prompt ({reason})") from error
    if not isinstance(text, str):
        raise UserError(f"{where}: {template} gives {type(text).__name__}, not a text")
    return text


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Raise _Timeout inside after LIMIT_SECONDS of this process's processor time. In a thread there is no limit.

    A signal interrupts Python code in the main thread. Processor time excludes the time for which a process is
    suspended. SIGVTALRM is neither blocked by preemption.py nor used by another library."""
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
