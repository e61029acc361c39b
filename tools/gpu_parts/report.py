"""The result of a part: its figures, and what was wrong."""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"


class _CaseFailed(Exception):
    """Ends a part whose failure is recorded."""


class Skip(Exception):
    """Raised by a part that cannot run here. Its message is the reason."""


@dataclass
class Result:
    """The result of one part on one rank, as plain values."""

    verdict: str = FAILED
    reason: str = ""
    """Of a failed or skipped part; several reasons are joined by "; "."""
    seconds: float = 0.0
    summary: str = ""
    """The main figures as text, for the table."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Each with its unit at the end of its name."""
    unmeasured: list[str] = field(default_factory=list)
    """Expectations that a GPU has not met, and that have not been measured on any GPU yet."""
    log: str = ""
    """The end of the process's output."""


class Report:
    """Takes the figures of a part while it runs. A part that dies leaves those that it has
    recorded."""

    def __init__(self, path: Path | None = None) -> None:
        """path: the JSON file that is kept up to date; None: no file."""
        self.result = Result()
        self._path = path
        self._failures: list[str] = []

    def record(self, **figures: Any) -> None:
        """Add figures. Their names end with the unit."""
        self.result.figures.update(figures)
        self._write()

    def summarize(self, text: str) -> None:
        """Set the text for the table."""
        self.result.summary = text
        self._write()

    def check(self, is_right: bool, failure: str) -> None:
        """Let the part fail, after all of its other checks, unless this is right."""
        if not is_right:
            self._failures.append(failure)

    def expect(self, is_met: bool, failure: str) -> None:
        """Do as `check` on a CPU. On a GPU, where the expected figure has not been measured yet,
        only report that it
        is not met."""
        from rlhf_mc import platform  # it imports torch, which the command itself does without

        if not platform.use_cuda():
            self.check(is_met, failure)
        elif not is_met:
            self.result.unmeasured.append(failure)
            self._write()

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Run one of several independent cases: an exception lets the part fail, and the next case
        runs. On several ranks the part ends, since the others may wait for this one in the middle
        of the case."""
        try:
            yield
        except Exception as error:  # a case that fails is part of the report
            traceback.print_exc()
            self.check(False, f"{name}: {_line(error)}")
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise _CaseFailed from error

    @contextlib.contextmanager
    def verdict(self) -> Iterator[None]:
        """Run the whole part, and set its verdict."""
        try:
            yield
        except Skip as reason:
            self.result.verdict = SKIPPED
            self.result.reason = str(reason)
            self._write()
            return
        except _CaseFailed:
            pass
        except Exception as error:  # a case that fails is part of the report
            traceback.print_exc()
            self.check(False, _line(error))
        self.result.verdict = FAILED if self._failures else PASSED
        self.result.reason = "; ".join(self._failures)
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(asdict(self.result)))
            part.replace(self._path)


def _line(error: BaseException) -> str:
    """Return the exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__
