"""The report of one run or several as one HTML page that needs nothing else: styles, scripts and
data are in it. The page draws the curves itself (assets/), so that any metric can be chosen. No
torch here.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from rlhf_mc import durable
from rlhf_mc.config.errors import UserError, error_reason
from rlhf_mc.observability import catalog
from rlhf_mc.report import tokens
from rlhf_mc.report.charts import (
    axis_limits,
    charts,
    curves,
    length_histograms,
    marks,
    phase_times,
    short,
)
from rlhf_mc.report.run_reader import (
    MAX_SAMPLE_STEPS,
    RunRecord,
    Sample,
    evenly_spaced,
    finite_or_none,
    read_run,
)
from rlhf_mc.run_files import differences

MAX_SAMPLES = 16
"""Generations of a step."""
FEW_SAMPLES = 4
"""The same, at least, where there are many runs."""
MAX_TOTAL_STEPS = 24
"""Steps with generations of all runs together, but one of each run at least."""
MAX_TOTAL_SAMPLES = 400
"""Generations at a step of all runs together, but FEW_SAMPLES of each at least."""
MAX_CHARACTERS = 2000
"""Most characters of a prompt or a response."""
MAX_EVENTS = 200
MAX_RANKS = 16
"""Ranks with a column of their own in a table of phases."""
MIN_WAITING = 0.005
"""Seconds of waiting from which a table of phases shows them."""


def read_runs(directories: Sequence[Path]) -> list[RunRecord]:
    """Read the directories of runs for one report: of many runs, the generations of fewer steps
    each. Raise UserError if a directory is no run's."""
    steps = max(1, min(MAX_SAMPLE_STEPS, MAX_TOTAL_STEPS // len(directories)))
    return [read_run(root, steps) for root in directories]


def write_report(runs: Sequence[RunRecord], output: Path) -> None:
    """Write the report of runs. Raise UserError if the file cannot be written."""
    page = render_page(runs)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        durable.replace(output, page.encode(errors="backslashreplace"))
    except OSError as error:
        raise UserError(f"cannot write the report {output}: {error_reason(error)}") from error


def render_page(runs: Sequence[RunRecord]) -> str:
    """Return the page."""
    environment = Environment(
        loader=PackageLoader("rlhf_mc.report", "assets"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = run_names([run.root for run in runs])
    return environment.get_template("report.html").render(
        title=" · ".join(names),
        made=time.strftime("%Y-%m-%d %H:%M %Z"),
        runs=[_header(run, name, i) for i, (run, name) in enumerate(zip(runs, names, strict=True))],
        events=_events(runs, names),
        max_events=MAX_EVENTS,
        differing=_differing(runs),
        changes=_changes(runs, names),
        profiles=_profiles(runs, names),
        data=json.dumps(page_data(runs, names), separators=(",", ":")).replace("<", "\\u003c"),
    )


def page_data(runs: Sequence[RunRecord], names: Sequence[str]) -> dict[str, Any]:
    """Return what the page's script draws."""
    points, bars = axis_limits([run.rows for run in runs])
    samples = max(FEW_SAMPLES, min(MAX_SAMPLES, MAX_TOTAL_SAMPLES // max(len(runs), 1)))
    most_tokens = tokens.MAX_TOKENS // max(tokens.MAX_STEPS * len(runs) * samples, 1)
    entries: list[dict[str, Any]] = [
        {
            "name": name,
            "curves": curves(run.rows, points),
            "phases": phase_times(run.rows, bars),
            "lengths": length_histograms(run.histograms, bars),
            "marks": marks(run),
            "health": [
                {"step": row["step"]}
                | {key: str(row.get(key)) for key in ("rule", "metric", "event", "text")}
                for row in run.health[-MAX_EVENTS:]
            ],
            "samples": {
                "validation": _first_samples(run.validation, samples),
                "training": _first_samples(run.training, samples, most_tokens),
            },
        }
        for run, name in zip(runs, names, strict=True)
    ]
    shown = [
        sample["tokens"]
        for run in entries
        for step_samples in run["samples"]["training"].values()
        for sample in step_samples
    ]
    keys = sorted({key for run in entries for key in run["curves"]["metrics"]})
    meanings = {key: _meaning(key) for key in keys}
    return {
        "runs": entries,
        "charts": charts(keys),
        "metrics": meanings,
        "tokens": tokens.scales(shown),
    }


def run_names(roots: Sequence[Path]) -> list[str]:
    """Return a name for each directory: its own, or where two are alike its whole path."""
    last_parts = [root.resolve().name for root in roots]
    return [
        name if last_parts.count(name) == 1 else str(root)
        for name, root in zip(last_parts, roots, strict=True)
    ]


def _meaning(key: str) -> dict[str, str]:
    """Return the declared meaning of a metric, without Markdown; empty for an undeclared one."""
    metric = catalog.find(key)
    if metric is None:
        return {}
    entry = {
        "meaning": metric.meaning,
        "unit": metric.unit,
        "reduction": metric.reduction,
        "watch": metric.watch_for,
    }
    return {name: _plain(text) for name, text in entry.items() if text and text != "–"}


def _plain(text: str) -> str:
    """Return Markdown text without its marks and links."""
    return re.sub(r"\[([^\[\]]*)\]\([^)]*\)", r"\1", text.replace("`", "").replace("**", ""))


def _header(run: RunRecord, name: str, index: int) -> dict[str, Any]:
    """Return the header of a run: its state and rows of a list."""
    first, last = (run.starts[0], run.starts[-1]) if run.starts else ({}, {})
    git = last.get("git") or {}
    commit = str(git.get("commit", ""))[:12] + (" with changes" if git.get("has_changes") else "")
    end = last.get("end", {})
    total = _value(run.config, "trainer.total_training_steps")
    properties = {
        "run id": run.run_id,
        "directory": str(run.root.resolve()),
        "steps": f"{run.last_step}" + (f" of at most {total}" if total else ""),
        "starts": f"{len(run.starts)}" if run.starts else "",
        "first start": _time(first.get("time")),
        "end": _time(end.get("time")) if end else "",
        "hosts": ", ".join(
            f"{host} ({count} ranks)" for host, count in last.get("hosts", {}).items()
        ),
        "git commit": commit,
        "versions": ", ".join(
            f"{package} {version}" for package, version in last.get("versions", {}).items()
        ),
        "command": " ".join(map(str, last.get("command", []))),
    }
    rows = [(term, text) for term, text in properties.items() if text]
    state = {"state": run.state, "text": run.state_text, "problems": run.problems}
    return {"name": name, "index": index, "properties": rows, **state}


def _time(text: Any) -> str:
    return str(text).replace("T", " ") if text else ""


def _events(runs: Sequence[RunRecord], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the health events of all runs, run by run and as they came; of each run the last
    MAX_EVENTS."""
    return [
        {
            **{
                key: row.get(key, "")
                for key in ("rule", "metric", "count", "action", "event", "text")
            },
            "run": name,
        }
        | {"step": row["step"], "value": short(finite_or_none(row.get("value")))}
        for run, name in zip(runs, names, strict=True)
        for row in run.health[-MAX_EVENTS:]
    ]


def _differing(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return the settings in which the runs differ, with the value of each run."""
    configs = [run.config for run in runs]
    if len(runs) < 2 or not all(configs):
        return []
    keys = sorted({key for other in configs[1:] for key in differences(configs[0], other)})
    return [(key, [_shown(_value(config, key)) for config in configs]) for key in keys]


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def _changes(runs: Sequence[RunRecord], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the settings that changed between two starts of one run."""
    return [
        {
            "run": name,
            "step": start.get("after_step"),
            "key": key,
            "before": _shown(pair[0]),
            "after": _shown(pair[1]),
        }
        for run, name in zip(runs, names, strict=True)
        for start in run.starts
        for key, pair in start.get("changed", {}).items()
    ]


def _shown(value: Any) -> str:
    return "null" if value is None else value if isinstance(value, str) else json.dumps(value)


def _first_samples(
    steps: Mapping[int, Sequence[Sample]], most: int, most_tokens: int = 0
) -> dict[int, list[dict[str, Any]]]:
    """Return the first `most` samples of each step, cut to MAX_CHARACTERS, and in some steps the
    tokens of each."""
    with_tokens = [
        step for step, samples in steps.items() if any(sample.tokens for sample in samples)
    ]
    limits = dict.fromkeys(evenly_spaced(with_tokens, tokens.MAX_STEPS), most_tokens)
    return {
        step: [_sample(sample, limits.get(step, 0)) for sample in samples[:most]]
        for step, samples in steps.items()
    }


def _sample(sample: Sample, most_tokens: int) -> dict[str, Any]:
    left = MAX_CHARACTERS
    turns = []
    for kind, text in sample.turns:
        turns.append((kind, _cut(text, left)))
        left = max(0, left - len(text))
    texts = {"prompt": _cut(sample.prompt), "truth": _cut(sample.ground_truth), "turns": turns}
    shown = tokens.shown_tokens(sample.tokens, most_tokens)
    return {**texts, "score": short(sample.score), "length": short(sample.length), "tokens": shown}


def _cut(text: str, most: int = MAX_CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text)} characters)"


def _profiles(runs: Sequence[RunRecord], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a table for each profiled step, with a row for each phase and a column for each of at
    most MAX_RANKS ranks."""
    tables = []
    for run, name in zip(runs, names, strict=True):
        for step, content in run.phases.items():
            rows = [_profile_row(phase, times) for phase, times in content["phases"].items()]
            shown = content["ranks"] if content["ranks"] <= MAX_RANKS else 0
            tables.append({"run": name, "step": step, "rows": rows, "columns": range(shown)})
    return tables


def _profile_row(phase: str, times: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a phase: its slowest rank, the most seconds of a rank's own work, their
    mean over the ranks, the longest wait, and of each rank its own work and, after a plus, its
    waiting."""
    waiting = times["waiting"]
    work = [max(0.0, total - wait) for total, wait in zip(times["seconds"], waiting, strict=True)]
    slowest = times["slowest"]
    return {
        "phase": phase,
        "slowest": "alike" if slowest is None else slowest,
        "most": f"{max(work):.3f}",
        "mean": f"{sum(work) / len(work):.3f}",
        "waiting": f"{max(waiting):.3f}",
        "cells": [
            f"{busy:.3f}" + (f" + {wait:.3f}" if wait >= MIN_WAITING else "")
            for busy, wait in zip(work, waiting, strict=True)
        ],
    }
