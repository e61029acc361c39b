"""Rendering of a tokenizer's chat template. A template is a program of the checkpoint, so it has a time limit, and each
of its failures becomes one line.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_mc.config.errors import UserError

LIMIT_SECONDS = 10.0
"""Limit of processor time for one prompt. Templates take less than a thousandth of it."""


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
