"""Where each rank is in the run, and what follows from that: who is silent, who keeps the others waiting. No threads
and no connections here (see heartbeat.py).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import PurePath
from types import FrameType, TracebackType

_STANDARD_LIBRARY = PurePath(os.__file__).parent
MOST_NAMED = 4
"""Ranks that one message names; with more it says how many."""


@dataclass
class RankStatus:
    """Where this process is. The loop writes it, the watchdog's thread reads it."""

    step: int = 0
    """0 before the first."""
    phases: list[str] = field(default_factory=lambda: ["start"])
    """The innermost last."""
    moves: int = 0
    """Phases entered and left so far. All ranks make the same moves, so the smaller number is behind."""
    since: float = field(default_factory=time.monotonic)
    on_move: Callable[[], None] = lambda: None
    """Called after each move, in the loop's thread."""

    def enter(self, phase: str) -> None:
        self.phases.append(phase)
        self._moved()

    def leave(self) -> None:
        """Out of the innermost phase. Not where it raised: that is the place to report."""
        self.phases.pop()
        self._moved()

    def _moved(self) -> None:
        self.moves += 1
        self.since = time.monotonic()
        self.on_move()


@dataclass(frozen=True)
class Heartbeat:
    """What a rank tells of itself."""

    rank: int
    step: int
    phase: str
    moves: int
    seconds: float
    """For how long it has not moved."""
    collective: str
    """The collective that its loop is in; empty: none."""
    at: str
    """The line of code that its loop is at."""

    def where(self) -> str:
        doing = f"in {self.collective}, called from {self.at}" if self.collective else f"at {self.at}"
        return f"in phase {self.phase}{f' of step {self.step}' if self.step else ''} for {self.seconds:.0f} s, {doing}"


def heartbeat_of(place: RankStatus, rank: int, thread: int) -> Heartbeat:
    """What to tell of the given thread (its identifier), which runs the loop."""
    collective, at = describe_stack(_outwards(sys._current_frames().get(thread)))
    seconds = time.monotonic() - place.since
    return Heartbeat(rank, place.step, place.phases[-1], place.moves, seconds, collective, at)


def describe_error(error: BaseException) -> tuple[str, str]:
    """As describe_stack, of where the error was raised."""
    frames = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return describe_stack(reversed(frames))


def describe_stack(frames: Iterable[tuple[FrameType, int]]) -> tuple[str, str]:
    """The collective (torch's function, empty if none) and the line that calls it or else is being run; frames from the
    innermost outwards. Library code is passed over where a line of the run's own or of the user's is below it."""
    collective, first = "", ""
    for frame, line in frames:
        file, name = PurePath(frame.f_code.co_filename), frame.f_code.co_name
        if file.name == "distributed_c10d.py":
            collective = name  # the outermost of them is what was called
            continue
        at = f"{file.name}:{line} ({name})"
        first = first or at
        if not _is_library(file):
            return collective, at
    return collective, first


def _is_library(file: PurePath) -> bool:
    if file.parent.match("rlhf_mc/topology") or file.match("rlhf_mc/platform.py"):
        return True  # what only hands on to torch says less than who asked for it
    if "site-packages" in file.parts:
        return "rlhf_mc" not in file.parts
    return file.is_relative_to(_STANDARD_LIBRARY) or file.name.startswith("<")


def _outwards(frame: FrameType | None) -> Iterable[tuple[FrameType, int]]:
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


class Register:
    """What rank 0 has heard of all ranks. Times are seconds of one monotonic clock."""

    def __init__(self, hosts: list[str], interval: float, now: float) -> None:
        """interval: how often a rank is to be heard."""
        self._hosts, self._interval = hosts, interval
        self.num_ranks = len(hosts)
        self._heard = [now] * len(hosts)
        self._beats: dict[int, Heartbeat] = {}
        self._gone: dict[int, float] = {}
        self._warned: set[tuple[int, int]] = set()

    def heard(self, beat: Heartbeat, now: float) -> None:
        self._heard[beat.rank] = now
        self._beats[beat.rank] = beat
        self._gone.pop(beat.rank, None)

    def said_goodbye(self, rank: int) -> None:
        """Its silence means nothing from here on."""
        self._heard[rank] = float("inf")
        self._gone.pop(rank, None)

    def cut_off(self, rank: int, now: float) -> None:
        """Its connection was closed from the other end."""
        if self._heard[rank] != float("inf"):
            self._gone.setdefault(rank, now)

    def forgive(self, now: float) -> None:
        """All that was not heard was not listened to."""
        self._heard = [max(then, now) for then in self._heard]
        self._gone = dict.fromkeys(self._gone, now)

    def verdict(self, now: float, timeout: float, gone_after: float) -> str:
        """One line if a rank is not heard of any more, else empty."""
        gone = [rank for rank, since in self._gone.items() if now - since > min(gone_after, timeout)]
        if gone:
            return self._name(gone, lambda rank: f"is gone: its process has ended; last {self._last(rank)}")
        silent = [rank for rank, then in enumerate(self._heard) if now - then > timeout]
        return self._name(silent, lambda rank: self._silence(rank, now))

    def behind(self, now: float) -> str:
        """Who keeps the others waiting, as far as it shows: who is silent; else who has made fewer moves than others;
        else who is in no collective while others are. Empty where nobody stands out."""
        silent = [rank for rank, then in enumerate(self._heard) if now - then > 2 * self._interval]
        if silent:
            return self._name(silent, lambda rank: self._silence(rank, now))
        beats = list(self._beats.values())
        furthest = max((beat.moves for beat in beats), default=0)
        late = [beat.rank for beat in beats if beat.moves < furthest]
        if not late and any(beat.collective for beat in beats):
            late = [beat.rank for beat in beats if not beat.collective]
        return self._name(late, lambda rank: f"is behind: {self._beats[rank].where()}")

    def slow(self, now: float, seconds: float) -> str:
        """As `behind`, where no rank has moved for so long and some are behind the others; once for each place."""
        beats = list(self._beats.values())
        furthest = max((beat.moves for beat in beats), default=0)
        late = [beat for beat in beats if beat.moves < furthest]
        if not late or len(late) == len(beats) or min(beat.seconds for beat in beats) < seconds:
            return ""
        places = {(beat.rank, beat.moves) for beat in late}
        if places <= self._warned:
            return ""
        self._warned |= places
        waiting = next(beat for beat in beats if beat.moves == furthest)
        return f"{self.behind(now)}; rank {waiting.rank} waits {waiting.where()}"

    def _silence(self, rank: int, now: float) -> str:
        return f"has not been heard of for {now - self._heard[rank]:.0f} s, last {self._last(rank)}"

    def _last(self, rank: int) -> str:
        beat = self._beats.get(rank)
        return "before it first spoke" if beat is None else f"in phase {beat.phase} of step {beat.step}"

    def _name(self, ranks: list[int], what: Callable[[int], str]) -> str:
        if not ranks:
            return ""
        named = [f"rank {rank} ({self._hosts[rank]}) {what(rank)}" for rank in sorted(ranks)[:MOST_NAMED]]
        return "; ".join(named) + (f"; and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else "")
