"""A plot of a run from the rows of its metrics.jsonl: reward, accuracy, KL and throughput over
steps. Apart from the smoothing of the curves all numbers are the file's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from rlhf_mc.config.errors import UserError, error_reason
from rlhf_mc.observability.step_table import validation_accuracies
from rlhf_mc.run_files import Row

COLORS = ("#2563eb", "#d97706", "#059669", "#9333ea")
SMOOTH_FROM_STEPS = 15
"""Points from which a curve is smoothed."""


def plot_run(rows: Sequence[Row], output: Path, title: str = "") -> None:
    """Write a PNG of 2 x 2 panels to `output`; a panel without logged metrics says so. Raise
    UserError if it cannot be written. rows: of metrics.jsonl, one for each step, ascending."""
    figure = Figure(figsize=(11, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # needs no display and no global state
    (reward, accuracy), (kl, throughput) = figure.subplots(2, 2)

    _panel(
        reward,
        rows,
        "Training reward",
        "mean score of the step's responses",
        {"critic/score/mean": ""},
    )
    _accuracy_panel(accuracy, rows)
    kl_curves = {
        "actor/reward_kl_penalty": "to the reference (in the reward)",
        "actor/kl_loss": "to the reference (in the loss)",
        "actor/ppo_kl": "to the sampling policy",
    }
    _panel(kl, rows, "KL divergence of the policy", "nats per token", kl_curves)
    _panel(throughput, rows, "Throughput", "tokens / s per rank", {"perf/throughput": ""})
    throughput.set_ylim(bottom=0, top=throughput.get_ylim()[1] * 1.1)
    last_step = max([row["step"] for row in rows], default=0)
    for axes in (reward, accuracy, kl, throughput):
        # the same axis in all panels
        axes.set_xlim(-0.02 * max(last_step, 1), 1.02 * max(last_step, 1))
    figure.align_ylabels()

    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold")
    try:
        figure.savefig(output, format="png")
    except OSError as error:
        output.unlink(missing_ok=True)  # the incomplete file
        raise UserError(f"cannot write the plot {output}: {error_reason(error)}") from error


def _panel(
    axes: Axes, rows: Sequence[Row], title: str, ylabel: str, labels: dict[str, str]
) -> None:
    """Draw a panel with a curve for each key of `labels` that was logged; steps without the key are
    left out."""
    colors = iter(COLORS)
    for key, label in labels.items():
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            _curve(axes, points, next(colors), label)
    _finish(axes, title, ylabel)


def _accuracy_panel(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw the validation accuracy by data source. The few points are marked."""
    by_row = [(row["step"], validation_accuracies(row)) for row in rows]
    sources = sorted({source for _, accuracies in by_row for source in accuracies})
    for source in sources:
        points = [
            (step, accuracies[source])
            for step, accuracies in by_row
            if accuracies.get(source) is not None
        ]
        if points:
            steps, values = zip(*points, strict=True)
            color = COLORS[len(axes.lines) % len(COLORS)]
            axes.plot(steps, values, "o-", color=color, linewidth=1.8, markersize=4.5, label=source)
            last = (steps[-1], values[-1])
            # inside the panel
            side: Literal["left", "right"] = "right" if steps[-1] > 0 else "left"
            axes.annotate(
                f"{values[-1]:.0%}",
                last,
                (0, -14),
                textcoords="offset points",
                ha=side,
                color=color,
            )
    axes.set_ylim(-0.02, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    _finish(axes, "Validation accuracy", "share answered correctly", legend="lower right")


def _curve(axes: Axes, points: list[tuple[int, float]], color: str, label: str) -> None:
    """Draw the points; from SMOOTH_FROM_STEPS points on pale, with their running mean."""
    steps, values = zip(*points, strict=True)
    if len(points) < SMOOTH_FROM_STEPS:
        axes.plot(steps, values, "o-", color=color, linewidth=1.8, markersize=3.5, label=label)
        return
    axes.plot(steps, values, color=color, linewidth=1.0, alpha=0.3)
    axes.plot(
        steps,
        _running_mean(values, window=max(5, len(values) // 20)),
        color=color,
        linewidth=1.8,
        label=label,
    )


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return for each value the mean of the values within window // 2 on both sides."""
    half = window // 2
    neighbours = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(near) / len(near) for near in neighbours]


def _finish(axes: Axes, title: str, ylabel: str, legend: str = "best") -> None:
    """Add title, labels, grid, and the legend, or a note that no curve was logged."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.grid(True, color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if not axes.lines:
        axes.text(
            0.5,
            0.5,
            "not logged in this run",
            transform=axes.transAxes,
            ha="center",
            va="center",
            color="#9ca3af",
        )
        axes.set_xticks([])
        axes.set_yticks([])
    elif any(label and not label.startswith("_") for label in axes.get_legend_handles_labels()[1]):
        axes.legend(frameon=False, fontsize=9, loc=legend)
