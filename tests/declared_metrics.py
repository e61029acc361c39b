"""The check that a run of a test logs declared metrics alone. preloaded.py puts it into the program
of most tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlhf_mc.config.errors import UserError
from rlhf_mc.observability.catalog import undeclared
from rlhf_mc.observability.sinks import Sinks

Log = Callable[[Sinks, int, Mapping[str, float]], None]


def declared_only(log: Log) -> Log:
    """Return a Sinks.log that raises UserError, which ends the run on all ranks, if a metric is not
    declared."""

    def checked(sinks: Sinks, step: int, metrics: Mapping[str, float]) -> None:
        if missing := undeclared(metrics):
            raise UserError(f"not declared in metrics.yaml: {', '.join(missing)}")
        log(sinks, step, metrics)

    return checked
