"""A tokenizer's chat template, which is a program of the checkpoint's: rendered within a time limit, and whatever goes
wrong in it is said in one line.
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
"""Of processor time, for one prompt. Templates take less than a thousandth of it."""


class _TimeIsUp(BaseException):
    """Raised inside the template. Not an Exception: the libraries that it passes through must not handle it."""


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], arguments: Mapping[str, Any], where: str
) -> str:
    """Return the text of a prompt, with the generation prompt added. UserError, naming `where`, if the template fails
    or does not end."""
    try:
        with _time_limit():
            text = tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **dict(arguments)
            )
    except _TimeIsUp:
        raise UserError(
            f"{where}: the tokenizer's chat template has not ended after {LIMIT_SECONDS:g} s of processor time"
        ) from None
    except Exception as error:  # code of the checkpoint's: anything may come
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{where}: the tokenizer's chat template refuses the prompt ({reason})") from error
    if not isinstance(text, str):
        raise UserError(f"{where}: the tokenizer's chat template gives {type(text).__name__}, not a text")
    return text


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Raise _TimeIsUp inside, once this process has computed for LIMIT_SECONDS.

    By a signal, which interrupts Python code in the main thread. Processor time, so that a process that was suspended
    or is slow has as much; and SIGVTALRM, which neither preemption.py blocks nor another library uses."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGVTALRM, _raise)
    # Repeated: the first may come where exceptions are discarded, as in a destructor.
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_SECONDS, LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def _raise(number: int, frame: FrameType | None) -> None:
    raise _TimeIsUp
