"""Each health rule is provoked by a real run; a run with the response stop ends on every rank,
without an export."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import cases
import health_cases
import pytest
from tiny import make_workspace, write_config

from rlhf_mc.health.rules import RULES

pytestmark = pytest.mark.dist
TRAINER = {"test_freq": -1, "val_before_train": False}
SCORES = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(extra_info["index"] != 0)
"""
"""All responses to a prompt score the same; one prompt of the file scores lower than the others."""
CHANGING_SCORES = """
import time

CALLS_PER_STEP = 16  # 8 prompts with 2 responses
calls = 0
began = None

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global calls, began
    began = began or time.monotonic()
    step = calls // CALLS_PER_STEP + 1
    if step == 8 and calls % CALLS_PER_STEP == 0:
        time.sleep(time.monotonic() - began)
    calls += 1
    score = len(solution_str) / 10 + solution_str.count("1")
    return score if step < 8 else 1000 * score
"""
"""Step 8 takes as long as the steps before it together, and from then on the scores are 1000 times
as high."""
KEYED_SCORES = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, api_key=None):
    if not api_key.startswith("sk-"):
        raise ValueError("no key")
    return len(solution_str) / 10 + solution_str.count("1")
"""
"""Scores as by tiny.REWARD, of a service that asks for a key."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = make_workspace(tmp_path_factory.mktemp("health_rules"), num_hidden_layers=1)
    (workspace / "scores.py").write_text(SCORES)
    (workspace / "changing_scores.py").write_text(CHANGING_SCORES)
    (workspace / "keyed_scores.py").write_text(KEYED_SCORES)
    return write_config(workspace, trainer=TRAINER)


