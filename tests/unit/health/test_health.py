"""The health rules on made-up metrics: each holds where it should and not beside it; lines appear
once; a replay gives the same state; mistakes in the settings are one line."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from rlhf_mc.config.checks import check_config
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.health_schema import HealthConfig, Rule
from rlhf_mc.config.load import dotted_keys, load_config
from rlhf_mc.health import conditions
from rlhf_mc.health.conditions import RunTraits
from rlhf_mc.health.monitor import Event, Monitor, keep_events_up_to
from rlhf_mc.health.rules import RULES
from rlhf_mc.trainer.health_watch import numeric_metrics

HEALTHY = {
    "actor/ppo_kl": 0.015,
    "actor/entropy": 0.5,
    "actor/grad_norm": 1.0,
    "actor/skipped": 0,
    "actor/reward_kl_penalty": 0.2,
    "critic/grad_norm": 1.0,
    "critic/score/mean": 0.5,
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "critic/vf_clipfrac": 0.0,
    "critic/vf_explained_var": 0.3,
    "global_seqlen/idle_share": 0.01,
    "num_turns/mean": 3.0,
    "perf/memory_used_ratio": 0.5,
    "perf/throughput": 1000.0,
    "response_length/clip_ratio": 0.0,
    "train/equal_groups_ratio": 0.3,
    "training/rollout_logprobs_diff_mean": 0.01,
    "training/rollout_logprobs_diff_p99": 0.1,
}
TRAITS = RunTraits(compares_groups=True, logprob_bound=0.1)
LAST = 12
"""Steps of the healthy beginning."""


@pytest.fixture(autouse=True)
def _short_reward_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reward_flat look at two windows, which the healthy beginning has."""
    monkeypatch.setattr(conditions, "REWARD_WINDOWS", 2)


class Recorded:
    """A monitor with its console lines and events."""

    def __init__(self, traits: RunTraits = TRAITS, **settings: Any) -> None:
        self.lines: list[str] = []
        self.events: list[Event] = []
        cfg = HealthConfig(**{"patience": 2, "window": 6, **settings})
        self.monitor = Monitor(cfg, traits, self.lines.append, self.events.append)
        self.verdict = None

    def steps(self, count: int, first: int = 1, **change: Any) -> Recorded:
        """Run healthy steps with some metrics changed. A change of a key may be a function of the
        step."""
        for step in range(first, first + count):
            changed = {
                key.replace("__", "/"): value(step) if callable(value) else value
                for key, value in change.items()
            }
            # A score with a trend, so that reward_flat does not hold.
            self.verdict = self.monitor.step(
                step, {**HEALTHY, "critic/score/mean": 0.5 + 0.001 * step, **changed}
            )
        return self

    def begun(self) -> set[str]:
        """Return the rules that have begun to count."""
        return {event.rule.name for event in self.events if event.event == "begins"}


