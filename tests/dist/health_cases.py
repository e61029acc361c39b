"""Functions that the ranks run in test_health_rules.py: whole runs whose health rules count."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cases import built_run

from rlhf_mc.config.errors import UserError
from rlhf_mc.health.rules import RULES
from rlhf_mc.trainer import loop


def train(
    config_path: str,
    overrides: list[str],
    change: str = "",
    bounds: Mapping[str, float] | None = None,
    rule_bounds: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Run the whole loop. Return the events of health.jsonl, the rows of metrics.jsonl, what this
    rank has printed to standard error, and the error that ended the run, if any.

    change: "nan reference" sets a weight of the reference to NaN; "checked" lets the first rollout
    count as a later one, of which mismatches are warnings. bounds: constants of rlhf_mc that no
    setting changes, by "module.NAME". rule_bounds: upper bounds of rules, by the rule's name."""
    error = None
    with contextlib.ExitStack() as stack:
        for name, bound in (bounds or {}).items():
            stack.enter_context(mock.patch(f"rlhf_mc.{name}", bound))
        rules = {rule.name: rule for rule in RULES}
        for name, bound in (rule_bounds or {}).items():
            changed = dict.fromkeys(rules[name].above, bound)
            stack.enter_context(mock.patch.dict(rules[name].above, changed))
        run = stack.enter_context(built_run(config_path, overrides))
        stderr = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        if change == "nan reference":
            assert run.reference is not None
            run.reference.params["decoder.final_layernorm.weight"].fill_(torch.nan)
        if change == "checked":
            run.log_prob_check.is_first = False
        try:
            loop.fit(run)
        except UserError as found:
            error = str(found)
        directory = Path(run.config.trainer.default_local_dir)
    return {
        "events": rows(directory / "health.jsonl"),
        "metrics": rows(directory / "metrics.jsonl"),
        "printed": stderr.getvalue().splitlines(),
        "error": error,
    }


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
