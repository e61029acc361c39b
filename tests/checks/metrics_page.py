"""Write docs/metrics.md from the declarations in rlhf_mc/observability/catalog.

python tests/checks/metrics_page.py
"""

from __future__ import annotations

import re
from pathlib import Path

from rlhf_mc.config.health_schema import HealthConfig, HealthResponsesConfig
from rlhf_mc.config.printing import field_docs
from rlhf_mc.health.rules import RULES, HealthRule
from rlhf_mc.observability.catalog import SECTIONS
from rlhf_mc.observability.catalog.metric import Metric, Section

PATH = Path(__file__).parents[2] / "docs" / "metrics.md"
HEAD = """\
# Metrics

Each step writes one JSON object to `metrics.jsonl` (`{"step": n, "run_id": id, key: value, ...}`, `null` where a value
is not finite), and the same keys to TensorBoard (`tensorboard --logdir <trainer.default_local_dir>/tensorboard`). Step
0 is the validation before the first update. Keys are verl's wherever the meaning is the same.

All numbers are over the whole batch of the step, on all ranks, unless the table says rank 0. "Token" means response
token unless said otherwise. A mean over tokens weighs every token of the batch alike. An update metric is computed over
each mini-batch, on all ranks, and then averaged over the step's mini-batches, of all PPO epochs. Log-probs and KL are
in nats, times in seconds of wall clock.

This page is made by `python tests/checks/metrics_page.py` from `rlhf_mc/observability/catalog/`, which declares each
metric. In a key `<name>` stands for any text, N and k for numbers, and {a,b} for either.
"""
TRACKERS = """\
## Experiment trackers

`trainer.logger` may also name `wandb` (Weights & Biases), `mlflow` and `swanlab`, each with the package of that name;
`mlflow-skinny` is enough. `make` installs all three, in the versions of `requirements/trackers.txt`. Elsewhere
`pip install --no-deps -r requirements/trackers.txt` changes no package that is locked, except importlib-metadata in
the GPU image (8.7 for 10.2: MLflow asks for less than 10); without `--no-deps`, as in `pip install -e .[trackers]`, pip
may change more, such as protobuf. `trainer.project_name` is the project, in MLflow the experiment, and
`trainer.experiment_name` the name of the run. Rank 0 logs the resolved config once and the metrics of each step.

- **No secrets in the config.** The whole config goes to the trackers, and with the command line to `starts.jsonl`,
  without the values of keyword arguments that look like secrets ([reliability.md](reliability.md)). Keys belong into
  environment variables: the trackers' own, and the one that a remote reward's `api_key_env` names.
- `wandb` and `swanlab` log to their servers, and under `wandb/` and `swanlog/` in the run's directory. The run has the
  id of `run.json` there. Their environment variables count: `WANDB_MODE=offline` with `wandb sync` afterwards,
  `WANDB_API_KEY`, `SWANLAB_MODE=offline` with `swanlab sync`, `SWANLAB_API_KEY`, ...
- `mlflow` logs to `MLFLOW_TRACKING_URI`, and without it to `mlruns/` in the run's directory. The page that shows it is
  not in `mlflow-skinny`: in another environment, `pip install mlflow` and
  `MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri RUN/mlruns`.
- A resumed run continues the tracker's run. `trackers.json` has the last step that was handed to each tracker. MLflow
  has a step when it is logged, and gets none twice. W&B and SwanLab send steps later and get those after the checkpoint
  again: of these they drop the ones that they have (W&B every step below its last), so that the first values stay
  there. Offline, both are in the files of their starts. `metrics.jsonl` has the last values.
- A run that is killed loses what W&B and SwanLab have not yet sent or written; offline, W&B writes in blocks, and a
  short run may lose all. What is missing up to the checkpoint stays missing there. `metrics.jsonl` has every step.
- A value that is not finite is left out of trackers. MLflow allows no "@" in a key: it is written `_at_`, as verl does.
  Another key that MLflow refuses is changed, with 8 digits of its hash behind, so that two stay two.
- A tracker that fails, at the start or later, or does not answer costs one warning and is dropped until the next start:
  the run continues without. All ranks wait meanwhile, at most 30 s for the start of each tracker, 60 s for its end, and
  20 s for a step in MLflow. At the exit of the process a library may wait on by itself, W&B for at most 50 s. A
  package that is not installed is an error before anything runs.
"""
HEALTH_HEAD = """\
## Health: symptom, meaning, setting

After each step rank 0 checks these rules on the step's metrics. The first time that a rule counts, two lines on
standard error name the rule, the metric, its bound, the meaning and the setting to turn. Later there is one more line
at 10, 100, ... steps, and one at the end of the run with the number of steps. Each time that a rule begins or ends to
count, and each roll-back, is a line of `health.jsonl` in the run's directory: step, rule, metric, value, bound, count,
response. An empty file is a healthy run. `health/num_active` is the number of rules that count.

`health.responses.<rule>` is `off`, `note` (only in `health.jsonl`), `warn`, or where ending helps `stop`: the run saves
a checkpoint, exports nothing and ends with code 2 ([reliability.md](reliability.md)). A symptom must last for the steps
of the second column: `health.patience` (5), or `health.window` (20) where one step says little. A run that resumes
continues the counts by the rows of `metrics.jsonl`; without that file they begin anew.
"""
HEALTH_TAIL = """\
**Bounds.** The ranges of `actor/ppo_kl` (0.01 to 0.03), of gradient norms (0.5 to 2.0) and of `critic/vf_clipfrac`
(0.05) are from tuning notes for verl, and verl's guide takes a `clip_ratio` above 0.1 for too much truncation.
Three are only noted by default. Of 29 runs of the quickstart's task, with ten estimators, all of which learned, 15 had
a gradient norm above 2.0 for 5 steps, and 8 an `actor/ppo_kl` below 0.01 for 20 steps; in the log of verl's quickstart
the critic's first norm is 1023. Set `health.responses.grad_norm_high` to `warn` for a model whose norms you know. None
of the 29 runs had a warning. The bounds of a KL explosion are far from these runs: their largest `actor/ppo_kl` was
0.23, in a first step, their largest KL to the reference 1.3 nats per token. A learning rate of 0.05 gives 5.2 and 10.
"""


