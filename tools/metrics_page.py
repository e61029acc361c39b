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
TRACKERS = """\
## Experiment trackers

`trainer.logger` may also name `wandb` (Weights & Biases), `mlflow` and `swanlab`, each with the package of that name
(`mlflow-skinny` is enough; `pip install -e .[trackers]` installs all three). `trainer.project_name` is the project, in
MLflow the experiment, and `trainer.experiment_name` the name of the run. Rank 0 logs the resolved config once and the
metrics of each step.

- `wandb` and `swanlab` log to their servers, and under `wandb/` and `swanlog/` in the run's directory. The run has the
  id of `run.json` there. Their environment variables count: `WANDB_MODE=offline` with `wandb sync` afterwards,
  `WANDB_API_KEY`, `SWANLAB_MODE=offline` with `swanlab sync`, `SWANLAB_API_KEY`, ...
- `mlflow` logs to `MLFLOW_TRACKING_URI`, and without it to `mlruns/` in the run's directory, which
  `MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri RUN/mlruns` shows.
- A resumed run continues the tracker's run. `trackers.json` has the last step that each tracker has. Steps that were
  logged before and are repeated after a resume keep their first values there, since a tracker cannot take steps back;
  `metrics.jsonl` has the last values.
- A value that is not finite is left out of trackers. MLflow allows no "@" in a key: it is written `_at_`, as verl does.
- A tracker that fails, at the start or later, costs one warning and is dropped until the next start: it never ends the
  run. A package that is not installed is an error before anything runs.
"""


def page() -> str:
    """Return the text of the page."""
    return "\n".join([HEAD, *map(_section, SECTIONS), TRACKERS])


def _section(section: Section) -> str:
    text = [section.text, ""] if section.text else []
    columns = ["| key | meaning | unit | reduced | watch for |", "|---|---|---|---|---|"]
    return "\n".join([f"## {section.title}", "", *text, *columns, *map(_row, section.metrics), ""])


def _row(metric: Metric) -> str:
    keys = ", ".join(f"`{key}`" for key in metric.keys.split())
    return f"| {keys} | {metric.meaning} | {metric.unit} | {metric.reduction} | {metric.watch_for} |"


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
