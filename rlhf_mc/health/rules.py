"""The health rules, as rules.yaml lists them: the condition of each, what it means, and which
setting to turn. Bounds that are settings are in config/health_schema.py, conditions that are
functions in health/conditions.py, counting and printing in health/monitor.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlhf_mc.config.health_schema import HealthConfig, listed_responses
from rlhf_mc.config.yaml_reader import parse_yaml
from rlhf_mc.health.conditions import CONDITIONS, Observed, Violation


@dataclass(frozen=True)
class HealthRule:
    """A rule on the metrics of a step. It holds where a metric is outside of its bound or, without
    bounds, where its function says so."""

    name: str
    meaning: str
    setting: str
    """The setting to turn, and in which direction. With `meaning` it is one line of the console."""
    more: str = ""
    """Further advice, for the page of rules."""
    condition: str = ""
    """The condition in words, with the settings of health by their names, where the bounds do not
    say it."""
    above: Mapping[str, str | float] = field(default_factory=dict)
    """Metric -> its upper bound: a number or a setting of health."""
    below: Mapping[str, str | float] = field(default_factory=dict)
    """Metric -> its lower bound."""
    above_median: Mapping[str, float] = field(default_factory=dict)
    """Metric -> its upper bound over its median in the window before."""
    below_median: Mapping[str, float] = field(default_factory=dict)
    """Metric -> its lower bound over that median."""
    after: Literal["at once", "patience", "window"] = "patience"
    """The consecutive steps after which it counts: one, health.patience or health.window."""
    harms_policy: bool = False
    """The run must not roll back to the weights of a step in which the condition holds."""
    default: Literal["note", "warn", "stop"] = "warn"
    """The response to it, unless a list of the settings has another."""

    def check(self, seen: Observed) -> Violation | None:
        """Return the first metric that is outside of its bound, or what the function returns."""
        if self.name in CONDITIONS:
            return CONDITIONS[self.name](seen)
        return (
            seen.outside("above", self.above)
            or seen.outside("below", self.below)
            or seen.beyond_median("above", self.above_median)
            or seen.beyond_median("below", self.below_median)
        )

    def response(self, cfg: HealthConfig) -> str:
        """Return the response to the rule: disable, note, warn, stop, roll_back or
        fixed_kl_coef."""
        return next(iter(listed_responses(cfg, self.name)), self.default)

    def steps_needed(self, cfg: HealthConfig) -> int:
        """Return the consecutive steps after which the rule counts."""
        return {"at once": 1, "patience": cfg.patience, "window": cfg.window}[self.after]


def _read(path: Path) -> tuple[HealthRule, ...]:
    text = path.read_text(encoding="utf-8")
    return tuple(HealthRule(**rule) for rule in parse_yaml(text, str(path)))


RULES = _read(Path(__file__).with_name("rules.yaml"))
"""All rules, in the order in which their lines are printed."""
