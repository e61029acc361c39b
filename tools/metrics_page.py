"""Write docs/metrics.md from the declarations in rlhf_mc/observability/catalog.

python tools/metrics_page.py
"""

from __future__ import annotations

from pathlib import Path

from rlhf_mc.observability.catalog import SECTIONS
from rlhf_mc.observability.catalog.metric import Metric, Section

PATH = Path(__file__).parents[1] / "docs" / "metrics.md"
HEAD = """\
# Metrics

Each step writes one JSON object to `metrics.jsonl` (`{"step": n, "run_id": id, key: value, ...}`, `null` where a value
is not finite), and the same keys to TensorBoard (`tensorboard --logdir <trainer.default_local_dir>/tensorboard`). Step
0 is the validation before the first update. Keys are verl's wherever the meaning is the same.

All numbers are over the whole batch of the step, on all ranks, unless the table says rank 0. "Token" means response
token unless said otherwise. A mean over tokens weighs every token of the batch alike. An update metric is computed over
each mini-batch, on all ranks, and then averaged over the step's mini-batches, of all PPO epochs. Log-probs and KL are
in nats, times in seconds of wall clock.

This page is made by `python tools/metrics_page.py` from `rlhf_mc/observability/catalog/`, which declares each metric.
In a key `<name>` stands for any text, N and k for numbers, and {a,b} for either.
"""


def page() -> str:
    """Return the text of the page."""
    return "\n".join([HEAD, *map(_section, SECTIONS)])


def _section(section: Section) -> str:
    text = [section.text, ""] if section.text else []
    columns = ["| key | meaning | unit | reduced | watch for |", "|---|---|---|---|---|"]
    return "\n".join([f"## {section.title}", "", *text, *columns, *map(_row, section.metrics), ""])


def _row(metric: Metric) -> str:
    keys = ", ".join(f"`{key}`" for key in metric.keys.split())
    return f"| {keys} | {metric.meaning} | {metric.unit} | {metric.reduction} | {metric.watch_for} |"


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