CASES: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("not_finite", 1, {"actor__loss": math.nan}, {"actor__loss": 1e30}),
    ("not_finite", 1, {"critic__skipped": 0.25}, {"critic__skipped": 0.0}),
    ("kl_explosion", 1, {"actor__ppo_kl": 0.6}, {"actor__ppo_kl": 0.4}),
    ("kl_explosion", 1, {"actor__kl_loss": 5.1}, {"actor__kl_loss": 4.9}),
    (
        "policy_collapsed",
        2,
        {"actor__entropy": 1e-4, "critic__score__mean": 0.1, "actor__reward_kl_penalty": 9.0},
        {"actor__entropy": 1e-4, "critic__score__mean": 0.9, "actor__reward_kl_penalty": 9.0},
    ),
    ("ppo_kl_high", 2, {"actor__ppo_kl": 0.031}, {"actor__ppo_kl": 0.029}),
    ("grad_norm_growing", 2, {"actor__grad_norm": 10.1}, {"actor__grad_norm": 9.9}),
    ("entropy_falling", 2, {"actor__entropy": 0.15}, {"actor__entropy": 0.3}),
    ("entropy_low", 6, {"actor__entropy": 0.009}, {"actor__entropy": 0.011}),
    ("vf_clipfrac_high", 2, {"critic__vf_clipfrac": 0.06}, {"critic__vf_clipfrac": 0.04}),
    (
        "explained_variance_low",
        6,
        {"critic__vf_explained_var": -0.1},
        {"critic__vf_explained_var": 0.0},
    ),
    ("truncated", 2, {"response_length__clip_ratio": 0.11}, {"response_length__clip_ratio": 0.1}),
    (
        "reward_constant",
        2,
        {"critic__score__max": 0.0, "critic__score__mean": 0.0},
        {"critic__score__min": 1.0, "critic__score__mean": 1.0},
    ),
    (
        "reward_flat",
        2,
        {"critic__score__mean": 0.4},
        {"critic__score__mean": lambda step: 0.5 + 0.001 * step},
    ),
    ("reward_saturated", 2, {"critic__score__mean": 0.991}, {"critic__score__mean": 0.98}),
    ("equal_groups", 2, {"train__equal_groups_ratio": 0.95}, {"train__equal_groups_ratio": 0.85}),
    (
        "rollout_mismatch",
        1,
        {"training__rollout_logprobs_diff_p99": 1.1},
        {"training__rollout_logprobs_diff_p99": 0.9},
    ),
    (
        "groups_dropped",
        2,
        {"training__off_policy__dropped_groups": 1.0},
        {"training__off_policy__dropped_groups": 0.0},
    ),
    (
        "calls_failing",
        2,
        {"environment__failed_calls_ratio": 0.11},
        {"environment__failed_calls_ratio": 0.1},
    ),
    ("turns_falling", 2, {"num_turns__mean": 1.4}, {"num_turns__mean": 1.6}),
    ("throughput_falling", 2, {"perf__throughput": 490.0}, {"perf__throughput": 510.0}),
    (
        "replicas_unbalanced",
        2,
        {"global_seqlen__idle_share": 0.11},
        {"global_seqlen__idle_share": 0.09},
    ),
    ("memory_near_limit", 1, {"perf__memory_used_ratio": 0.96}, {"perf__memory_used_ratio": 0.94}),
]


@pytest.mark.parametrize(
    ("rule", "after", "bad", "good"), CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)]
)
def test_each_rule_counts_after_its_steps_and_not_on_the_other_side(
    rule: str, after: int, bad: dict[str, Any], good: dict[str, Any]
) -> None:
    begin = Recorded().steps(LAST)
    assert begin.begun() == set() and begin.verdict.num_active == 0
    early = begin.steps(after - 1, LAST + 1, **bad)
    assert rule not in early.begun()
    assert rule in early.steps(1, LAST + after, **bad).begun()
    assert rule not in Recorded().steps(LAST).steps(after + 3, LAST + 1, **good).begun()


def test_every_rule_has_a_case_a_response_and_texts_that_fit() -> None:
    names = [rule.name for rule in RULES]
    assert sorted(names) == sorted(get_args(Rule))
    assert set(names) == {case[0] for case in CASES}
    for rule in RULES:
        assert len(f"rlhf_mc:   {rule.meaning}; {rule.setting}") <= 120, rule.name
        for key in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", f"{rule.setting} {rule.more}"):
            assert key in dotted_keys() or key.endswith((".json", ".md")), f"{rule.name}: {key}"