@pytest.fixture(scope="module")
def thrown_off(pool: Any, config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run with far too high learning rates, narrow value clipping, short responses and a reward
    function that changes. Bounds that no small run on a CPU exceeds within seconds are set to what
    it has."""
    (found,) = pool(1).run(
        health_cases.train,
        config_path=str(config),
        overrides=[
            f"trainer.default_local_dir={tmp_path_factory.mktemp('thrown_off')}",
            "trainer.total_training_steps=10",
            "trainer.seed=2",
            f"custom_reward_function.path={config.parent / 'changing_scores.py'}",
            "reward.num_workers=1",
            "data.max_response_length=4",
            "actor.optim.lr=0.05",
            "critic.optim.lr=0.05",
            "critic.cliprange_value=1e-4",
            "health.patience=1",
            "health.window=4",
            "health.entropy_min=3",
            "health.warn=[policy_collapsed]",
            "trainer.max_rollout_logprob_diff=1e-9",
        ],
        change="checked",
        rule_bounds={"memory_near_limit": 0.001},
    )
    result: dict[str, Any] = found
    return result


@pytest.fixture(scope="module")
def no_signal(pool: Any, config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run GRPO on scores that do not depend on the response."""
    workspace = config.parent
    (found,) = pool(1).run(
        health_cases.train,
        config_path=str(config),
        overrides=[
            f"trainer.default_local_dir={tmp_path_factory.mktemp('no_signal')}",
            "trainer.total_training_steps=8",
            f"custom_reward_function.path={workspace / 'scores.py'}",
            "algorithm.adv_estimator=grpo",
            "algorithm.use_kl_in_reward=false",
            "algorithm.kl_ctrl.type=fixed",
            "actor.entropy_coeff=0",
            "health.patience=1",
            "health.window=4",
        ],
        bounds={"health.conditions.REWARD_WINDOWS": 1},
    )
    result: dict[str, Any] = found
    return result


def begun(result: dict[str, Any]) -> set[str]:
    return {event["rule"] for event in result["events"] if event["event"] == "begins"}


@pytest.fixture(scope="module")
def broken(
    pool: Any, config: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Run two steps on two ranks whose reference computes NaN, and that skip all updates."""
    found: list[dict[str, Any]] = pool(2).run(
        health_cases.train,
        config_path=str(config),
        overrides=[
            f"trainer.default_local_dir={tmp_path_factory.mktemp('broken')}",
            "health.patience=1",
            "trainer.total_training_steps=2",
            "algorithm.kl_ctrl.type=fixed",
        ],
        change="nan reference",
        bounds={"setup.build.MOST_CONSECUTIVE": 100},
        rule_bounds={"replicas_unbalanced": 0.0},
    )
    return found


def test_each_rule_is_provoked_by_a_run(
    thrown_off: dict[str, Any], no_signal: dict[str, Any], broken: list[dict[str, Any]]
) -> None:
    assert [result["error"] for result in (thrown_off, no_signal, *broken)] == [None] * 4
    assert {
        "kl_explosion",
        "ppo_kl_high",
        "entropy_falling",
        "policy_collapsed",
        "truncated",
        "grad_norm_growing",
        "throughput_falling",
    } <= begun(thrown_off)
    assert {"reward_constant", "equal_groups"} <= begun(no_signal)
    assert {"not_finite", "replicas_unbalanced"} <= begun(broken[0])
    # By test_pooled_rollout.py and test_observations.py; turns that fall take longer runs.
    elsewhere = {"groups_dropped", "calls_failing", "turns_falling"}
    assert (
        begun(thrown_off) | begun(no_signal) | begun(broken[0])
        == {rule.name for rule in RULES} - elsewhere
    )


def test_rank_0_alone_prints(broken: list[dict[str, Any]]) -> None:
    first, second = (result["printed"] for result in broken)
    assert any(line.startswith("rlhf_mc: health: step ") for line in first)
    assert not any("health" in line for line in second)


def test_each_rule_is_printed_once_and_counted(thrown_off: dict[str, Any]) -> None:
    printed = thrown_off["printed"]
    for rule in RULES:
        lines = [
            line
            for line in printed
            if line.startswith("rlhf_mc: health: step ") and f": {rule.name}: " in line
        ]
        assert len([line for line in lines if " since " not in line]) <= 1, lines
    assert not [
        line
        for line in printed
        if line.startswith(("rlhf_mc: health", "rlhf_mc:   ")) and len(line) > 120
    ]
    rows = thrown_off["metrics"]
    active = [
        event for event in thrown_off["events"] if event["event"] == "begins" and event["step"] == 1
    ]
    assert rows[0]["health/num_active"] == len(active) >= 1


def test_stop_saves_and_ends_every_rank_without_an_export(
    pool: Any, config: Path, tmp_path: Path
) -> None:
    """Stop two ranks of one model replica, and resume them: they stop again."""
    overrides = [
        *cases.layout_overrides(2, 1, 1),
        f"trainer.default_local_dir={tmp_path}",
        "trainer.total_training_steps=6",
        "actor.optim.lr=0.05",
        "health.stop=[kl_explosion]",
    ]
    for step in (1, 2):
        ranks = pool(2).run(health_cases.train, config_path=str(config), overrides=overrides)
        errors = [rank["error"] for rank in ranks]
        assert errors[0] == errors[1] and "\n" not in errors[0]
        assert errors[0].startswith(f"step {step}: kl_explosion: actor/")
        assert errors[0].endswith(f"nothing is exported; the checkpoint of step {step} is complete")
        assert [row["step"] for row in ranks[0]["metrics"]] == list(range(1, step + 1))
        assert {(event["event"], event["action"]) for event in ranks[0]["events"]} >= {
            ("acts", "stop")
        }
        assert (tmp_path / f"global_step_{step}").is_dir()
        assert not (tmp_path / "hf").exists() and not (tmp_path / "success.json").exists()


def test_resumed_run_has_the_events_of_an_uninterrupted_one(
    pool: Any, config: Path, tmp_path: Path
) -> None:
    """Give the reward function a key, another one to the run that resumes: neither is in a file or
    a line."""

    def train(name: str, *more: str) -> dict[str, Any]:
        overrides = [
            f"custom_reward_function.path={config.parent / 'keyed_scores.py'}",
            f"custom_reward_function.reward_kwargs.api_key=sk-secret-{name.split()[0]}",
            f"trainer.default_local_dir={tmp_path / name}",
            "trainer.total_training_steps=6",
            "trainer.save_freq=3",
            "actor.optim.lr=0.02",
            "health.patience=4",
            "health.window=2",
            "health.disable=[throughput_falling]",
            *more,
        ]
        (found,) = pool(1).run(health_cases.train, config_path=str(config), overrides=overrides)
        result: dict[str, Any] = found
        return result

    whole = train("whole")
    for name in ("resumed", "without rows"):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        shutil.rmtree(tmp_path / name / "global_step_6")
    resumed = train("resumed")
    assert len({row["health/num_active"] for row in whole["metrics"]}) > 1
    assert any(event["step"] > 3 and event["count"] == 4 for event in whole["events"]), (
        "patience spans the resume"
    )
    assert without_times(resumed["events"]) == without_times(whole["events"])
    assert not [
        line for line in resumed["printed"] if "settings that differ" in line or "sk-secret" in line
    ]
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and b"sk-secret" in path.read_bytes()
    ]
    active = [
        [row["health/num_active"] for row in result["metrics"]] for result in (whole, resumed)
    ]
    assert active[0] == active[1]
    anew = train("without rows", "trainer.logger=[]", "actor.clip_ratio_low=0.3")
    assert [line for line in anew["printed"] if "settings that differ" in line] == [
        "rlhf_mc: settings that differ from the checkpoint's: actor.clip_ratio_low 0.2 -> 0.3"
    ]
    assert not [
        event
        for event in anew["events"]
        if event["step"] > 3 and event["count"] >= 4 and event["event"] == "begins"
    ]


def without_times(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**event, "time": None} for event in events]
