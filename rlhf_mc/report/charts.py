"""The drawings of the report as data: curves, phase times, histograms of lengths, marks. Long runs
are thinned out, so that the page stays small. No torch here."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from typing import Any

from rlhf_mc.report.run_reader import RunRecord, finite_or_none
from rlhf_mc.run_files import NONFINITE_FILE, Row

MAX_POINTS = 1000
"""Points of a curve; a longer one shows the smallest and the largest value of each group of
steps."""
MAX_BARS = 120
"""Bars of phase times, and columns of histograms; of more steps each is the mean of a group."""
FEW_POINTS = 20
"""Points and bars that each run has, however many runs there are."""
MAX_NUMBERS = 1_500_000
"""Numbers in the curves of all runs, of some 8 bytes each."""
MAX_TOTAL_BARS = 3000
"""Bars of all runs."""
MAX_BINS = 32
TIMING = "timing_s/"
_WHOLE = "step"
OVERLAPPING = ("reward_hidden",)
"""Times that pass while other phases run."""
AFTER_STEP = ("testing", "save_checkpoint", "export", "write_profile")
"""Phases that are not within timing_s/step."""
CHARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("reward", "Reward", ("critic/score/mean",)),
    ("accuracy", "Validation accuracy", ("val-core/*/acc/mean@*",)),
    ("kl-ref", "KL to the reference", ("actor/reward_kl_penalty", "actor/kl_loss")),
    ("kl-old", "KL to the old policy", ("actor/ppo_kl",)),
    ("entropy", "Entropy", ("actor/entropy",)),
    (
        "clip",
        "Clip fractions",
        ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "critic/vf_clipfrac"),
    ),
    ("grad-norm", "Gradient norms", ("actor/grad_norm", "critic/grad_norm")),
    ("explained", "Explained variance", ("critic/vf_explained_var",)),
    ("length", "Response length", ("response_length/mean", "response_length/max")),
    ("truncated", "Truncated responses", ("response_length/clip_ratio",)),
    ("throughput", "Throughput", ("perf/throughput",)),
    ("mfu", "Model FLOPs utilisation", ("perf/mfu/*",)),
)
"""Identifier, title and keys of the charts that are shown at first; * stands for any text. A chart
without any logged key is left out."""


def axis_limits(runs: Sequence[Sequence[Row]]) -> tuple[int, int]:
    """Return the most points of a curve, and the most bars, that each run draws, so that the page
    of many runs stays small. runs: the rows of metrics.jsonl of each."""
    num_curves = sum(len({key for row in rows for key in row}) for rows in runs)
    points = max(FEW_POINTS, min(MAX_POINTS, MAX_NUMBERS // max(num_curves, 1)))
    return points, max(FEW_POINTS, min(MAX_BARS, MAX_TOTAL_BARS // max(len(runs), 1)))


def curves(rows: Sequence[Row], most: int = MAX_POINTS) -> dict[str, Any]:
    """Return {"steps": [P], "metrics": {key: [P] numbers, null where there is none}, "group": steps
    in a group}. With more than `most` rows, each group of consecutive rows has two points: the
    smallest and the largest value, in the order in which they come."""
    keys = sorted(
        {
            key
            for row in rows
            for key, value in row.items()
            if key != "step" and finite_or_none(value) is not None
        }
    )
    if len(rows) <= most:
        columns = {key: [short(finite_or_none(row.get(key))) for row in rows] for key in keys}
        return {"steps": [row["step"] for row in rows], "metrics": columns, "group": 1}
    size = math.ceil(len(rows) / (most // 2))
    groups = [rows[i : i + size] for i in range(0, len(rows), size)]
    steps = [step for group in groups for step in (group[0]["step"], group[-1]["step"])]
    metrics = {key: [value for group in groups for value in _extremes(group, key)] for key in keys}
    return {"steps": steps, "metrics": metrics, "group": size}


def _extremes(rows: Sequence[Row], key: str) -> tuple[float | None, float | None]:
    """Return the smallest and the largest value of rows, in their order; twice null without any."""
    values = [
        value for value in (finite_or_none(row.get(key)) for row in rows) if value is not None
    ]
    if not values:
        return None, None
    low = min(values)
    high = max(values)
    pair = (low, high) if values.index(low) <= values.index(high) else (high, low)
    return short(pair[0]), short(pair[1])


def charts(keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return the charts of CHARTS that have any of the logged keys: id, title and those keys."""
    charts = []
    for name, title, patterns in CHARTS:
        shown = [key for pattern in patterns for key in fnmatch.filter(keys, pattern)]
        if name == "reward":
            by_source = fnmatch.filter(keys, "critic/score/*/mean")
            shown += by_source if len(by_source) > 1 else []
        if shown:
            charts.append({"id": name, "title": title, "keys": shown})
    return charts