def test_a_warning_appears_once_and_then_at_powers_of_ten() -> None:
    run = Recorded().steps(LAST).steps(105, LAST + 1, response_length__clip_ratio=0.5)
    assert run.lines == [
        "health: step 14: truncated: response_length/clip_ratio is 0.5, above 0.1, for 2 steps",
        "  answers are cut off before they end; raise data.max_response_length",
        "health: step 23: truncated in 10 steps since 14: response_length/clip_ratio is 0.5",
        "health: step 113: truncated in 100 steps since 14: response_length/clip_ratio is 0.5",
    ]
    run.lines.clear()
    run.steps(2, LAST + 106).steps(5, LAST + 108, response_length__clip_ratio=0.5)
    assert run.lines == []  # the second time
    assert [(event.event, event.step, event.count) for event in run.events] == [
        ("begins", 14, 2),
        ("ends", 118, 105),
        ("begins", 121, 2),
    ]
    run.monitor.close(124)
    assert run.lines == ["health: truncated: in 108 of 124 steps, from 14 to 124"]


def test_responses_note_disable_and_stop() -> None:
    bad = {"actor__ppo_kl": 0.7}
    noted = Recorded(note=["kl_explosion"], disable=["ppo_kl_high"]).steps(5, **bad)
    assert noted.begun() == {"kl_explosion"} and noted.lines == []
    noted.monitor.close(5)
    assert noted.lines == [] and noted.verdict.acting == () and not noted.verdict.is_healthy
    stopping = Recorded(stop=["kl_explosion"]).steps(1, **bad)
    (acting,) = stopping.verdict.acting
    assert (acting.event, acting.action, acting.rule.name) == ("acts", "stop", "kl_explosion")
    assert len(stopping.lines) == 2
    stopping.steps(2, 2, **bad)
    assert [event.event for event in stopping.events if event.rule.name == "kl_explosion"] == [
        "begins",
        "acts",
    ]
    again = Recorded(stop=["kl_explosion"])
    again.monitor.replay(1, {**HEALTHY, "actor/ppo_kl": 0.7})  # the run that was ended resumes
    again.steps(1, 2, **bad)
    assert [event.event for event in again.events if event.rule.name == "kl_explosion"] == ["acts"]


def test_an_event_is_a_row_of_strict_json() -> None:
    run = Recorded().steps(1, actor__loss=math.inf)
    row = json.loads(json.dumps(run.events[0].row("run-1"), allow_nan=False))
    assert set(row) == {
        *(
            "step",
            "run_id",
            "time",
            "rule",
            "metric",
            "value",
            "bound",
            "count",
            "action",
            "event",
            "text",
        ),
    }
    assert (row["metric"], row["value"], row["bound"], row["run_id"]) == (
        "actor/loss",
        None,
        "not finite",
        "run-1",
    )


def test_rules_that_a_run_lacks_the_grounds_for_are_silent() -> None:
    traits = RunTraits(compares_groups=False, logprob_bound=None)
    bad = {
        "train__equal_groups_ratio": 1.0,
        "training__rollout_logprobs_diff_mean": 9.0,
    }
    assert Recorded(traits).steps(20, **bad).begun() == set()
    monitor = Recorded().monitor
    # a run without critic, reference and comparison, in which the actor is not trained yet
    for step in range(1, 20):
        assert monitor.step(step, {"perf/throughput": 1.0}).num_active == 0


def test_a_collapse_needs_a_policy_that_had_entropy() -> None:
    """Take no deterministic model, nor one without reference whose score has risen, for a collapsed
    one."""
    dead = {"actor__entropy": 1e-5, "critic__score__mean": 0.0, "actor__reward_kl_penalty": 9.0}
    assert "policy_collapsed" not in Recorded().steps(9, **dead).begun()
    near = {**dead, "actor__reward_kl_penalty": 0.9}
    assert "policy_collapsed" not in Recorded().steps(3).steps(9, 4, **near).begun()
    without_reference = {**dead, "actor__reward_kl_penalty": None}
    run = Recorded().steps(3)
    for step in range(4, 9):
        metrics = {
            **HEALTHY,
            **{key.replace("__", "/"): value for key, value in without_reference.items()},
        }
        run.monitor.step(step, {key: value for key, value in metrics.items() if value is not None})
    assert "policy_collapsed" in run.begun()


