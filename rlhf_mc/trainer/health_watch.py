"""The health rules in a run: rank 0 checks them, all ranks act on the result. The rules are in
health/."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rlhf_mc.config.health_schema import HealthConfig
from rlhf_mc.config.roles import estimator_needs
from rlhf_mc.config.schema import Config
from rlhf_mc.health.adjustments import Adjustment, Adjustments
from rlhf_mc.health.conditions import RunTraits
from rlhf_mc.health.monitor import ROLLED_BACK, Event, Monitor, StepHealth
from rlhf_mc.observability.sinks import append_line, best_effort
from rlhf_mc.run_files import HEALTH_FILE, METRICS_FILE, read_rows
from rlhf_mc.runtime.console import print_line
from rlhf_mc.topology.consensus import gather_objects
from rlhf_mc.trainer.logprob_check import LogProbCheck
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.step_state import StepState

RollBack = Callable[[], int | None]
"""Quarantines the checkpoints after the last healthy step and returns that step; without one,
changes nothing and returns None."""


class HealthWatch:
    """The health of a run. Every rank must call each method."""

    def __init__(self, run: Run, run_id: str, after_step: int) -> None:
        """Rebuild the state of the rules from the rows of metrics.jsonl up to `after_step`, if
        trainer.logger has jsonl; else begin anew."""
        self._cfg = run.config.health
        self._directory = Path(run.config.trainer.default_local_dir)
        self._run_id = run_id
        self._monitor: Monitor | None = None
        self.last = StepHealth()
        """The health of the last complete step, the same on every rank. After a resume its rules
        act again, since the run may have been killed before their responses; only stop does not:
        the user has answered it by starting the run again."""
        if not self._cfg.enable:
            return
        if run.groups.rank == 0:
            self._monitor = Monitor(
                self._cfg, run_traits(run.config, run.log_prob_check), print_line, self._write
            )
            best_effort(HEALTH_FILE, (self._directory / HEALTH_FILE).touch)
            if "jsonl" in run.config.trainer.logger:
                self.last = self._replay(self._monitor, after_step)
        self.last = gather_objects(self.last)[0]

    def _replay(self, monitor: Monitor, after_step: int) -> StepHealth:
        """Count the steps of metrics.jsonl up to a step again. Return the health of that step."""
        health = StepHealth()
        for _, row in read_rows(self._directory / METRICS_FILE):
            if 0 < row["step"] <= after_step:
                health = monitor.replay(row["step"], numeric_metrics(row))
        acting = tuple(event for event in health.acting if event.action != "stop")
        return replace(health, acting=acting)

    def step_done(self, state: StepState) -> None:
        """Check the rules on the metrics of a complete step, and add the metric of their number.
        The run has not acted on them yet."""
        if not self._cfg.enable:
            return
        health = StepHealth()
        if self._monitor is not None:
            health = self._monitor.step(state.step, state.metrics)
        self.last = gather_objects(health)[0]
        state.metrics["health/num_active"] = self.last.num_active

    def rolled_back(self, event: Event, to: int) -> None:
        """Record in health.jsonl that a rule of the last complete step has rolled the run back to a
        step. A resume from that step keeps the record."""
        if self._monitor is not None:
            text = f"{event.text}; rolled back to step {to}"
            self._write(replace(event, event=ROLLED_BACK, text=text, rolled_back_to=to))

    def close(self, step: int) -> None:
        """Print how often each rule counted, after the last step."""
        if self._monitor is not None:
            self._monitor.close(step)

    def _write(self, event: Event) -> None:
        line = json.dumps(event.row(self._run_id), allow_nan=False) + "\n"
        append_line(self._directory / HEALTH_FILE, line)


def run_traits(cfg: Config, log_prob_check: LogProbCheck) -> RunTraits:
    """Return the properties of a run that the rules depend on."""
    bound = None if cfg.algorithm.rollout_correction.bypass_mode else log_prob_check.mean_bound
    return RunTraits(estimator_needs(cfg.algorithm).group, bound)


def numeric_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a row of metrics.jsonl, NaN for null."""
    return {
        key: math.nan if value is None else value
        for key, value in row.items()
        if value is None or (isinstance(value, int | float) and key != "step")
    }


class Unhealthy(Exception):
    """The response to a rule ends the run. Every rank raises it, after the step is logged."""

    def __init__(self, text: str, saves: bool) -> None:
        super().__init__(text)
        self.saves = saves
        """The last step is to be saved."""


def act(
    run: Run, roll_back_checkpoints: RollBack, step: int, health: HealthWatch
) -> Literal["continues", "rolled back"]:
    """Carry out the responses to the rules that count in a complete, logged step. Return "rolled
    back" if the run is to resume from an earlier step. Raise Unhealthy for the response stop, and
    where a roll-back is impossible. Every rank must call it."""
    cfg = run.config.health
    changes = {event.action: event for event in reversed(health.last.acting)}
    reasons = {action: event.text.removeprefix("health: ") for action, event in changes.items()}
    if "stop" in changes:
        rule = changes["stop"].rule
        line = (
            f"{reasons['stop']}: {rule.meaning}; {rule.setting}; the response to {rule.name} is "
            "stop: nothing is exported"
        )
        raise Unhealthy(line, saves=True)
    if "roll_back" in changes:
        start = roll_back(run, roll_back_checkpoints, step, reasons["roll_back"])
        health.rolled_back(changes["roll_back"], to=start)
        return "rolled back"
    if "fixed_kl_coef" in changes:
        fix_kl_coef(cfg, run.adjustments, step, reasons["fixed_kl_coef"])
    return "continues"


def roll_back(run: Run, roll_back_checkpoints: RollBack, step: int, reason: str) -> int:
    """Let the run resume from the checkpoint of the last healthy step, with smaller learning rates.
    Return that step. Raise Unhealthy if there is none, or if that has been done
    health.max_rollbacks times. Every rank must call it. reason: the line of the rule."""
    cfg = run.config.health
    adjustments = run.adjustments
    done = adjustments.num_made("learning_rate_factor")
    if done >= cfg.max_rollbacks:
        raise Unhealthy(
            f"{reason}; the run was rolled back {done} times before (health.max_rollbacks). Its "
            "settings have to change: a lower actor.optim.lr, fewer actor.ppo_epochs, a higher KL "
            "coefficient; remove adjustments.jsonl to begin with the learning rates of the config",
            saves=False,
        )
    start = roll_back_checkpoints()
    if start is None:
        raise Unhealthy(
            f"{reason}; there is no checkpoint of a healthy step to roll back to; set a lower "
            "actor.optim.lr, or resume another checkpoint with trainer.resume_from_path",
            saves=False,
        )
    adjustments.add(Adjustment("learning_rate_factor", cfg.rollback_lr_factor, start, reason))
    factor = adjustments.learning_rate_factor(start + 1)
    print_line(
        f"warning: rolled back from step {step} to step {start}; learning rates are those of the "
        f"config times {factor:g} from there on",
        rank_0_only=True,
    )
    return start


def fix_kl_coef(cfg: HealthConfig, adjustments: Adjustments, step: int, reason: str) -> None:
    """Give the KL term the coefficient health.kl_coef from the next step on. Every rank must call
    it."""
    coef = cfg.kl_coef
    assert coef is not None, "config/checks.py ensures it"
    if adjustments.kl_coef(step + 1) == coef:
        return
    adjustments.add(Adjustment("kl_coef", coef, step, reason))
    print_line(
        f"warning: the KL coefficient is {coef:g} from step {step + 1} on (health.kl_coef)",
        rank_0_only=True,
    )