def page() -> str:
    """Return the text of the page."""
    return "\n".join([HEAD, *map(_section, SECTIONS), _health(), TRACKERS])


def _section(section: Section) -> str:
    text = [section.text, ""] if section.text else []
    columns = ["| key | meaning | unit | reduced | watch for |", "|---|---|---|---|---|"]
    return "\n".join([f"## {section.title}", "", *text, *columns, *map(_row, section.metrics), ""])


def _row(metric: Metric) -> str:
    keys = ", ".join(f"`{key}`" for key in metric.keys.split())
    return f"| {keys} | {metric.meaning} | {metric.unit} | {metric.reduction} | {metric.watch_for} |"


def _health() -> str:
    columns = ["| symptom | for | meaning | setting to turn | rule: response |", "|---|---|---|---|---|"]
    return "\n".join([HEALTH_HEAD, *columns, *map(_rule, RULES), "", HEALTH_TAIL])


def _rule(rule: HealthRule) -> str:
    """Return the row of a rule, with the default of each bound."""
    defaults = HealthConfig()
    condition = field_docs(HealthResponsesConfig)[rule.name].removesuffix(".")
    bounds = [name for name, value in vars(defaults).items() if isinstance(value, int | float)]
    for name in sorted(bounds, key=len, reverse=True):
        condition = re.sub(rf"\b{name}\b", f"`health.{name}` ({getattr(defaults, name)})", condition)
    steps = rule.steps_needed(defaults)
    count = {"at once": "1 step", "patience": f"{steps} steps", "window": f"{steps} steps"}[rule.after]
    more = f" {_with_code(rule.more)}" if rule.more else ""
    response = f"`{rule.name}`: {getattr(defaults.responses, rule.name)}"
    meaning = f"{rule.meaning}.{more}"
    return f"| {_with_code(condition)} | {count} | {meaning} | {_with_code(rule.setting)} | {response} |"


def _with_code(text: str) -> str:
    """Return the text with settings, metrics and files in backticks, where they are in none."""
    return re.sub(r"(?<![`\w])([a-z]\w*(?:[./][\w.*=]*\w+|/\*?)+\*?)(?![`\w])", r"`\1`", text)


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