def test_replayed_steps_give_the_state_of_an_uninterrupted_run() -> None:
    draws = random.Random(1)
    rows = [
        {key: value * draws.choice([1, 1, 1, 0.01, 30, math.nan]) for key, value in HEALTHY.items()}
        for _ in range(60)
    ]
    whole = Recorded()
    for step, row in enumerate(rows, start=1):
        whole.monitor.step(step, row)
    assert len(whole.events) > 30
    for resumed_after in (1, 17, 40):
        resumed = Recorded()
        for step, row in enumerate(rows, start=1):
            if step <= resumed_after:
                stored = {key: None if math.isnan(value) else value for key, value in row.items()}
                resumed.monitor.replay(
                    step,
                    numeric_metrics(
                        json.loads(json.dumps({"step": step, "run_id": "a", **stored}))
                    ),
                )
            else:
                resumed.monitor.step(step, row)
        assert repr(resumed.events) == repr(
            [event for event in whole.events if event.step > resumed_after]
        )
        later = [
            line
            for line in whole.lines
            if line.startswith("health") and int(line.split()[2][:-1]) > resumed_after
        ]
        assert [line for line in resumed.lines if line.startswith("health")] == later


def test_a_roll_back_is_kept_by_a_resume_from_the_step_that_it_led_back_to(tmp_path: Path) -> None:
    path = tmp_path / "health.jsonl"
    rows = [
        {"step": 1, "event": "begins"},
        {"step": 5, "event": "rolled back", "rolled_back_to": 3},
        {"step": 3, "event": "ends"},
        {"step": 6, "event": "begins"},
        {"step": 6, "event": "rolled back", "rolled_back_to": 2},
        {"step": 4, "event": "begins"},
    ]
    for step, kept in {4: [0, 1, 2, 4, 5], 3: [0, 1, 2, 4], 2: [0, 1, 4], 1: [0], 0: []}.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 1')
        keep_events_up_to(path, step)
        assert [json.loads(line) for line in path.read_text().splitlines()] == [
            rows[i] for i in kept
        ], step


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["health.stop=[throughput_falling]"],
            "health.stop: found the list ['throughput_falling'], expected a list, ",
        ),
        (["health.warn=[truncate]"], "expected a list, each entry one of not_finite, kl_explosion"),
        (
            ["health.warn=truncated", "health.stop=truncated"],
            "health.warn and health.stop are both responses to truncated; a rule has one",
        ),
        (
            ["health.kl_coef=0.1", "health.stop=kl_explosion", "algorithm.use_kl_in_reward=true"],
            "health.stop and health.kl_coef are both responses to kl_explosion; a rule has one",
        ),
        (
            ["health.ppo_kl_max=often"],
            "health.ppo_kl_max: found the string 'often', expected a finite number",
        ),
        (["health.ppo_kl_max=.inf"], "expected a finite number"),
        (["health.truncated_max=1.5"], "health.truncated_max is 1.5; it must be at most 1"),
        (["health.rollback_lr_factor=1"], "health.rollback_lr_factor is 1.0; it must be below 1"),
        (["health.window=1"], "health.window is 1; it must be at least 2"),
        (
            ["health.ppo_kl_max=0.6"],
            "health.ppo_kl_max is 0.6; it must be at most health.ppo_kl_explosion, 0.5",
        ),
        (
            ["health.ppo_kl_min=0.05"],
            "unknown key 'health.ppo_kl_min'; the nearest known key is 'health.ppo_kl_max'",
        ),
    ],
)
def test_mistakes_in_the_settings_are_one_line(
    settings: list[str], message: str, tmp_path: Path
) -> None:
    needed = [
        "data.train_files=t",
        "data.val_files=v",
        "model.path=m",
        f"trainer.default_local_dir={tmp_path}",
    ]
    with pytest.raises(UserError) as error:
        check_config(load_config({}, [*needed, *settings]), 1)
    assert message in str(error.value) and "\n" not in str(error.value)
