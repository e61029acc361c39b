"""The phase that rank 0 is in, with rate and time left, while it lasts: the bottom line of a
terminal, rewritten every second; in a file a line after every ten seconds without one, and none for
phases of a few seconds.

A thread reads the position (rank_status.py) and the counts (work.py) of this process, so that a
phase which is stuck in one long call shows that it lasts, and a phase that counts its work does not
wait for the console. It is no part of the heartbeat thread: that one needs a second rank, and the
process group, which is what the start of a run waits for.

The line is drawn by tqdm rather than rich: tqdm is smaller, and the libraries that print bars of
their own use it.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from tqdm import tqdm

from rlhf_mc.runtime import console, work
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.runtime.work import Work, share_done

INDENT = "  "
"""Prefix of a line in a file, which sets it off from the table of steps."""
TICK_SECONDS = 1.0
AROUND_OTHERS = ("fit", "step")
"""Phases that consist of other phases: their names say nothing."""
SILENCE_SECONDS = 10.0
"""A file gets a line after this time without one."""
MIN_SHARE = 0.01
"""Share of the units from which the time left is estimated."""
SHORT_SECONDS = 3.0
"""A phase that has not lasted as long yet gets no line in a file."""


@contextlib.contextmanager
def phase_progress(status: RankStatus, wanted: bool = True) -> Iterator[None]:
    """Show on standard output what this process is doing while the body runs, if `wanted`."""
    if not wanted:
        yield
        return
    progress = PhaseProgress(status, sys.stdout)
    progress.start()
    try:
        yield
    finally:
        progress.close()


class PhaseProgress:
    """The line of one process."""

    def __init__(
        self, status: RankStatus, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """clock: returns seconds, as time.monotonic does."""
        self._status = status
        self._stream = stream
        self._clock = clock
        self._bottom = ProgressLine(stream) if _has_columns(stream) else None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlhf_mc progress", daemon=True)

    def start(self) -> None:
        """Start the thread that calls `tick` every second."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and clear the line."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(2 * TICK_SECONDS)
        if self._bottom is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bottom.close()

    def tick(self) -> None:
        """Show the line if it is time to. Raise OSError or ValueError if the stream is full or
        closed."""
        now = self._clock()
        if self._bottom is not None:
            columns = console.terminal_columns() - 1
            self._bottom.show(phase_line(self._status, work.current(), now, 0.0, columns))
        elif now - console.last_line() >= SILENCE_SECONDS:
            columns = console.COLUMNS - len(INDENT)
            line = phase_line(self._status, work.current(), now, SHORT_SECONDS, columns)
            if line:
                console.write(INDENT + line, self._stream)

    def _run(self) -> None:
        # A stream that is full or closed now may be written later.
        while not self._ended.wait(TICK_SECONDS):
            with contextlib.suppress(OSError, ValueError):
                self.tick()


class ProgressLine:
    """One line at the bottom of a terminal, rewritten in place."""

    def __init__(self, stream: TextIO) -> None:
        self._line = _TextLine(bar_format="{desc}", file=stream, leave=False, dynamic_ncols=True)
        self._stream = stream
        console.set_bottom_line(self.clear)

    def show(self, text: str) -> None:
        """Replace the text; an empty one clears the line."""
        with console.lock:
            if text:
                self._line.set_description_str(text)
                # what others print overwrites the line instead of lengthening it
                self._stream.write("\x1b[K\r")
                self._stream.flush()
            else:
                self.clear()

    def clear(self) -> None:
        self._line.clear()
        self._stream.flush()

    def close(self) -> None:
        """Clear the line for good."""
        with console.lock:
            console.set_bottom_line(None)
            self._line.close()
            self._stream.flush()


class _TextLine(tqdm):
    """A bar without a bar, which starts no thread of its own."""

    monitor_interval = 0


_TextLine.set_lock(console.lock)


def _has_columns(stream: TextIO) -> bool:
    """Return whether the stream is a terminal that a line fits in. Some, as of containers, report a
    width of 0."""
    try:
        return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):
        return False


def phase_line(
    status: RankStatus, works: Sequence[Work], now: float, shortest: float, columns: int
) -> str:
    """Return the line for the innermost phase that has lasted `shortest` seconds, such as

        step 12/300 gen 44% 115/256 responses, 3.10k tok/s, 0:20, 0:12 left

    with at most `columns` characters; an empty text if there is no such phase. works: as
    work.current returns them."""
    # another thread may be changing both
    phases = list(zip(status.phases, status.entered, strict=False))
    lasting = [i for i, (_, entered) in enumerate(phases) if now - entered >= shortest]
    if not lasting:
        return ""
    name, entered = phases[lasting[-1]]
    inside = (
        [piece for piece in works if piece.start >= entered]
        if lasting[-1] == len(phases) - 1
        else []
    )
    head = (
        phases[0][0] if status.total_steps is None else f"step {status.step}/{status.total_steps}"
    )
    head += "" if name in (phases[0][0], *AROUND_OTHERS) else f" {name}"
    last_seconds = status.last_seconds.get(name)
    named = [piece for piece in inside if piece.name]
    if named:
        head += f": {named[-1].name}"
        entered = named[-1].start
        last_seconds = None  # of the phase, not of this part
    return _fitted(head, measures(inside, now, now - entered, last_seconds), columns)


def measures(
    works: Sequence[Work], now: float, seconds: float, last_seconds: float | None
) -> list[str]:
    """Return the counts, rate, time so far and time left that are known. seconds: time in the phase
    so far. last_seconds: time of the phase when it last ran.

    The time left follows from the units done. For responses, which end late and together, it
    follows from last_seconds until that time is over."""
    texts = []
    share = share_done(works)
    counts = next((piece for piece in works if piece.total > 0), None)
    left: float | None = None
    if counts is not None and share is not None:
        seconds = now - counts.start
        texts.append(
            f"{math.floor(100 * share)}% {counts.done:.0f}/{counts.total:.0f} {counts.unit}"
        )
        texts += _rate(counts, seconds)
        left = seconds * (1.0 / share - 1.0) if share >= MIN_SHARE else None
    if (
        last_seconds is not None
        and last_seconds > seconds
        and (left is None or (counts and counts.tokens))
    ):
        left = last_seconds - seconds
    texts.append(format_seconds(seconds))
    if left is not None:
        texts.append(f"{format_seconds(left)} left")
    return texts


def _rate(counts: Work, seconds: float) -> list[str]:
    if seconds <= 0:
        return []
    if counts.tokens:
        return [f"{tqdm.format_sizeof(counts.tokens / seconds)} tok/s"]
    if counts.done == 0:
        return []
    rate = counts.done / seconds
    return [f"{tqdm.format_sizeof(rate)}/s" if rate >= 1 else f"{1 / rate:.1f} s each"]


def _fitted(head: str, texts: Sequence[str], columns: int) -> str:
    """Return head and measures in at most `columns`. The last measure, the time left, is the last
    to be left out."""
    texts = list(texts)
    while len(texts) > 1 and len(", ".join(texts)) > columns - 24:
        texts.pop(-2)
    tail = " " + ", ".join(texts)
    room = max(columns - len(tail), 0)
    if len(head) > room:
        head = head[: max(room - 2, 0)] + ".."[:room]
    return (head + tail)[:columns]


def format_seconds(seconds: float) -> str:
    """Return m:ss, or h:mm:ss from one hour on."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours}:{minutes:02d}:{whole_seconds:02d}" if hours else f"{minutes}:{whole_seconds:02d}"
    )
