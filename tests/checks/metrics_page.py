"""Write docs/metrics.md and docs/health.md from rlhf_mc/observability/metrics.yaml and
rlhf_mc/health/rules.yaml.

python tests/checks/metrics_page.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from checks.wrap import wrapped

from rlhf_mc.config.health_schema import HealthConfig
from rlhf_mc.health.rules import RULES, HealthRule
from rlhf_mc.observability.catalog import Metric, Section, sections

DOCS = Path(__file__).parents[2] / "docs"
METRICS_HEAD = """\
# Metrics

Each step writes one JSON object to `metrics.jsonl` (`{"step": n, "run_id": id, key: value, ...}`,
`null` where a value is not finite), and the same keys to TensorBoard (`tensorboard --logdir
<trainer.default_local_dir>/tensorboard`) and to [experiment trackers](trackers.md). Step 0 is the
validation before the first update. Keys are verl's wherever the meaning is the same.
[health.md](health.md) has the rules that watch them.

All numbers are over the whole batch of the step, on all ranks, unless the table says rank 0.
"Token" means response token unless said otherwise. A mean over tokens weighs every token of the
batch alike. An update metric is computed over each mini-batch, on all ranks, and then averaged over
the step's mini-batches, of all PPO epochs. Log-probs and KL are in nats, times in seconds of wall
clock. Memory is in GiB (2^30 bytes), also where a key ends in `_gb`.

`python tests/checks/metrics_page.py` writes this page from `rlhf_mc/observability/metrics.yaml`,
which declares each metric. In a key `<name>` stands for any text, N and k for numbers, and {a,b}
for either.
"""
HEALTH_HEAD = """\
# Health rules: symptom, meaning, setting

After each step rank 0 checks these rules on the step's [metrics](metrics.md). The first time that a
rule counts, two lines on standard error name the rule, the metric, its bound, the meaning and the
setting to turn. Later there is one line at 10, 100, ... steps, and one at the end of the run with
the number of steps. `health.jsonl` in the run's directory has a line each time that a rule begins
or ends to count, and for each roll-back. An empty file is a healthy run. `health/num_active` is the
number of rules that count.

The table has each rule's response: `note` (only in `health.jsonl`), `warn`, or `stop` (the run
saves a checkpoint, exports nothing and ends with code 2); [settings give
others](reliability.md#responses-to-health-rules). A symptom must last for the steps of the second
column: `health.patience` (5), or `health.window` (20) where one step says little. A run that
resumes continues the counts by the rows of `metrics.jsonl`; without that file they begin anew.

`python tests/checks/metrics_page.py` writes this page from `rlhf_mc/health/rules.yaml`.
"""
HEALTH_TAIL = """\
**Bounds.** Those of `actor/ppo_kl` (0.03) and of `critic/vf_clipfrac` (0.05) are of tuning notes
for verl. Of 29 healthy runs of the quickstart's task none had a warning.
"""


def pages() -> dict[Path, str]:
    """Return the text of each page."""
    metrics = "\n".join([METRICS_HEAD, *map(_section, sections())])
    return {
        DOCS / "metrics.md": wrapped(f"{metrics.rstrip()}\n"),
        DOCS / "health.md": wrapped(_health()),
    }


def _section(section: Section) -> str:
    text = [section.text, ""] if section.text else []
    columns = ["| key | meaning | unit | reduced | watch for |", "|---|---|---|---|---|"]
    return "\n".join([f"## {section.title}", "", *text, *columns, *map(_row, section.metrics), ""])


def _row(metric: Metric) -> str:
    keys = ", ".join(f"`{key}`" for key in metric.keys.split())
    return (
        f"| {keys} | {metric.meaning} | {metric.unit} | {metric.reduction} | {metric.watch_for} |"
    )


def _health() -> str:
    columns = [
        "| symptom | for | meaning | setting to turn | rule: response |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([HEALTH_HEAD, *columns, *map(_rule, RULES), "", HEALTH_TAIL])


def _rule(rule: HealthRule) -> str:
    """Return the row of a rule, with the default of each bound."""
    defaults = HealthConfig()
    condition = rule.condition or _condition(rule)
    bounds = [name for name, value in vars(defaults).items() if isinstance(value, int | float)]
    for name in sorted(bounds, key=len, reverse=True):
        condition = re.sub(
            rf"\b{name}\b", f"`health.{name}` ({getattr(defaults, name)})", condition
        )
    steps = rule.steps_needed(defaults)
    count = {"at once": "1 step", "patience": f"{steps} steps", "window": f"{steps} steps"}[
        rule.after
    ]
    more = f" {_with_code(rule.more)}" if rule.more else ""
    response = f"`{rule.name}`: {rule.default}"
    meaning = f"{rule.meaning}.{more}"
    return (
        f"| {_with_code(condition)} | {count} | {meaning} | {_with_code(rule.setting)} | "
        f"{response} |"
    )


def _condition(rule: HealthRule) -> str:
    """Return the bounds of a rule, which are the same for all its metrics, in words."""
    sides = {
        "above {}": rule.above,
        "below {}": rule.below,
        "above {} times its median over the window before": rule.above_median,
        "below {} times its median over the window before": rule.below_median,
    }
    ((words, bounds),) = ((words, bounds) for words, bounds in sides.items() if bounds)
    (bound,) = set(bounds.values())
    return f"{' or '.join(bounds)} {words.format(bound)}"


def _with_code(text: str) -> str:
    """Return the text with settings, metrics and files in backticks, where they are in none."""
    return re.sub(r"(?<![`\w])([a-z]\w*(?:[./][\w.*=]*\w+|/\*?)+\*?)(?![`\w])", r"`\1`", text)


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
