"""The responses stop, roll_back and fixed_kl_coef to health rules."""

from __future__ import annotations

from typing import Literal

from rlhf_mc.config.health_schema import rolls_back
from rlhf_mc.observability.health_rules import RULES
from rlhf_mc.runtime.console import say
from rlhf_mc.trainer.adjustments import Adjustment
from rlhf_mc.trainer.checkpointing import Checkpoints
from rlhf_mc.trainer.health_watch import HealthWatch
from rlhf_mc.trainer.phases import save_checkpoint
from rlhf_mc.trainer.setup import Run
from rlhf_mc.trainer.step_report import StepState


class Unhealthy(Exception):
    """The response to a rule ends the run. Every rank raises it, after the step is logged."""

    def __init__(self, text: str, saves: bool) -> None:
        super().__init__(text)
        self.saves = saves
        """The last step is to be saved."""


def act(run: Run, checkpoints: Checkpoints, step: int, health: HealthWatch) -> Literal["continues", "rolled back"]:
    """Carry out the responses to the rules that count in a complete, logged step. Return "rolled back" if the run is to
    resume from an earlier step. Raise Unhealthy for the response stop, and where a roll-back is impossible. Every
    rank must call it."""
    found = {
        response_to(run, name): (name, text.removeprefix("health: ")) for name, text in reversed(health.last.acting)
    }
    if "stop" in found:
        name, text = found["stop"]
        rule = next(rule for rule in RULES if rule.name == name)
        line = f"{text}: {rule.meaning}; {rule.setting}; health.responses.{name} is stop: nothing is exported"
        raise Unhealthy(line, saves=True)
    if "roll_back" in found:
        name, text = found["roll_back"]
        health.rolled_back(name, to=roll_back(run, checkpoints, step, text))
        return "rolled back"
    if "fixed_kl_coef" in found:
        fix_kl_coef(run, step, found["fixed_kl_coef"][1])
    return "continues"


def response_to(run: Run, rule: str) -> str:
    """Return the configured response to a rule."""
    return str(getattr(run.config.health.responses, rule))


def save_start(run: Run, state: StepState, checkpoints: Checkpoints) -> None:
    """Save the weights before the first step, if a health rule may roll the run back to them. Every rank must call
    it."""
    position = checkpoints.position
    if rolls_back(run.config.health) and position.step == 0 and position.last_healthy_step is None:
        save_checkpoint(run, state, checkpoints)


def apply_adjustments(run: Run, step: int) -> None:
    """Set the learning rates of a step. The KL coefficient and the token budgets are read where they are used."""
    factor = run.adjustments.learning_rate_factor(step)
    for model in run.trained_models():
        model.scale_learning_rate(factor)


def roll_back(run: Run, checkpoints: Checkpoints, step: int, reason: str) -> int:
    """Let the run resume from the checkpoint of the last healthy step, with smaller learning rates. Return that step.
    Raise Unhealthy if there is none, or if that has been done health.max_rollbacks times. Every rank must call it.
    reason: the line of the rule."""
    health = run.config.health
    done = run.adjustments.count("learning_rate_factor")
    if done >= health.max_rollbacks:
        raise Unhealthy(
            f"{reason}; the run was rolled back {done} times before (health.max_rollbacks). Its settings have to "
            "change: a lower actor.optim.lr, fewer actor.ppo_epochs, a higher KL coefficient; remove "
            "adjustments.jsonl to begin with the learning rates of the config",
            saves=False,
        )
    start = checkpoints.roll_back()
    if start is None:
        raise Unhealthy(
            f"{reason}; there is no checkpoint of a healthy step to roll back to; set a lower actor.optim.lr, or "
            "resume another checkpoint with trainer.resume_from_path",
            saves=False,
        )
    run.adjustments.add(Adjustment("learning_rate_factor", health.rollback_lr_factor, start, reason))
    factor = run.adjustments.learning_rate_factor(start + 1)
    say(
        f"WARNING: rolled back from step {step} to step {start}; learning rates are those of the config times "
        f"{factor:g} from there on",
        rank_0_only=True,
    )
    return start


def fix_kl_coef(run: Run, step: int, reason: str) -> None:
    """Give the KL term the coefficient health.kl_coef from the next step on. Every rank must call it."""
    coef = run.config.health.kl_coef
    assert coef is not None, "validate.py ensures it"
    if run.adjustments.kl_coef(step + 1) == coef:
        return
    run.adjustments.add(Adjustment("kl_coef", coef, step, reason))
    say(f"WARNING: the KL coefficient is {coef:g} from step {step + 1} on (health.kl_coef)", rank_0_only=True)
