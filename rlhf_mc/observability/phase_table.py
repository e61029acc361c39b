"""The table of a profiled step: seconds of each phase by rank, and the slowest rank with its
amounts of work beside the others'. Pure functions of the times of all ranks; profile.py measures
and prints.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_mc.runtime.console import COLUMNS

MOST_COLUMNS = 8
"""Ranks with a column of their own; more are summarised."""
_LEAST_GAP = 0.1
"""Minimum excess of the slowest rank's own work over the others', as a share of the phase."""
_LEAST_SECONDS = 0.02
"""Minimum excess in seconds."""
STEP = "step"
"""The phase that consists of others."""
REST = "between_phases"
"""The time that belongs to no phase."""


@dataclass(frozen=True)
class RankTimes:
    """The times of one rank in one step."""

    host: str
    is_traced: bool
    """True where the rank writes a trace, which takes time."""
    seconds: dict[str, float]
    """Seconds by phase."""
    waiting: dict[str, float]
    """Seconds in collectives and messages by phase, part of `seconds`."""
    amounts: dict[str, dict[str, float]] = field(default_factory=dict)
    """Amounts by phase and kind of work: tokens, responses, file_seconds, reward_seconds."""

    def work(self, phase: str) -> float:
        """Return the seconds of the rank's own work in a phase."""
        return max(0.0, self.seconds.get(phase, 0.0) - self.waiting.get(phase, 0.0))

    def amount(self, phase: str, kind: str) -> float:
        """Return the amount of a kind of work in a phase."""
        return self.amounts.get(phase, {}).get(kind, 0.0)


def with_rest(rank: RankTimes, whole: str, span: float) -> RankTimes:
    """Return the times with REST in place of the phase `whole`, which has taken `span` seconds and
    contains all others."""
    inner = [name for name in rank.seconds if name != STEP]
    counted = rank.amounts.get(whole, {})
    kinds = {
        kind: total - sum(rank.amount(name, kind) for name in inner)
        for kind, total in counted.items()
    }
    rest_waiting = rank.waiting[whole] - sum(rank.waiting.get(name, 0.0) for name in inner)
    rest = max(0.0, span - sum(rank.seconds[name] for name in inner))
    return replace(
        rank,
        seconds={**rank.seconds, REST: rest},
        waiting={**rank.waiting, REST: min(rest, max(0.0, rest_waiting))},
        amounts={**rank.amounts, REST: kinds},
    )


def phase_names(ranks: Sequence[RankTimes]) -> list[str]:
    """Return the phases of the step in the order in which the first rank has ended them; the whole
    step last."""
    names = dict.fromkeys(name for rank in ranks for name in rank.seconds)
    return sorted(names, key=lambda name: name == STEP)


def slowest_rank(ranks: Sequence[RankTimes], phase: str) -> int | None:
    """Return the rank with the most own work in a phase; None if the ranks are balanced."""
    if len(ranks) == 1 or phase == STEP:
        return None
    work = [rank.work(phase) for rank in ranks]
    slowest = max(range(len(ranks)), key=work.__getitem__)
    longest = max(rank.seconds.get(phase, 0.0) for rank in ranks)
    return slowest if _excess(work, slowest) >= max(_LEAST_SECONDS, _LEAST_GAP * longest) else None


def slowest_line(ranks: Sequence[RankTimes], phase: str, slowest: int) -> str:
    """Return one phrase: the slowest rank of a phase, its host, and its amounts of work beside the
    others' median."""
    kinds = dict.fromkeys(kind for rank in ranks for kind in rank.amounts.get(phase, {}))
    amounts = {kind: [rank.amount(phase, kind) for rank in ranks] for kind in kinds}
    decimals = {kind: 2 if kind.endswith("_seconds") else 0 for kind in kinds}
    compared = [
        (
            f"{kind} {counts[slowest]:.{decimals[kind]}f} against "
            f"{_median_of_others(counts, slowest):.{decimals[kind]}f}"
        )
        for kind, counts in amounts.items()
    ]
    others = "the other" if len(ranks) == 2 else "the others"
    head = f"{phase}: {others} waited for rank {slowest} (host {ranks[slowest].host})"
    return ": ".join([head, *([", ".join(compared)] if compared else [])])