def phase_times(rows: Sequence[Row], most: int = MAX_BARS) -> dict[str, Any]:
    """Return the seconds of each phase as stacked bars: {"steps": [[first, last] of each bar],
    "phases": {name: [B] seconds}}. The phase "other" is the part of a step in no phase. Of more
    than `most` steps each bar is the mean of a group."""
    timed = [row for row in rows if finite_or_none(row.get(TIMING + _WHOLE)) is not None]
    names = [key.removeprefix(TIMING) for row in timed for key in row if key.startswith(TIMING)]
    phases = [name for name in dict.fromkeys(names) if name not in (_WHOLE, *OVERLAPPING)]
    bars = bar_groups(timed, most)
    seconds = {
        name: [sum(_seconds(row, name) for row in group) / len(group) for group in bars]
        for name in phases
    }
    other = [sum(_other(row, phases) for row in group) / len(group) for group in bars]
    series = {
        name: [short(value) for value in values] for name, values in seconds.items() if any(values)
    }
    if any(value > 0.001 for value in other):
        series["other"] = [short(value) for value in other]
    return {"steps": [[group[0]["step"], group[-1]["step"]] for group in bars], "phases": series}


def _other(row: Row, phases: Sequence[str]) -> float:
    """Return the seconds of a step in no phase; too few where a phase after the step has updated
    weights or offloaded, whose times are one sum with the step's."""
    within = (_seconds(row, name) for name in phases if name not in AFTER_STEP)
    return max(0.0, _seconds(row, _WHOLE) - sum(within))


def _seconds(row: Row, name: str) -> float:
    """Return the seconds of a phase, 0 where a row lacks it."""
    return finite_or_none(row.get(TIMING + name)) or 0.0


def length_histograms(rows: Sequence[Row], most: int = MAX_BARS) -> dict[str, Any]:
    """Return {"steps": [[first, last] of each column], "edges": [E], "shares": [columns][E - 1]} of
    histograms.jsonl, in at most `most` columns and MAX_BINS bins. Rows whose bins differ from the
    last row's are left out."""
    valid = [row for row in rows if "response_length" in row]
    if not valid:
        return {"steps": [], "edges": [], "shares": []}
    edges = valid[-1]["response_length"]["edges"]
    valid = [row for row in valid if row["response_length"]["edges"] == edges]
    merged = math.ceil((len(edges) - 1) / MAX_BINS)
    columns = bar_groups(valid, most)
    shares = []
    for group in columns:
        counts = [
            sum(column)
            for column in zip(*(row["response_length"]["counts"] for row in group), strict=True)
        ]
        bins = [sum(counts[i : i + merged]) for i in range(0, len(counts), merged)]
        shares.append([short(count / max(sum(bins), 1)) for count in bins])
    merged_edges = [*edges[:-1:merged], edges[-1]]
    return {
        "steps": [[group[0]["step"], group[-1]["step"]] for group in columns],
        "edges": merged_edges,
        "shares": shares,
    }


def marks(run: RunRecord) -> list[dict[str, Any]]:
    """Return the marks of a run on the step axis, as {"step", "kind", "text"}, ascending: resumes,
    failures (a start that ended by an error or has no recorded end) and adjustments."""
    marks = []
    for earlier, start in zip(run.starts, run.starts[1:], strict=False):
        step = start.get("after_step", 0)
        end = earlier.get("end")
        kind = "failure"
        if end is None:
            text = f"the start before has no recorded end (killed?); resumed after step {step}"
        elif end.get("how") == "failed":
            text = (
                f"the start before failed after step {end.get('step')}: {end.get('text')}; "
                f"resumed after step {step}"
            )
        else:
            kind = "resume"
            text = f"resumed after step {step}; the start before: {end.get('text')}"
        marks.append({"step": step, "kind": kind, "text": text})
    if run.state in ("failed", "died"):
        marks.append({"step": run.last_step, "kind": "failure", "text": run.state_text})
    for step in run.nonfinite_steps:
        marks.append(
            {
                "step": step,
                "kind": "failure",
                "text": f"loss or gradient not finite: {NONFINITE_FILE.format(step)}",
            }
        )
    for row in run.adjustments:
        text = (
            f"{row['setting']} set to {row['value']} after step {row['after_step']}: "
            f"{row['reason']}"
        )
        marks.append({"step": row["after_step"], "kind": "adjustment", "text": text})
    return sorted(marks, key=lambda mark: mark["step"])


def bar_groups(rows: Sequence[Row], most: int) -> list[Sequence[Row]]:
    """Return the rows in at most `most` groups of consecutive ones, of equal size but for the
    last."""
    size = max(1, math.ceil(len(rows) / most))
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def short(value: float | None) -> float | int | None:
    """Return the value with 5 digits, for a small page."""
    if value is None:
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
