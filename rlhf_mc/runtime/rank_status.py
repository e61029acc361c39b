"""The position of a rank in the run (step, phase, line of code), and the heartbeat that carries it
to rank 0."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import PurePath
from types import FrameType

from rlhf_mc.runtime import work

WRITE_PROFILE = "write_profile"
SILENT_PHASES = frozenset({WRITE_PROFILE})
"""Phases in which a rank may send no heartbeat for minutes: torch's profiler holds Python's lock
while it converts and writes a trace. A rank that never returns from there ends the run by the
timeout of collectives."""
_STANDARD_LIBRARY = PurePath(os.__file__).parent


@dataclass
class RankStatus:
    """The position of this process. The loop's thread writes it, the heartbeat thread reads it."""

    step: int = 0
    """0 before the first step."""
    trains: bool = True
    """False on the ranks of a rollout pool, which go through other phases."""
    total_steps: int | None = None
    """Steps of the run at most; None until the loop begins."""
    phases: list[str] = field(default_factory=lambda: ["start"])
    """Phases that the process is in; the innermost is the last."""
    moves: int = 0
    """Phases entered and left so far. All ranks go through the same phases, so a rank with fewer
    moves is behind."""
    since: float = field(default_factory=time.monotonic)
    """Time of the last move."""
    on_move: Callable[[], None] = lambda: None
    """Callback after each move, in the loop's thread."""
    entered: list[float] = field(default_factory=lambda: [time.monotonic()])
    """Time when each of `phases` was entered."""
    last_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that each phase has taken the last time."""

    def enter(self, phase: str) -> None:
        """Enter a phase inside the current one."""
        self.entered.append(time.monotonic())
        self.phases.append(phase)
        self._moved()

    def leave(self) -> None:
        """Leave the innermost phase. Not called if the phase raised: the error report names that
        phase."""
        phase = self.phases.pop()
        self.last_seconds[phase] = time.monotonic() - self.entered.pop()
        self._moved()

    def _moved(self) -> None:
        self.moves += 1
        self.since = time.monotonic()
        self.on_move()


@dataclass(frozen=True)
class Heartbeat:
    """One report of a rank to rank 0."""

    rank: int
    step: int
    phase: str
    moves: int
    seconds: float
    """Seconds since the rank's last move."""
    collective: str
    """Name of the collective that the rank's loop is in; empty if it is in none."""
    code_line: str
    """Code line of the rank's loop: file:line (function)."""
    trains: bool = True
    """As RankStatus."""
    waits: bool = False
    """The rank waits, without a time limit, for ranks of another pool."""
    progress: float = 0.0
    """A number that changes with each move and each unit of work that the rank has done."""

    def position(self) -> str:
        """Return phase, step, time and code line as one phrase."""
        doing = (
            f"in {self.collective}, called from {self.code_line}"
            if self.collective
            else f"at {self.code_line}"
        )
        return (
            f"in phase {self.phase}{f' of step {self.step}' if self.step else ''} for "
            f"{self.seconds:.0f} s, {doing}"
        )


def make_heartbeat(status: RankStatus, rank: int, thread: int) -> Heartbeat:
    """Return the heartbeat of the thread (its identifier) that runs the loop."""
    frame = sys._current_frames().get(thread)
    collective, code_line = describe_stack(traceback.walk_stack(frame) if frame else ())
    seconds = time.monotonic() - status.since
    works = work.current()
    return Heartbeat(
        rank,
        status.step,
        status.phases[-1],
        status.moves,
        seconds,
        collective,
        code_line,
        status.trains,
        waits=any(piece.name == work.WAITING for piece in works),
        progress=status.moves + sum(piece.done + piece.tokens for piece in works),
    )


def describe_error(error: BaseException) -> tuple[str, str]:
    """Return describe_stack of the line where the error was raised."""
    return describe_stack(reversed(list(traceback.walk_tb(error.__traceback__))))


def describe_stack(frames: Iterable[tuple[FrameType, int]]) -> tuple[str, str]:
    """Return the collective that a stack is in (torch's function; empty if none) and "file:line
    (function)".

    frames: from the innermost outwards. The line is the innermost one of this project's or the
    user's code, without the project's wrappers (`_is_library`). Without one, it is the innermost
    one outside of torch's collectives."""
    collective = ""
    innermost = ""
    for frame, line in frames:
        file = PurePath(frame.f_code.co_filename)
        name = frame.f_code.co_name
        if file.name == "distributed_c10d.py":
            collective = name  # the outermost of them is the function that was called
            continue
        code_line = f"{file.name}:{line} ({name})"
        innermost = innermost or code_line
        if not _is_library(file):
            return collective, code_line
    return collective, innermost


def _is_library(file: PurePath) -> bool:
    # Wrappers of torch, and the reporting of a phase: their caller says more.
    if file.parent.match("rlhf_mc/topology") or file.parent.match("rlhf_mc/runtime"):
        return True
    wrappers = (
        "rlhf_mc/platform.py",
        "rlhf_mc/torch_patches.py",
        "rlhf_mc/observability/metrics.py",
    )
    if any(file.match(wrapper) for wrapper in wrappers):
        return True
    if "site-packages" in file.parts:
        return "rlhf_mc" not in file.parts
    return file.is_relative_to(_STANDARD_LIBRARY) or file.name.startswith("<")