def _median_of_others(values: Sequence[float], rank: int) -> float:
    return statistics.median(value for i, value in enumerate(values) if i != rank)


def _excess(values: Sequence[float], rank: int) -> float:
    return values[rank] - _median_of_others(values, rank)


def as_json(step: int, ranks: Sequence[RankTimes]) -> dict[str, Any]:
    """Return the content of phases.json. Lists are by rank."""
    phases: dict[str, Any] = {}
    for name in phase_names(ranks):
        slowest = slowest_rank(ranks, name)
        kinds = dict.fromkeys(kind for rank in ranks for kind in rank.amounts.get(name, {}))
        phases[name] = {
            "seconds": [round(rank.seconds.get(name, 0.0), 6) for rank in ranks],
            "waiting": [round(rank.waiting.get(name, 0.0), 6) for rank in ranks],
            **{kind: [round(rank.amount(name, kind), 6) for rank in ranks] for kind in kinds},
            "slowest": slowest,
        }
    return {
        "step": step,
        "ranks": len(ranks),
        "hosts": [rank.host for rank in ranks],
        "traced": [r for r, rank in enumerate(ranks) if rank.is_traced],
        "phases": phases,
    }


def as_text(step: int, ranks: Sequence[RankTimes]) -> list[str]:
    """Return the table in lines of at most COLUMNS columns: own work, waiting, and for each phase
    that is not balanced the slowest rank."""
    lines = [f"profile of step {step}: seconds of each rank's own work and of its waiting"]
    lines += _columns(ranks) if len(ranks) <= MOST_COLUMNS else _summaries(ranks)
    for phase in phase_names(ranks):
        slowest = slowest_rank(ranks, phase)
        if slowest is not None:
            line = slowest_line(ranks, phase, slowest)
            lines += textwrap.wrap(line, COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
    return lines


def _columns(ranks: Sequence[RankTimes]) -> list[str]:
    heads = "".join(f"{f'rank {r}' + '*' * rank.is_traced:>8}" for r, rank in enumerate(ranks))
    lines = [
        f"{'phase':16}{heads}{'   * traced' if any(rank.is_traced for rank in ranks) else ''}"[
            :COLUMNS
        ].rstrip()
    ]
    for phase in phase_names(ranks):
        lines.append(f"{phase[:16]:16}" + "".join(_cell(rank.work(phase)) for rank in ranks))
        waiting = [rank.waiting.get(phase, 0.0) for rank in ranks]
        if max(waiting) >= 0.005:
            lines.append(f"{'  waiting':16}" + "".join(map(_cell, waiting)))
    return lines


def _summaries(ranks: Sequence[RankTimes]) -> list[str]:
    lines = [f"{'phase':16}{'own work: min':>18}{'median':>9}{'max':>18}{'most waiting':>18}"]
    for phase in phase_names(ranks):
        work = [rank.work(phase) for rank in ranks]
        waiting = [rank.waiting.get(phase, 0.0) for rank in ranks]
        low = _with_rank(work, work.index(min(work)))
        high = _with_rank(work, work.index(max(work)))
        most = _with_rank(waiting, waiting.index(max(waiting)))
        lines.append(f"{phase[:16]:16}{low}{_cell(statistics.median(work)):>9}{high}{most}")
    return lines


def _with_rank(values: Sequence[float], rank: int) -> str:
    return f"{_cell(values[rank]).strip() + f' (rank {rank})':>18}"


def _cell(seconds: float) -> str:
    """Return a number of seconds in 8 columns."""
    return f"{seconds:8.2f}" if seconds < 1000 else f"{seconds:8.0f}"
