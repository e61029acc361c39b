"""The settings that a run has changed by itself, in adjustments.jsonl of its directory: they are in
effect after a resume too. Each is a function of the step alone, so that a run that repeats a step
repeats it with the same settings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from rlhf_mc import durable, json_files
from rlhf_mc.config.errors import UserError
from rlhf_mc.run_files import ADJUSTMENTS_FILE, text_lines
from rlhf_mc.topology.consensus import on_rank_0

SUBJECT = "trainer.default_local_dir"
Setting = Literal["learning_rate_factor", "kl_coef", "max_token_len"]
_SETTINGS = get_args(Setting)


@dataclass(frozen=True)
class Adjustment:
    """One setting, changed from a step on."""

    setting: Setting
    value: float
    """learning_rate_factor: factor of the learning rates, on top of earlier ones. kl_coef: the
    coefficient of the KL term. max_token_len: the token budget of an update's micro-batches."""
    after_step: int
    """The adjustment is in effect from the next step on."""
    reason: str
    phase: str = ""
    """max_token_len: "update_actor" or "update_critic"."""
    update: int = 0
    """max_token_len: the first update of the next step that has it, from 0."""


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

    def num_made(self, setting: str) -> int:
        """Return how many adjustments of a setting the run has made."""
        return sum(made.setting == setting for made in self._made)

    def learning_rate_factor(self, step: int) -> float:
        """Return the factor of the learning rates in a step."""
        factors = [
            made.value for made in self._all("learning_rate_factor") if made.after_step < step
        ]
        return math.prod(factors)

    def kl_coef(self, step: int) -> float | None:
        """Return the coefficient that the KL term has in a step in place of the configured one;
        None: no other."""
        return next(
            (made.value for made in reversed(self._all("kl_coef")) if made.after_step < step), None
        )

    def max_token_len(self, phase: str, step: int, update: int) -> int | None:
        """Return the token budget of an update's micro-batches in place of the configured one;
        None: no other."""
        made = [
            a
            for a in self._all("max_token_len")
            if a.phase == phase and (a.after_step + 1, a.update) <= (step, update)
        ]
        return min((int(a.value) for a in made), default=None)

    def in_effect(self, after_step: int) -> list[str]:
        """Return a line for each setting that differs from the config in the step after this
        one."""
        step = after_step + 1
        lines = []
        if (factor := self.learning_rate_factor(step)) != 1.0:
            lines.append(f"learning rates are those of the config times {factor:g}")
        if (coef := self.kl_coef(step)) is not None:
            lines.append(f"the KL coefficient is {coef:g}")
        for phase in sorted({made.phase for made in self._all("max_token_len")}):
            if (tokens := self.max_token_len(phase, step, 0)) is not None:
                lines.append(f"{phase} has micro-batches of at most {tokens} tokens")
        return [
            f"{line} ({self._path.name}; without the file they are the config's)" for line in lines
        ]

    def _all(self, setting: str) -> list[Adjustment]:
        return [made for made in self._made if made.setting == setting]

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
            made.setting in _SETTINGS
            and isinstance(made.after_step, int)
            and isinstance(made.update, int)
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
