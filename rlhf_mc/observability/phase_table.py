"""The table of a profiled step: seconds of each phase by rank, the slowest rank, and why the others waited for it. Pure
functions of the times of all ranks; profile.py measures and prints.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

WIDTH = 80
"""Columns of the console."""
MOST_COLUMNS = 8
"""Ranks with a column of their own; more are summarised."""
_LEAST_GAP = 0.1
"""Share of a phase by which the slowest rank's own work exceeds the others' before it is named."""
_LEAST_SECONDS = 0.02
"""The same in seconds."""
_LEAST_SHARE = 0.5
"""Share of the excess that a cause must explain."""
_ALIKE = 0.05
"""Relative difference up to which amounts of work are called the same."""
_REWARD_FUNCTIONS = "its reward functions took longer"
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
    stage: int
    """The actor's pipeline stage, 0 for the first."""
    seconds: dict[str, float]
    """By phase."""
    waiting: dict[str, float]
    """By phase, the part of `seconds` spent in collectives and messages."""
    amounts: dict[str, dict[str, float]] = field(default_factory=dict)
    """By phase and kind of work: tokens, responses, file_seconds, reward_seconds."""

    def work(self, phase: str) -> float:
        """Return the seconds of the rank's own work in a phase."""
        return max(0.0, self.seconds.get(phase, 0.0) - self.waiting.get(phase, 0.0))

    def amount(self, phase: str, kind: str) -> float:
        """Return the amount of a kind of work in a phase."""
        return self.amounts.get(phase, {}).get(kind, 0.0)


def with_rest(rank: RankTimes, whole: str, span: float) -> RankTimes:
    """Return the times with REST in place of the phase `whole`, which has taken `span` seconds and contains all
    others."""
    inner = [name for name in rank.seconds if name != STEP]
    counted = rank.amounts.get(whole, {})
    kinds = {kind: total - sum(rank.amount(name, kind) for name in inner) for kind, total in counted.items()}
    rest_waiting = rank.waiting[whole] - sum(rank.waiting.get(name, 0.0) for name in inner)
    rest = max(0.0, span - sum(rank.seconds[name] for name in inner))
    return replace(
        rank,
        seconds={**rank.seconds, REST: rest},
        waiting={**rank.waiting, REST: min(rest, max(0.0, rest_waiting))},
        amounts={**rank.amounts, REST: kinds},
    )


def phase_names(ranks: Sequence[RankTimes]) -> list[str]:
    """Return the phases of the step in the order in which the first rank has ended them; the whole step
    last."""
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


def waiting_reason(ranks: Sequence[RankTimes], phase: str, slowest: int) -> str:
    """Return in words why the slowest rank of a phase took longer than the others."""
    work = [rank.work(phase) for rank in ranks]
    ratio = work[slowest] / max(_median_of_others(work, slowest), 1e-9)
    compared = ""
    for kind in ("tokens", "responses"):
        amounts = [rank.amount(phase, kind) for rank in ranks]
        own = amounts[slowest]
        others = _median_of_others(amounts, slowest)
        if not others:
            continue
        if own > others and own / others - 1 >= _LEAST_SHARE * (ratio - 1):
            return f"it had {own / others:.2f}x the {kind}: {own:.0f} against {others:.0f}"
        is_same = abs(own / others - 1) < _ALIKE
        compared = compared or (f"as many {kind}; " if is_same else f"{own:.0f} {kind} against {others:.0f}; ")
    return compared + _other_reason(ranks, phase, slowest, work)


def _other_reason(ranks: Sequence[RankTimes], phase: str, slowest: int, work: Sequence[float]) -> str:
    """Return the reason of a rank whose amounts of work do not explain its time."""
    files = [rank.amount(phase, "file_seconds") for rank in ranks]
    stages = [rank.stage for rank in ranks]
    hosts = [rank.host for rank in ranks]
    if _excess(files, slowest) >= _LEAST_SHARE * _excess(work, slowest):
        return f"it wrote files for {files[slowest]:.2f} s"
    rewards = [rank.amount(phase, "reward_seconds") for rank in ranks]
    if _excess(rewards, slowest) >= _LEAST_SHARE * _excess(work, slowest):
        return _REWARD_FUNCTIONS
    if [r for r, rank in enumerate(ranks) if rank.is_traced] == [slowest]:
        return "it was traced, which takes time (profile.ranks=[]: no traces)"
    if phase == "reward":
        return _REWARD_FUNCTIONS
    if _explains(stages, work, slowest):
        return f"it has pipeline stage {stages[slowest] + 1} of {max(stages) + 1}"
    if _explains(hosts, work, slowest):
        return f"slower machine: host {hosts[slowest]}"
    return f"slower processor or GPU, or other programs on it (host {hosts[slowest]})"


def _explains(traits: Sequence[object], work: Sequence[float], slowest: int) -> bool:
    """Return True if each rank with the slowest rank's trait works longer than most of the ranks with another."""
    same = [seconds for trait, seconds in zip(traits, work, strict=True) if trait == traits[slowest]]
    others = [seconds for trait, seconds in zip(traits, work, strict=True) if trait != traits[slowest]]
    return bool(others) and min(same) > statistics.median(others)


def _median_of_others(values: Sequence[float], one: int) -> float:
    return statistics.median(value for i, value in enumerate(values) if i != one)


def _excess(values: Sequence[float], one: int) -> float:
    return values[one] - _median_of_others(values, one)


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
            "reason": None if slowest is None else waiting_reason(ranks, name, slowest),
        }
    return {
        "step": step,
        "ranks": len(ranks),
        "hosts": [rank.host for rank in ranks],
        "traced": [r for r, rank in enumerate(ranks) if rank.is_traced],
        "phases": phases,
    }


def as_text(step: int, ranks: Sequence[RankTimes]) -> list[str]:
    """Return the table in lines of at most WIDTH columns: own work, waiting, and for each phase that is not balanced
    the slowest rank."""
    lines = [f"profile of step {step}: seconds of each rank's own work and of its waiting"]
    lines += _columns(ranks) if len(ranks) <= MOST_COLUMNS else _summaries(ranks)
    phases_by_reason: dict[tuple[int, str], list[str]] = {}
    for phase in phase_names(ranks):
        slowest = slowest_rank(ranks, phase)
        if slowest is not None:
            phases_by_reason.setdefault((slowest, waiting_reason(ranks, phase, slowest)), []).append(phase)
    others = "the other" if len(ranks) == 2 else "the others"
    for (slowest, reason), phases in phases_by_reason.items():
        text = f"{', '.join(phases)}: {others} waited for rank {slowest}: {reason}"
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return lines


def _columns(ranks: Sequence[RankTimes]) -> list[str]:
    heads = "".join(f"{f'rank {r}' + '*' * rank.is_traced:>8}" for r, rank in enumerate(ranks))
    lines = [f"{'phase':16}{heads}{'   * traced' if any(rank.is_traced for rank in ranks) else ''}"[:WIDTH].rstrip()]
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
