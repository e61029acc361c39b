"""The learning rates that a run has changed by itself, in adjustments.jsonl of its directory: the
changes are in effect after a resume too. Each is a function of the step alone, so that a run that
repeats a step repeats it with the same learning rates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_mc import durable, json_files
from rlhf_mc.config.errors import UserError
from rlhf_mc.run_files import ADJUSTMENTS_FILE, text_lines
from rlhf_mc.topology.consensus import on_rank_0

SUBJECT = "trainer.default_local_dir"
SETTING = "learning_rate_factor"


@dataclass(frozen=True)
class Adjustment:
    """A change of the learning rates from a step on."""

    value: float
    """Factor, on top of earlier ones."""
    after_step: int
    """The adjustment is in effect from the next step on."""
    reason: str
    setting: str = SETTING
    """Name of the change in the file."""


class Adjustments:
    """All adjustments of a run."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / ADJUSTMENTS_FILE
        self._made: list[Adjustment] = []

    def load(self) -> None:
        """Read the file; without one there are none. Raise UserError on every rank if a line is no
        adjustment. Every rank must call it, after the directory belongs to this run."""
        self._made = on_rank_0(self._read, SUBJECT)

    def add(self, adjustment: Adjustment) -> None:
        """Make an adjustment, and write it to the file. Every rank must call it, with the same
        one."""
        self._made.append(adjustment)
        on_rank_0(self._write, SUBJECT)

    @property
    def num_made(self) -> int:
        """Number of adjustments that the run has made."""
        return len(self._made)

    def learning_rate_factor(self, step: int) -> float:
        """Return the factor of the learning rates in a step."""
        return math.prod(made.value for made in self._made if made.after_step < step)

    def in_effect(self, after_step: int) -> list[str]:
        """Return a line on the learning rates in the step after this one, if they are not the
        config's."""
        factor = self.learning_rate_factor(after_step + 1)
        line = (
            f"learning rates are those of the config times {factor:g} ({self._path.name}; without "
            "the file they are the config's)"
        )
        return [line] if factor != 1.0 else []

    def _read(self) -> list[Adjustment]:
        try:
            lines = text_lines(self._path)
        except FileNotFoundError:
            return []
        return [_parsed(self._path, number, line) for number, line in enumerate(lines, start=1)]

    def _write(self) -> None:
        durable.replace(
            self._path, "".join(json.dumps(asdict(made)) + "\n" for made in self._made).encode()
        )


def _parsed(path: Path, number: int, line: str) -> Adjustment:
    """Return the adjustment of a line. The file is replaced atomically: a line that is no
    adjustment was edited."""
    try:
        row: Mapping[str, object] = json_files.parse(line)
        made = Adjustment(**row)  # type: ignore[arg-type]
        valid = (
            made.setting == SETTING
            and isinstance(made.after_step, int)
            and isinstance(made.value, (int, float))
            and math.isfinite(made.value)
        )
    except (ValueError, TypeError):
        valid = False
    if not valid:
        raise UserError(
            f"{path}, line {number}: not an adjustment of this run ({line[:80].rstrip()!r}); "
            "restore the file, or remove it to continue with the settings of the config"
        )
    return made
