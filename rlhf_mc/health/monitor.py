"""The monitor of the health rules: counts the steps in which each rule holds, and says so once. It
writes health.jsonl. The rules themselves are in health/rules.py; what a run does about them is in
trainer/health_watch.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_mc import durable
from rlhf_mc.config.health_schema import HealthConfig
from rlhf_mc.health.conditions import REWARD_WINDOWS, MetricHistory, Observed, RunTraits, Violation
from rlhf_mc.health.rules import RULES, HealthRule
from rlhf_mc.run_files import read_rows

ROLLED_BACK = "rolled back"
_BACK_TO = "rolled_back_to"


@dataclass
class _Count:
    """The steps in which a rule has held."""

    violation: Violation | None = None
    """Of the last of them."""
    consecutive: int = 0
    total: int = 0
    """Steps in which the rule counted."""
    first: int = 0
    """The first of these."""
    last: int = 0


@dataclass(frozen=True)
class Event:
    """A rule begins or ends to count, or the run acts on it."""

    step: int
    rule: HealthRule
    violation: Violation
    event: str
    """begins, ends, acts or ROLLED_BACK."""
    action: str
    """note, warn, stop, ..."""
    count: int
    """Consecutive steps so far; for `ends` the steps of the time that ends."""
    text: str
    """The console line."""
    rolled_back_to: int | None = None
    """ROLLED_BACK: the step from which the run continues."""

    def row(self, run_id: str) -> dict[str, Any]:
        """Return the event as an object of health.jsonl."""
        value = self.violation.value
        back = {} if self.rolled_back_to is None else {_BACK_TO: self.rolled_back_to}
        return {
            "step": self.step,
            "run_id": run_id,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "rule": self.rule.name,
            "metric": self.violation.metric,
            "value": value if math.isfinite(value) else None,
            "bound": self.violation.bound
            + (f" ({self.violation.setting})" if self.violation.setting else ""),
            "count": self.count,
            "action": self.action,
            "event": self.event,
            "text": self.text,
            **back,
        }


@dataclass(frozen=True)
class StepHealth:
    """The health of one step."""

    num_active: int = 0
    """Rules that count in this step."""
    is_healthy: bool = True
    """No rule holds that rules out a roll-back to the step's weights (HealthRule.harms_policy)."""
    acting: tuple[Event, ...] = ()
    """The rules whose response is more than a warning."""


class Monitor:
    """The state of all rules. It is a function of the metrics of the steps so far, so that a
    resumed run rebuilds it from the rows of metrics.jsonl."""

    def __init__(
        self,
        cfg: HealthConfig,
        traits: RunTraits,
        print_line: Callable[[str], object],
        write: Callable[[Event], object],
    ) -> None:
        """print_line: prints a line on the console. write: writes an event to health.jsonl."""
        self._cfg = cfg
        self._traits = traits
        self._print_line = print_line
        self._write = write
        self._history = MetricHistory(REWARD_WINDOWS * cfg.window)
        self._rules = [rule for rule in RULES if rule.response(cfg) != "disable"]
        self._counts = {rule.name: _Count() for rule in self._rules}
        self._acting: set[str] = set()
        """Rules whose action is in health.jsonl since they began to count."""
        self._is_replaying = False

    def replay(self, step: int, metrics: Mapping[str, float]) -> StepHealth:
        """Count an earlier step again, without a line or an event."""
        self._is_replaying = True
        try:
            return self.step(step, metrics)
        finally:
            self._is_replaying = False

    def step(self, step: int, metrics: Mapping[str, float]) -> StepHealth:
        """Check all rules on the metrics of a step. Print and write what begins and ends."""
        seen = Observed(metrics, self._history, self._cfg, self._traits)
        acting = []
        num_active = 0
        is_healthy = True
        for rule in self._rules:
            violation = rule.check(seen)
            count = self._counts[rule.name]
            if violation is None:
                self._end(rule, count, step)
                continue
            is_healthy = is_healthy and not rule.harms_policy
            count.consecutive += 1
            count.violation = violation
            if count.consecutive < rule.steps_needed(self._cfg):
                continue
            num_active += 1
            event = self._event("acts", step, rule, violation, count.consecutive)
            self._add(event, count)
            if event.action not in ("note", "warn"):
                acting.append(event)
                if rule.name not in self._acting:
                    self._emit(event)
        self._acting = set() if self._is_replaying else {event.rule.name for event in acting}
        self._history.add(metrics)
        return StepHealth(num_active, is_healthy, tuple(acting))

    def close(self, step: int) -> None:
        """Print for each rule that has printed a warning in how many steps it has counted."""
        for rule in self._rules:
            count = self._counts[rule.name]
            if count.total and rule.response(self._cfg) != "note":
                span = (
                    f"from {count.first} to {count.last}"
                    if count.total > 1
                    else f"step {count.first}"
                )
                self._print(f"health: {rule.name}: in {count.total} of {step} steps, {span}")

    def _add(self, event: Event, count: _Count) -> None:
        """Count a step of a rule that has held for long enough. Print the full line for the run's
        first such step, and a short one after 10, 100, 1000, ... steps."""
        rule = event.rule
        count.total += 1
        count.first = count.first or event.step
        count.last = event.step
        if event.count == rule.steps_needed(self._cfg):
            self._emit(replace(event, event="begins"))
        if event.action == "note":
            return
        if count.total == 1:
            self._print(event.text)
            self._print(f"  {rule.meaning}; {rule.setting}")
        elif math.log10(count.total).is_integer():
            since = f"in {count.total} steps since {count.first}"
            value = f"{event.violation.metric} is {event.violation.value:.3g}"
            self._print(f"health: step {event.step}: {rule.name} {since}: {value}")

    def _end(self, rule: HealthRule, count: _Count, step: int) -> None:
        if count.violation is not None and count.consecutive >= rule.steps_needed(self._cfg):
            text = f"health: step {step}: {rule.name} ends after {count.consecutive} steps"
            event = self._event("ends", step, rule, count.violation, count.consecutive)
            self._emit(replace(event, text=text))
        count.consecutive = 0

    def _event(
        self, kind: str, step: int, rule: HealthRule, violation: Violation, consecutive: int
    ) -> Event:
        """Return an event of a rule, with the violation as one line. consecutive: steps in which
        the rule has held."""
        lasting = f", for {consecutive} steps" if consecutive > 1 else ""
        text = (
            f"health: step {step}: {rule.name}: {violation.metric} is {violation.value:.3g}, "
            f"{violation.bound}{lasting}"
        )
        return Event(step, rule, violation, kind, rule.response(self._cfg), consecutive, text)

    def _emit(self, event: Event) -> None:
        if not self._is_replaying:
            self._write(event)

    def _print(self, text: str) -> None:
        if not self._is_replaying:
            self._print_line(text)


def keep_events_up_to(path: Path, step: int) -> None:
    """Drop from health.jsonl the events of later steps, and a truncated row. The file is replaced
    atomically.

    The record of a roll-back belongs to the step from which the run continued, or to an earlier one
    if a later roll-back went further back: a run that resumes from there keeps it."""
    lines = []
    earliest = math.inf
    for line, row in reversed(list(read_rows(path))):
        is_roll_back = isinstance(row.get(_BACK_TO), int)
        if is_roll_back:
            earliest = min(earliest, row[_BACK_TO])
        if (earliest if is_roll_back else row["step"]) <= step:
            lines.append(line)
    durable.replace(path, "".join(reversed(lines)).encode())
